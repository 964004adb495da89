"""Puts load on a target. Open loop: by a schedule that the server cannot slow down. Closed loop: so
many askers, each waiting for its answer before the next question.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kaiten.bench.outcomes import AskError, Ending, Frame, Outcome
from kaiten.bench.targets import Target
from kaiten.bench.workload import Job


class Clock(Protocol):
    """Of the run; 0 is its start."""

    def now_s(self) -> float: ...

    async def sleep_until(self, at_s: float) -> None: ...


class RunClock:
    """Starts when made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    async def sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now_s()))


class Load:
    """One run against one target. `on_done` hears of every outcome as it happens."""

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float,
        clock: Clock | None = None,
        on_done: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._clock = clock or RunClock()
        self._on_done = on_done

    async def open_loop(self, jobs: Sequence[Job], due: Sequence[float]) -> list[Outcome]:
        """Every job at its due time, whatever became of the others."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for job, due_s in zip(jobs, due, strict=True):
                if self._clock.now_s() < due_s:
                    await self._clock.sleep_until(due_s)
                tasks.append(group.create_task(self._ask(job, due_s)))
        return [task.result() for task in tasks]

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
        """`concurrency` askers share the jobs; a job is due when its asker is free."""
        left = iter(jobs)
        outcomes: dict[int, Outcome] = {}

        async def asker() -> None:
            for job in left:
                outcomes[job.index] = await self._ask(job, self._clock.now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(asker())
        return [outcomes[job.index] for job in jobs]

    async def _ask(self, job: Job, due_s: float) -> Outcome:
        frames: list[Frame] = []
        error = AskError("", "")
        ending = Ending()
        # The clock may be a hair before the due time that it was asked to sleep to.
        sent_s = max(due_s, self._clock.now_s())

        def on_tokens(count: int) -> None:
            frames.append(Frame(at_s=self._clock.now_s(), tokens=count))

        try:
            ending = await self._target.ask(job, on_tokens, self._timeout_s)
        except AskError as failure:
            error = failure
        outcome = Outcome(
            index=job.index,
            due_s=due_s,
            sent_s=sent_s,
            done_s=max(sent_s, self._clock.now_s()),
            frames=tuple(frames),
            prompt_tokens=ending.prompt_tokens or len(job.prompt),
            output_tokens=ending.output_tokens or sum(frame.tokens for frame in frames),
            output_tokens_asked=job.output_tokens,
            cached_tokens=ending.cached_tokens,
            error=error.kind,
            detail=error.detail,
        )
        self._on_done(outcome)
        return outcome
