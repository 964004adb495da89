"""Requests through the scheduler's core: plans go out, results come in. No torch."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.one_process import WORKER, spec_of
from gpu_worker.batch.plan_validation import RowLimits
from scheduler_svc.core.commands import Configured, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config, Request, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompt: tuple[int, ...]
    output: int


def jobs_uniform(count: int, low: int, high: int, vocab: int) -> list[Job]:
    """Input and output lengths uniform from low to high, seed 0."""
    rng = random.Random(0)
    return [
        Job(
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.randint(low, high))),
            output=rng.randint(low, high),
        )
        for _ in range(count)
    ]


class Crowd:
    """All jobs, due at once. `next_plan` until None, `take` every result, until `is_done`."""

    def __init__(self, limits: RowLimits, jobs: Sequence[Job]) -> None:
        self._scheduler = Scheduler()
        self._scheduler.apply(Configured(config=Config(), policy="fcfs"), 0)
        self.outputs: list[list[int]] = [[] for _ in jobs]
        self.limits = limits
        self._jobs = jobs
        self._scheduler.apply(WorkerJoined(worker_id=WORKER, spec=spec_of(limits)), 0)
        for sequence_id, job in enumerate(jobs):
            request = Request(
                id=str(sequence_id),
                sequence_id=sequence_id,
                prompt=job.prompt,
                max_tokens=job.output,
                arrived_ns=0,
            )
            self._scheduler.apply(Submit(request=request), 0)

    @property
    def is_done(self) -> bool:
        return self._scheduler.live_count == 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    def output_of(self, sequence_id: int) -> int:
        """How many tokens are asked for."""
        return self._jobs[sequence_id].output

    def next_plan(self) -> Plan | None:
        return self._scheduler.apply(MakePlan(worker_id=WORKER), time.monotonic_ns()).plan

    def take(self, result: StepResult) -> None:
        step = self._scheduler.apply(StepDone(result=result), time.monotonic_ns()).tokens
        assert step is not None
        for sequence_id, token in zip(step.sequence_ids, step.tokens, strict=True):
            self.outputs[sequence_id].append(token)
