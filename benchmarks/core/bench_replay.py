"""What Explain costs of what only archives know, and what its snapshots cost who leads.

    python -m benchmarks.core.bench_replay [--records 80000] [--turns 3] [--others 20]
        [--beside FOLDER] [--save]

An archive of one leadership, which the real core and journal make in virtual time: two workers, for
whom a little more comes than they have blocks for, so that requests wait, give way and share
prefixes. The last that ended is asked for, as `SchedulerService.ReplayTimeline` does, of a process
of its own. CPU seconds of that process, its start included (`start_s`: how long that takes alone),
of the archive as it is (`late_s`), behind `--others` leaderships as large (`wide_s`), and without
snapshots (`replay_s`), when all of it is read; `--beside`: another tree's replay of that, in
turns.

Of the leader's time, what it takes to copy for snapshots (`due_us` of a plan, and the
longest), and to look at each turn whether one is due (`asked_us`); of the thread's, to make them
(`made_us` of a record). `deep`: one while 4,096 requests wait.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any, Final

from benchmarks.recording import ROOT, record
from kaiten.v1.archive_pb2 import ArchiveChunk, ArchiveEntry, ArchiveHeader, Snapshot
from kaiten.v1.common_pb2 import Leader as LeaderMessage
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineResponse
from kaiten.v1.worker_service_pb2 import RowSampling, StepTimings
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import Commit, InboxEntry
from ledger import Leader as Elected
from ledger.archive import ArchiveBounds, ArchiveWriter, segments
from ledger.archive.segment import HEAD_BYTES, Chunk, Span, entry_of, name_of, read, seal
from scheduler_svc import wire
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.core.commands import Command, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import StepResult, WorkerSpec
from scheduler_svc.journal import Journal
from scheduler_svc.replaying import CHILD
from scheduler_svc.request_book import BookedRequest, RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.snapshot_wire import snapshot_to_proto
from scheduler_svc.snapshots import Snapshots
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_snapshot import SNAPSHOT_CHOICES_MAX
from tests.fakes.model_worker import ModelWorker

EPOCH: Final = 1000
STEP_NS: Final = 20_000_000
WORKERS: Final = ("w1", "w2")
SPEC: Final = WorkerSpec(
    fingerprint="f",
    block_size=16,
    block_count=280,
    slots_max=16,
    step_tokens_max=528,
    mixed_tokens_max=144,
    vocab_size=32_000,
)
PREFIX_TOKENS: Final = 64
PROMPT_TOKENS: Final = (3, 400)
OUTPUT_TOKENS: Final = (20, 250)
# Of requests that come, by turn of both workers.
COME: Final = 0.15
# More than a snapshot ever has; chunks of records may have more.
SNAPSHOT_BYTES: Final = 1 << 20
BOUNDS: Final = ArchiveBounds(bytes_max=1 << 30, age_s_max=3600.0)


class Leadership:
    """One that is recorded, without a loop."""

    def __init__(self, folder: Path) -> None:
        settings = SchedulerSettings()
        configured = settings.configured
        header = ArchiveHeader(
            epoch=EPOCH,
            configured=configured_to_proto(configured),
            has_tokens=True,
            has_outcomes=True,
            unix_ns=1,
        )
        self._archive = ArchiveWriter(folder, header, BOUNDS)
        self._book = RequestBook(self._archive)
        self._journal = Journal(
            self._book, Elected(epoch=EPOCH, nonce=1, journal_seq=0, after_seq=0)
        )
        self._core, self._draw = Scheduler(), random.Random(1)
        self._configured, self._timelines = configured, Timelines()
        self._snapshots = Snapshots(self, self._timelines, self._core)
        self._now_ns, self._next_id = STEP_NS, 1
        self._max_tokens_of: dict[int, int] = {}
        self.num_records = self.num_preemptions = self.num_plans = 0
        # Of each snapshot, in the loop and in the thread.
        self.due_ns: list[int] = []
        self.made_ns: list[int] = []
        self.last_over = ""
        self._workers = [
            ModelWorker(id, SPEC, self._max_tokens_of, stop_every=0, base_us=9_000, token_us=40)
            for id in WORKERS
        ]
        self._tell(configured)
        for id in WORKERS:
            self._tell(WorkerJoined(worker_id=id, spec=SPEC))

    def lead(self, num_records: int) -> None:
        """Until so many are written."""
        while self.num_records < num_records:
            self._now_ns += STEP_NS
            if self._draw.random() < COME:
                self._accept()
            for worker in self._workers:
                self._plan(worker)
                self._step(worker)
            began_ns = time.thread_time_ns()
            if (commit := self.due()) is not None:
                self.due_ns.append(time.thread_time_ns() - began_ns)
                self._put(commit)
        self._archive.close(60.0)

    def due(self) -> Commit | None:
        """As a turn asks for it."""
        return self._snapshots.due(self._journal, self._configured, self._now_ns)

    # As an archive is asked

    @property
    def wants_snapshot(self) -> bool:
        return self._archive.wants_snapshot

    def snapshot(self, seq: int, made: Callable[[], Snapshot]) -> None:
        def timed() -> Snapshot:
            began_ns = time.thread_time_ns()
            point = made()
            self.made_ns.append(time.thread_time_ns() - began_ns)
            return point

        self._archive.snapshot(seq, timed)

    def request(self, *_: Any) -> None:
        """The archive's own is called."""

    def record(self, *_: Any) -> None:
        """The archive's own is called."""

    def _accept(self) -> None:
        draw, first = self._draw, self._next_id
        tenant = draw.choice("ab")
        prompt = [ord(tenant)] * PREFIX_TOKENS
        prompt += [draw.randrange(32_000) for _ in range(draw.randint(*PROMPT_TOKENS))]
        submit = SubmitRecord(
            id=f"{tenant}:{first}",
            tenant=tenant,
            n=draw.choice((1, 1, 1, 2)),
            prompt_token_ids=prompt,
            sampling=RowSampling(max_tokens=draw.randint(*OUTPUT_TOKENS), logprobs=-1),
        )
        self._next_id += submit.n
        for sequence_id in range(first, self._next_id):
            self._max_tokens_of[sequence_id] = submit.sampling.max_tokens
        entry_id = f"{self._now_ns // 1_000_000}-0"
        entry = InboxEntry(entry_id=entry_id, sequence_id=first, record=submit)
        self._book.add(BookedRequest(entry=entry, record=submit))
        self._tell(Submit(request=wire.request_from_proto(entry, submit, self._now_ns)))

    def _plan(self, worker: ModelWorker) -> None:
        asked = MakePlan(worker_id=worker.id)
        outcome = self._core.apply(asked, self._now_ns)
        if (plan := outcome.plan) is not None:
            self._see(asked, outcome)
            self.num_plans += 1
            samplings = [self._book.sampling(join.sequence_id) for join in plan.joins]
            message = wire.plan_to_proto(plan, LeaderMessage(), samplings)
            self._journal.write(asked, outcome, self._now_ns, message, self._core.waiting)
            worker.send(plan)
            self.num_preemptions += len(plan.preempted)

    def _step(self, worker: ModelWorker) -> None:
        if (result := worker.step()) is not None:
            self._tell(StepDone(result=result), step_of(result))

    def _tell(self, command: Command, message: StepMessage | None = None) -> None:
        outcome = self._core.apply(command, self._now_ns)
        self._see(command, outcome)
        waiting = self._core.waiting
        self._put(self._journal.write(command, outcome, self._now_ns, message, waiting))

    def _see(self, command: Command, outcome: Outcome) -> None:
        self._timelines.take(command, outcome, self._now_ns, self._core.waiting)

    def _put(self, commit: Commit | None) -> None:
        if commit is not None:
            self._archive.record(commit.record, commit.data)
            self.num_records = commit.record.seq
            self.last_over = commit.endings[-1].id if commit.endings else self.last_over


