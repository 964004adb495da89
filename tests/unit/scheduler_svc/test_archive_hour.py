"""An hour of three leaders, in mock time, decided again from its archive: bit for bit."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import pytest

from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveHeader
from kaiten.v1.common_pb2 import Leader as LeaderMessage
from kaiten.v1.ledger_pb2 import (
    FoldedTokens,
    JournalRecord,
    SequenceFinished,
    SubmitRecord,
)
from kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from kaiten.v1.worker_service_pb2 import RowSampling
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import Commit, InboxEntry, Recovered
from ledger import Leader as Elected
from ledger.archive import ArchiveBounds, ArchiveWriter, entries, segments
from ledger.archive.reader import EVERYTHING, Wanted
from scheduler_svc import wire
from scheduler_svc.archived_timeline import archived_timeline
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.core.commands import Command, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal import Journal
from scheduler_svc.recorded import Recorded
from scheduler_svc.replay import Compared, Skipped, replay_archive
from scheduler_svc.request_book import BookedRequest, RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import timelines_of
from tests.fakes.model_worker import ModelWorker
from tests.support.cell import spec

SECOND = 1_000_000_000
HOUR_S = 3600
# So few blocks that rows are preempted, and so small steps that prompts are cut.
WORKER = spec(blocks=60, slots=8, step_tokens=24)
MINDS = (
    SchedulerSettings(mix="prefill_first"),
    SchedulerSettings(policy="priority", lease_steps_max=2, tenant_tokens_max=120),
    SchedulerSettings(policy="fcfs", order="shortest", plans_in_flight_max=1),
)
# What an older scheduler did not write of a plan.
OUTCOMES = (
    *("join_computed_tokens", "join_skipped_blocks", "join_blocks"),
    *("join_swapped_in_blocks", "chunk_slots", "chunk_slot_tokens"),
    *("preempted_whys", "passed_over", "passed_over_whys"),
)
BOUNDS = ArchiveBounds(bytes_max=64 << 20, age_s_max=3600.0)


class World:
    """What outlives a leader: the clock, and what the ledger has of every request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ns = SECOND
        self.seq = 0
        self.entries: dict[int, InboxEntry] = {}
        self.tokens: dict[int, FoldedTokens] = {}
        self.finished: dict[int, SequenceFinished] = {}
        self.max_tokens_of: dict[int, int] = {}
        self.preempted = self.resumed = 0

    def accept(self, rng: random.Random) -> InboxEntry:
        """A request of somebody."""
        sequence_id = 1 + len(self.max_tokens_of)
        prompt = [rng.randrange(1000) for _ in range(rng.randint(3, 60))]
        record = SubmitRecord(
            id=f"t:{sequence_id}",
            tenant=rng.choice("ab"),
            n=rng.randint(1, 2),
            prompt_token_ids=prompt,
            sampling=RowSampling(max_tokens=rng.randint(2, 40), logprobs=-1),
            priority=rng.randint(0, 2),
            timeout_ms=rng.choice((0, 0, 0, 30_000)),
        )
        entry = InboxEntry(
            entry_id=f"{self.now_ns // 1_000_000}-0", sequence_id=sequence_id, record=record
        )
        for choice in range(record.n):
            self.tokens[sequence_id + choice] = FoldedTokens()
            self.max_tokens_of[sequence_id + choice] = record.sampling.max_tokens
        self.entries[sequence_id] = entry
        return entry

    def commit(self, commit: Commit) -> None:
        record = commit.record
        self.seq = record.seq
        for sequence_id, token in zip(record.sequence_ids, record.token_ids, strict=True):
            self.tokens[sequence_id].token_ids.append(token)
        for ending in record.finished:
            self.finished[ending.sequence_id] = ending
        for result in commit.endings:
            del self.entries[result.sequence_id]

    def recovered(self) -> Recovered:
        """As a new leader finds it."""
        return Recovered(
            entries=tuple(self.entries.values()),
            tokens=self.tokens,
            folded_counts={one: len(output.token_ids) for one, output in self.tokens.items()},
            finished=self.finished,
            prompt_logprobs_from={},
            journal_seq=self.seq,
            decided_ns=0,
            cursor="0-0",
            damaged={},
        )


