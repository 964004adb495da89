"""How many records a second are replayed for Explain of what only archives know.

    python -m benchmarks.core.bench_replay [--records 80000] [--turns 3] [--beside FOLDER] [--save]

An archive of one leadership, which the real core and journal make in virtual time: two workers, for
whom a little more comes than they have blocks for, so that requests wait, give way and share
prefixes. The last that ended is asked for, as `SchedulerService.ReplayTimeline` does, of a process
of its own: so all of it is replayed. CPU seconds of that process, its start included (`start_s`:
how long that takes alone); `--beside`: another tree's replay of the same archive, in turns.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.recording import ROOT, record
from kaiten.v1.archive_pb2 import ArchiveHeader
from kaiten.v1.common_pb2 import Leader as LeaderMessage
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineResponse
from kaiten.v1.worker_service_pb2 import RowSampling, StepTimings
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import InboxEntry
from ledger import Leader as Elected
from ledger.archive import ArchiveBounds, ArchiveWriter
from scheduler_svc import wire
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.core.commands import Command, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import StepResult, WorkerSpec
from scheduler_svc.journal import Journal
from scheduler_svc.replaying import CHILD
from scheduler_svc.request_book import BookedRequest, RequestBook
from scheduler_svc.settings import SchedulerSettings
from tests.fakes.model_worker import ModelWorker

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
BOUNDS: Final = ArchiveBounds(bytes_max=1 << 30, age_s_max=3600.0)


class Leadership:
    """One that is recorded, without a loop."""

    def __init__(self, folder: Path) -> None:
        settings = SchedulerSettings()
        configured = settings.configured
        header = ArchiveHeader(
            epoch=1,
            configured=configured_to_proto(configured),
            has_tokens=True,
            has_outcomes=True,
            unix_ns=1,
        )
        self._archive = ArchiveWriter(folder, header, BOUNDS)
        self._book = RequestBook(self._archive)
        self._journal = Journal(self._book, Elected(epoch=1, nonce=1, journal_seq=0, after_seq=0))
        self._core, self._draw = Scheduler(), random.Random(1)
        self._now_ns, self._next_id = STEP_NS, 1
        self._max_tokens_of: dict[int, int] = {}
        self.num_records = self.num_preemptions = 0
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
        self._archive.close(60.0)

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
            samplings = [self._book.sampling(join.sequence_id) for join in plan.joins]
            message = wire.plan_to_proto(plan, LeaderMessage(), samplings)
            self._journal.write(asked, outcome, self._now_ns, message, self._core.waiting.throttled)
            worker.send(plan)
            self.num_preemptions += len(plan.preempted)

    def _step(self, worker: ModelWorker) -> None:
        if (result := worker.step()) is not None:
            self._tell(StepDone(result=result), step_of(result))

    def _tell(self, command: Command, message: StepMessage | None = None) -> None:
        outcome = self._core.apply(command, self._now_ns)
        commit = self._journal.write(
            command, outcome, self._now_ns, message, self._core.waiting.throttled
        )
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
    trees = {"": ROOT} | ({"beside_": asked.beside} if asked.beside else {})
    for prefix, tree in trees.items():
        yield f"{prefix}start_s", round(replayed(tree, [], "a:none")[0], 2)
    took_s: dict[str, list[float]] = {prefix: [] for prefix in trees}
    told = []
    for _ in range(asked.turns):
        for prefix, tree in trees.items():
            cpu_s, response = replayed(tree, [folder], leadership.last_over)
            assert response.choices, response.skipped
            took_s[prefix].append(cpu_s)
            told.append(response)
    yield "is_equal", all(each == told[0] for each in told)
    for prefix, some_s in took_s.items():
        yield f"{prefix}replay_s", [round(one_s, 2) for one_s in some_s]
        yield f"{prefix}records_per_cpu_s", round(leadership.num_records / median(some_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, default=80_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kaiten-replay-") as folder:
        figures = dict(measure(Path(folder), asked))
    record("replay", figures, save=asked.save)


if __name__ == "__main__":
    main()
