"""Requests through the scheduler's core: plans go out, results come in. No torch."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def due_in_turn(count: int, per_s: float) -> list[float]:
    """Seconds from the start: so many arrivals at exponential distances, seed 0."""
    rng, now_s = random.Random(0), 0.0
    due_s = []
    for _ in range(count):
        due_s.append(now_s)
        now_s += rng.expovariate(per_s)
    return due_s


class Crowd:
    """Jobs, due at once or each at its time, which `arrive` is told.

    `next_plan` until None, `take` every result, until `is_done`.
    """

    def __init__(
        self, limits: RowLimits, jobs: Sequence[Job], due_s: Sequence[float] | None = None
    ) -> None:
        self._scheduler = Scheduler()
        self._scheduler.apply(Configured(config=Config(), policy="fcfs"), 0)
        self.outputs: list[list[int]] = [[] for _ in jobs]
        self.limits = limits
        self._jobs = jobs
        self._scheduler.apply(WorkerJoined(worker_id=WORKER, spec=spec_of(limits)), 0)
        self._due_s = [0.0] * len(jobs) if due_s is None else list(due_s)
        self._arrived = 0
        # When each token was there, on `arrive`'s clock.
        self.at_s: list[list[float]] = [[] for _ in jobs]
        self._now_s = 0.0
        self.arrive(0.0)

    def arrive(self, now_s: float) -> None:
        """Whoever is due by now."""
        self._now_s = now_s
        while self._arrived < len(self._jobs) and self._due_s[self._arrived] <= now_s:
            job = self._jobs[self._arrived]
            request = Request(
                id=str(self._arrived),
                sequence_id=self._arrived,
                prompt=job.prompt,
                max_tokens=job.output,
                arrived_ns=0,
            )
            self._scheduler.apply(Submit(request=request), 0)
            self._arrived += 1

    @property
    def next_due_s(self) -> float | None:
        """None: all are here."""
        return self._due_s[self._arrived] if self._arrived < len(self._jobs) else None

    def waits_s(self) -> tuple[list[float], list[float]]:
        """(from due to the first token, of each; between two tokens of one, all of them)."""
        firsts = [at[0] - due for at, due in zip(self.at_s, self._due_s, strict=True)]
        return firsts, [b - a for at in self.at_s for a, b in pairwise(at)]

    @property
    def is_done(self) -> bool:
        return self._arrived == len(self._jobs) and self._scheduler.live_count == 0

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
            self.at_s[sequence_id].append(self._now_s)