class Leader:
    """One leadership without a loop: a step a second."""

    def __init__(self, world: World, epoch: int, settings: SchedulerSettings) -> None:
        header = ArchiveHeader(
            epoch=epoch,
            journal_seq=world.seq,
            after_seq=world.seq,
            configured=configured_to_proto(settings.configured),
            has_tokens=True,
            has_outcomes=True,
            unix_ns=world.now_ns,
        )
        self.world = world
        self.archive = ArchiveWriter(world.folder, header, BOUNDS)
        self.book = RequestBook(self.archive)
        seq = world.seq
        self.journal = Journal(
            self.book, Elected(epoch=epoch, nonce=1, journal_seq=seq, after_seq=seq)
        )
        self.core = Scheduler()
        self.worker = ModelWorker(
            "w", WORKER, world.max_tokens_of, stop_every=0, bad_sequence_ids=set()
        )
        self.tell(settings.configured)
        for entry in list(world.entries.values()):
            world.resumed += 1
            self.take_in(entry, world.recovered())
        self.tell(WorkerJoined(worker_id="w", spec=WORKER))

    def take_in(self, entry: InboxEntry, recovered: Recovered | None = None) -> None:
        assert isinstance(entry.record, SubmitRecord)
        booked = BookedRequest(entry=entry, record=entry.record)
        outputs: tuple[tuple[int, ...] | None, ...] = ()
        if recovered is None:
            self.book.add(booked)
        else:
            outputs = self.book.resume(booked, recovered)
        arrived_ns = wire.entry_time_ns(entry.entry_id)
        request = wire.request_from_proto(entry, entry.record, arrived_ns, outputs)
        self.tell(Submit(request=request))

    def tell(self, command: Command) -> None:
        outcome = self.core.apply(command, self.world.now_ns)
        self.put(self.write(command, outcome))

    def write(
        self, command: Command, outcome: Outcome, message: PlanMessage | StepMessage | None = None
    ) -> Commit | None:
        waiting = self.core.waiting
        return self.journal.write(command, outcome, self.world.now_ns, message, waiting)

    def put(self, commit: Commit | None) -> None:
        if commit is not None:
            self.world.commit(commit)
            self.archive.record(commit.record, commit.data)

    def second(self) -> None:
        """Whatever is planned, and one step."""
        now_ns = self.world.now_ns = self.world.now_ns + SECOND
        asked = MakePlan(worker_id="w")
        outcome = self.core.apply(asked, now_ns)
        if (plan := outcome.plan) is not None:
            samplings = [self.book.sampling(join.sequence_id) for join in plan.joins]
            message = wire.plan_to_proto(plan, LeaderMessage(), samplings)
            self.put(self.write(asked, outcome, message))
            self.worker.send(plan)
            self.world.preempted += len(plan.preempted)
        if (result := self.worker.step()) is not None:
            command = StepDone(result=result)
            told = StepMessage(plan_id=result.plan_id, step=result.step, token_ids=result.tokens)
            outcome = self.core.apply(command, now_ns)
            self.put(self.write(command, outcome, told))