def step_of(result: StepResult) -> StepMessage:
    """As its worker said it."""
    return StepMessage(
        boot_id=result.worker_id,
        plan_id=result.plan_id,
        step=result.step,
        slots=result.slots,
        token_ids=result.tokens,
        timings=StepTimings(forward_us=result.step_us),
    )


def replayed(tree: Path, folders: list[Path], id: str) -> tuple[float, ReplayTimelineResponse]:
    """CPU seconds of a tree's process, and what it told."""
    question = {"ids": [id], "since_ns": 0, "folders": list(map(str, folders)), "addresses": []}
    bounds = {"peer": {}, "cpu_s_max": 3600, "wall_s_max": 3600}
    before_s = children_s()
    done = subprocess.run(
        [sys.executable, "-m", CHILD],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin"},
        input=json.dumps(question | bounds).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return children_s() - before_s, ReplayTimelineResponse.FromString(done.stdout)


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(folder: Path, asked: argparse.Namespace) -> Iterator[tuple[str, object]]:
    leadership = Leadership(folder)
    leadership.lead(asked.records)
    yield "records", leadership.num_records
    yield "requests", len(leadership._max_tokens_of)
    yield "preemptions", leadership.num_preemptions
    yield "due_us", round(sum(leadership.due_ns) / leadership.num_plans / 1e3, 3)
    yield "asked_us", round(timeit(leadership.due, number=100_000) * 10, 3)
    yield "due_us_max", round(max(leadership.due_ns) / 1e3)
    yield "made_us", round(sum(leadership.made_ns) / leadership.num_records / 1e3, 3)
    yield from bytes_of(folder, leadership.num_records)
    yield "deep", deep(folder.parent / "deep")
    trees = {"": ROOT} | ({"beside_": asked.beside} if asked.beside else {})
    bare = folder.parent / "bare"
    without_starts(folder, bare)
    wide = folder.parent / "wide"
    among_others(folder, wide, asked.others, leadership.last_over)
    for prefix, tree in trees.items():
        yield f"{prefix}start_s", round(replayed(tree, [], "a:none")[0], 2)
    ways = {"late_s": (ROOT, folder), "wide_s": (ROOT, wide)}
    ways |= {f"{prefix}replay_s": (tree, bare) for prefix, tree in trees.items()}
    took_s: dict[str, list[float]] = {name: [] for name in ways}
    told = []
    for _ in range(asked.turns):
        for name, (tree, where) in ways.items():
            cpu_s, response = replayed(tree, [where], leadership.last_over)
            assert response.choices, response.skipped
            took_s[name].append(cpu_s)
            told.append(response)
    yield "is_equal", all(each.choices == told[0].choices for each in told)
    for name, some_s in took_s.items():
        yield name, [round(one_s, 2) for one_s in some_s]
    yield "records_per_cpu_s", round(leadership.num_records / median(took_s["replay_s"]))


def deep(folder: Path) -> dict[str, float]:
    """Nobody computes them."""
    leadership = Leadership(folder)
    for _ in range(SNAPSHOT_CHOICES_MAX):
        leadership._accept()
    began_ns = time.thread_time_ns()
    snapshot = leadership._timelines.snapshot_all()
    copied_ns = time.thread_time_ns()
    raw = snapshot_to_proto(1, snapshot, leadership._configured, {}).SerializeToString()
    made_ns = time.thread_time_ns()
    leadership._archive.close(60.0)
    sealed = seal([entry_of(ArchiveEntry.SNAPSHOT_FIELD_NUMBER, raw)], Span(2, 1, 1, 1))
    return {
        "copied_us": round((copied_ns - began_ns) / 1e3),
        "made_us": round((made_ns - copied_ns) / 1e3),
        "bytes": len(sealed),
    }


def bytes_of(folder: Path, num_records: int) -> Iterator[tuple[str, object]]:
    """How many snapshots there are, and bytes of a record, with what they are of those."""
    parts = [part for one in segments([folder]) for part in one.parts() if isinstance(part, Chunk)]
    sizes = [HEAD_BYTES + len(part.payload) for part in parts]
    # Each is alone in its chunk.
    sizes = [
        size
        for size, part in zip(sizes, parts, strict=True)
        if part.raw_bytes < SNAPSHOT_BYTES and part.entries()[0].HasField("snapshot")
    ]
    yield "snapshots", len(sizes)
    yield "snapshot_bytes", round(sum(sizes) / max(1, len(sizes)))
    yield "snapshot_bytes_per_record", round(sum(sizes) / num_records, 3)
    yield "bytes_per_record", round(sum(sizes) / num_records, 1)


def among_others(folder: Path, wide: Path, count: int, id: str) -> None:
    """It, and so many leaderships before it that decided as much, but not of that request."""
    wide.mkdir()
    for one in segments([folder]):
        data, header = one.path.read_bytes(), one.header
        (wide / one.path.name).write_bytes(data)
        whole = [part for part in read(data) if isinstance(part, Chunk)]
        kept = [
            seal([part.raw()], part.span) for part in whole[1:] if id.encode() not in part.raw()
        ]
        for epoch in range(EPOCH - count, EPOCH):
            header.epoch = epoch
            raw = ArchiveChunk(entries=[ArchiveEntry(header=header)]).SerializeToString()
            path = wide / name_of(epoch, header.segment)
            path.write_bytes(b"".join([seal([raw], whole[0].span), *kept]))


def without_starts(folder: Path, bare: Path) -> None:
    """The same archive, as it was written before there were any."""
    bare.mkdir()
    for one in segments([folder]):
        with (bare / one.path.name).open("wb") as file:
            for part in one.parts():
                assert isinstance(part, Chunk)
                kept = [each for each in part.entries() if not each.HasField("snapshot")]
                for each in kept:
                    if each.HasField("request"):
                        each.request.ClearField("snapshot_seq")
                if kept:
                    raw = [ArchiveChunk(entries=[each]).SerializeToString() for each in kept]
                    file.write(seal(raw, part.span))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=80_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--others", type=int, default=20)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kaiten-replay-") as folder:
        figures = dict(measure(Path(folder) / "archive", asked))
    record("replay", figures, save=asked.save)


if __name__ == "__main__":
    main()
