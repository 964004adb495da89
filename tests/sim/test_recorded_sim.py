"""What records say of outcomes is all that timelines want to know: at any moment of any life, with
and without a core, from the beginning and from any snapshot, they tell the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kaiten.v1.archive_pb2 import ArchivedRequest, Snapshot
from kaiten.v1.common_pb2 import Leader as LeaderMessage
from kaiten.v1.ledger_pb2 import FoldedTokens, JournalRecord, SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import Commit, InboxEntry, Leader
from scheduler_svc import wire
from scheduler_svc.core.commands import (
    Command,
    Configured,
    MakePlan,
    StepDone,
    StoreBehind,
    Submit,
    WorkerDraining,
    WorkerLate,
)
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import Request
from scheduler_svc.journal import Journal
from scheduler_svc.recorded import Recorded
from scheduler_svc.request_book import BookedRequest, RequestBook
from scheduler_svc.snapshots import Snapshots
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import Timeline, mentioned, timelines_of
from scheduler_svc.timeline_track import (
    BEHIND,
    NO_WORKER,
    NOT_ARCHIVED,
    PREEMPTED,
    WORKER_LOST,
    Phase,
)
from tests.sim.test_scheduler_sim import COMBINATIONS, World, shared

EPOCH = 7
BETWEEN_STEPS = (Phase.QUEUE, Phase.PREFILL)


@dataclass
class Late:
    """A reader who began at a snapshot, and whom it can tell of: who came later."""

    snapshot: Snapshot
    read: Timelines = field(default_factory=Timelines)

    def __post_init__(self) -> None:
        self.recorded = Recorded(self.read)
        self.recorded.begin(self.snapshot, EPOCH)
        self.lived = {request.id for request in self.snapshot.requests}
        self.knows: set[str] = set()


@dataclass
class Journaled(World):
    """Its timelines are told by the core, and by the records alone."""

    told: Timelines = field(default_factory=Timelines)
    read: Timelines = field(default_factory=Timelines)
    compared: int = 0
    compared_late: int = 0
    whys: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.crash_percent = max(1, self.crash_percent)
        self.book = RequestBook(self)
        leader = Leader(epoch=EPOCH, nonce=1, journal_seq=0, after_seq=0)
        self.journal = Journal(self.book, leader)
        self.recorded = Recorded(self.read)
        self.late: list[Late] = []
        self.snapshots = Snapshots(self, self.told, self.scheduler)
        self.has_begun = self.is_behind = False
        self.draining: set[str] = set()

    def turn(self) -> None:
        """Some workers are late or leave, and the store does not always keep up."""
        rng, workers = self.rng, self.scheduler.workers
        if rng.random() < (0.5 if self.is_behind else 0.03):
            self.is_behind = not self.is_behind
            self.apply(StoreBehind(is_behind=self.is_behind))
        for worker_id, worker in workers.items():
            if worker.flights and rng.random() < 0.03:
                self.apply(WorkerLate(worker_id=worker_id))
        if len(workers) > 1 and rng.random() < 0.01 and workers.keys() - self.draining:
            leaving = min(workers.keys() - self.draining)
            self.draining.add(leaving)
            self.apply(WorkerDraining(worker_id=leaving))
        super().turn()

    def drain(self) -> None:
        for worker_id in self.draining & self.workers.keys():
            self.kill_worker(worker_id)
        self.draining = set(self.scheduler.workers)
        super().drain()

    def apply(self, command: Command) -> Outcome:
        if isinstance(command, Submit):
            self.take_in(command.request)
        outcome = super().apply(command)
        if isinstance(command, MakePlan) and outcome.plan is None:
            return outcome
        if not self.has_begun:
            self.has_begun = True
            self.told.lead_anew(self.now_ns)
        waiting = self.scheduler.waiting
        self.told.take(command, outcome, self.now_ns, waiting)
        message = self.message(command, outcome)
        commit = self.journal.write(command, outcome, self.now_ns, message, waiting)
        if commit is not None:
            self.feed(commit)
            if self.rng.random() < 0.1:
                self.begin_late()
            if self.rng.random() < 0.1 and self.requests:
                self.compare(self.rng.choice(self.requests))
        return outcome

    def message(self, command: Command, outcome: Outcome) -> Any:
        """To a worker, or from one."""
        if (plan := outcome.plan) is not None:
            samplings = [self.book.sampling(join.sequence_id) for join in plan.joins]
            return wire.plan_to_proto(plan, LeaderMessage(), samplings)
        if isinstance(command, StepDone):
            return StepMessage(plan_id=command.result.plan_id, step=command.result.step)
        return None

    def take_in(self, request: Request) -> None:
        record = SubmitRecord(
            id=request.id,
            tenant=request.tenant,
            n=request.n,
            prompt_token_ids=request.prompt,
            sampling=RowSampling(max_tokens=request.max_tokens, logprobs=-1),
        )
        entry = InboxEntry(entry_id="0-0", sequence_id=request.sequence_id, record=record)
        self.book.add(BookedRequest(entry=entry, record=record))

    def request(
        self, entry: InboxEntry, record: SubmitRecord, outputs: Sequence[FoldedTokens | None] = ()
    ) -> None:
        """As an archive is told of it."""
        archived = ArchivedRequest(
            entry_id=entry.entry_id, sequence_id=entry.sequence_id, submit=record
        )
        archived.submit.ClearField("prompt_token_ids")
        self.recorded.take_in(archived)
        for late in self.late:
            late.recorded.take_in(archived)
            late.knows.add(record.id)

    def record(self, record: JournalRecord, data: bytes = b"") -> None:
        """Read at once."""

    wants_snapshot = True

    def snapshot(self, seq: int, made: Callable[[], Snapshot]) -> None:
        self.made = made

    def feed(self, commit: Commit) -> None:
        record = JournalRecord.FromString(commit.data)
        for recorded in (self.recorded, *(late.recorded for late in self.late)):
            assert not recorded.feed(record)

    def begin_late(self) -> None:
        """Somebody begins to read behind a record that is made for it."""
        configured = Configured(config=self.scheduler.config, policy="fcfs")
        commit = self.snapshots.due(self.journal, configured, self.now_ns)
        assert commit is not None
        self.feed(commit)
        snapshot = Snapshot.FromString(self.made().SerializeToString())
        assert snapshot.seq == commit.record.seq
        self.late = [*self.late[:3], *self.late[3:][-2:], Late(snapshot)]

    def compare(self, request: Request) -> None:
        told, read = (timelines_of(each.snapshot(request.id)) for each in (self.told, self.read))
        assert read == told
        self.compared += bool(told)
        names = self.read.names(mentioned(read))
        for late in self.late:
            if request.id in late.knows:
                assert timelines_of(late.read.snapshot(request.id)) == told
                assert late.read.names(mentioned(told)) == names
                self.compared_late += 1
            elif request.id in late.lived:
                self.compare_lived(late, request.id, told)
        self.whys |= {interval.why for each in told for interval in each.intervals}

    def compare_lived(self, late: Late, id: str, told: Sequence[Timeline]) -> None:
        """What lived at a snapshot is told from then on, and that it was there before."""
        by_choice = {each.choice: each for each in told}
        for each in timelines_of(late.read.snapshot(id)):
            whole, at_ns = by_choice[each.choice], late.snapshot.now_ns
            assert (each.ended, each.num_preemptions) == (whole.ended, whole.num_preemptions)
            first = each.intervals[0]
            assert first.why == NOT_ARCHIVED or first.start_ns == at_ns
            assert (each.intervals[0].start_ns, each.intervals[-1].end_ns) == (
                whole.intervals[0].start_ns,
                whole.intervals[-1].end_ns,
            )
            # Steps that it sat out before are not known, so that how it decoded may read otherwise.
            own, all_of_it = (
                [i for i in one.intervals if i.start_ns > at_ns and i.phase in BETWEEN_STEPS]
                for one in (each, whole)
            )
            assert own == all_of_it


def live(seed: int, **more: Any) -> Journaled:
    world = Journaled(seed, **more)
    world.run(turns=150, requests=30)
    world.drain()
    for request in world.requests:
        world.compare(request)
    assert world.compared >= len(world.requests) > 5
    return world


WINDOWS = ((None,), (None, 12), (5, 30))


@pytest.mark.parametrize("windows", [WINDOWS[index] for index in shared(range(3))], ids=str)
def test_all_that_a_life_was_made_of_stands_in_its_records(
    windows: tuple[int | None, ...],
) -> None:
    worlds = [live(seed, windows=windows, slot_tokens_max=1 + seed % 3) for seed in range(8)]
    assert sum(world.compared_late for world in worlds) > 300
    whys = {why for world in worlds for why in world.whys}
    causes = (Why.NO_SLOT, Why.TENANT, Why.STORE_BEHIND, Why.LATE, Why.BLOCKS)
    assert whys >= {each.value for each in causes} | {WORKER_LOST, NO_WORKER, BEHIND}
    assert any(why.startswith(PREEMPTED) for why in whys)


@pytest.mark.parametrize("index", shared(range(0, len(COMBINATIONS), 3)))
def test_under_other_rules(index: int) -> None:
    """Flex requests give way, too."""
    live(1000 + index, knobs=COMBINATIONS[index])