def lead_for_an_hour(folder: Path) -> World:
    """Each mind for twenty minutes; what is live when one ends goes on under the next."""
    world, rng = World(folder), random.Random(7)
    for epoch, settings in enumerate(MINDS, start=1):
        leader = Leader(world, epoch, settings)
        for second in range(HOUR_S // len(MINDS)):
            # Somebody in every fifth second, and nobody in the last minute of the hour.
            if rng.random() < 0.2 and (epoch < len(MINDS) or second < 1000):
                leader.take_in(world.accept(rng))
            leader.second()
        leader.archive.close(60.0)
    return world


def compared(folder: Path, policy: str | None = None) -> Iterator[Compared]:
    for one in replay_archive(entries([folder]), policy):
        assert isinstance(one, Compared), one
        yield one


class Hour(NamedTuple):
    """What is left of it."""

    folder: Path
    world: World


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Hour:
    folder = tmp_path_factory.mktemp("archive")
    return Hour(folder, lead_for_an_hour(folder))


def test_a_recorded_hour_is_decided_again(hour: Hour) -> None:
    world = hour.world
    assert world.resumed > 3
    assert world.preempted > 20
    records = [one.record for one in entries([hour.folder]) if one.HasField("record")]
    assert [record.seq for record in records] == list(range(1, world.seq + 1))
    assert records[-1].unix_ns - records[0].unix_ns > 3000 * SECOND
    decisions = list(compared(hour.folder))
    assert [one for one in decisions if not one.is_equal] == []
    assert sum("plan" in one.what for one in decisions) > 1000
    assert not all(one.is_equal for one in compared(hour.folder, policy="static"))
    assert [one.header.configured.policy for one in segments([hour.folder])] == [
        settings.policy for settings in MINDS
    ]
    # As by a version that plans something else, and one that plans nothing.
    for change in (otherwise, unplanned):
        # Of its leader and the next one.
        found = list(takewhile(lambda one: one.header.epoch < 3, entries([hour.folder])))
        seq = changed(found, change)
        told = list(replay_archive(found))
        (skipped,) = (one for one in told if isinstance(one, Skipped))
        assert (skipped.epoch, skipped.why.partition(":")[0]) == (1, "it is decided otherwise now")
        assert skipped.seq < seq + 2
        at = told.index(skipped)
        assert len([one for one in told[:at] if not one.is_equal]) <= 1  # type: ignore[union-attr]
        rest = told[at + 1 :]
        assert rest
        assert all(isinstance(one, Compared) and one.is_equal for one in rest)


def test_what_is_recorded_is_told_as_what_is_decided_again(hour: Hour) -> None:
    """Of every request, under however many leaders; also where it would be decided otherwise now,
    and where there are no tokens.
    """
    found = list(entries([hour.folder]))
    decided, read = Timelines(), Timelines()
    assert all(isinstance(one, Compared) for one in replay_archive(found, timelines=decided))
    changed(found, otherwise)
    for entry in found:
        if entry.HasField("header"):
            entry.header.has_tokens = False
        elif entry.HasField("request"):
            entry.request.submit.ClearField("prompt_token_ids")
    assert not list(replay_archive(found, timelines=read, recorded=Recorded(read)))
    ids = {entry.request.submit.id for entry in found if entry.HasField("request")}
    assert len(ids) > 200
    assert hour.world.resumed
    for id in sorted(ids)[::6]:
        assert timelines_of(read.snapshot(id)) == timelines_of(decided.snapshot(id)) != ()


def test_an_older_archive_is_decided_again(hour: Hour) -> None:
    """The same is told of it."""

    def older(wanted: Wanted) -> Iterator[ArchiveEntry]:
        for entry in entries([hour.folder], wanted):
            if entry.HasField("header"):
                entry.header.has_outcomes = False
            for item in entry.record.inputs:
                for name in OUTCOMES if item.HasField("plan") else ():
                    item.plan.ClearField(name)
            yield entry

    found = [entry.request.submit for entry in older(EVERYTHING) if entry.HasField("request")]
    # One at least under each leader.
    for submit in found[len(found) // 6 :: len(found) // 3]:
        told = archived_timeline(partial(entries, [hour.folder]), submit.id)
        assert len(told.choices) == submit.n
        assert archived_timeline(older, submit.id) == told


def otherwise(record: JournalRecord, at: int) -> None:
    record.inputs[at].plan.digest += 1


def unplanned(record: JournalRecord, at: int) -> None:
    del record.inputs[at]


def changed(found: list[ArchiveEntry], change: Callable[[JournalRecord, int], None]) -> int:
    """The tenth plan; the number of its record."""
    plans = (
        (entry.record, at)
        for entry in found
        if entry.HasField("record")
        for at, item in enumerate(entry.record.inputs)
        if item.HasField("plan")
    )
    record, at = next(islice(plans, 10, None))
    change(record, at)
    return record.seq
