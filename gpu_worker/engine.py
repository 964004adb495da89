"""The compute thread: takes plans from a queue, runs their leases step by step, reports each step.

It is never the event loop's thread, so the server answers while a step runs. It alone touches the
rows and the device. One stream (`Session`) owns the batch at a time; a newer one empties it.

A plan's first step always runs. After each step the thread decides once whether another follows:
not if the lease is used up, nothing is left to run, or something newer waits in the queue.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import structlog

from gpu_worker.device import Device, IntArray, StepInputs, StepSamples
from gpu_worker.plans import InvalidPlan, Plan, StepOutcome, StepResult, StepTimings
from gpu_worker.rows import Rows

log = structlog.get_logger()


class Session(Protocol):
    """A stream as the compute thread sees it. Both methods are called on that thread."""

    def on_result(self, result: StepResult) -> None: ...

    def on_opened(self) -> None:
        """The batch is empty and is this session's."""

    def on_refused(self, error: InvalidPlan) -> None:
        """The last plan was wrong; the batch is empty and the session over."""


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    session: Session


@dataclass(frozen=True, slots=True, eq=False)
class _Close:
    session: Session


@dataclass(frozen=True, slots=True, eq=False)
class _Submit:
    session: Session
    plan: Plan
    received_ns: int


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Engine:
    """`on_crash` is called on the compute thread, once, if it ends by an error of its own."""

    def __init__(
        self, rows: Rows, device: Device, *, on_crash: Callable[[Exception], None]
    ) -> None:
        self._rows = rows
        self._device = device
        self._on_crash = on_crash
        self._session: Session | None = None
        self._commands: queue.SimpleQueue[_Open | _Close | _Submit | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def __repr__(self) -> str:
        return f"<Engine waiting={self.waiting_count} {self._rows!r}>"

    @property
    def waiting_count(self) -> int:
        """Plans and other commands that the running step has not seen yet."""
        return self._commands.qsize()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the running step end, then the thread."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def open(self, session: Session) -> None:
        """Give the batch, emptied, to this session. Answered by `on_opened`."""
        self._commands.put(_Open(session))

    def submit(self, session: Session, plan: Plan) -> None:
        """Run a plan after those submitted before. Ignored unless the session owns the batch."""
        self._commands.put(_Submit(session, plan, time.perf_counter_ns()))

    def close(self, session: Session) -> None:
        """Empty the batch if it is still this session's."""
        self._commands.put(_Close(session))

    def _main(self) -> None:
        try:
            while not isinstance(command := self._commands.get(), _Stop):
                self._handle(command)
        except Exception as error:
            log.critical("engine.crashed", exc_info=error)
            self._on_crash(error)

    def _handle(self, command: _Open | _Close | _Submit) -> None:
        if isinstance(command, _Open):
            self._own(command.session)
            command.session.on_opened()
        elif command.session is not self._session:
            return
        elif isinstance(command, _Close):
            self._own(None)
        else:
            self._execute(command)

    def _own(self, session: Session | None) -> None:
        self._rows.clear()
        self._session = session

    def _execute(self, command: _Submit) -> None:
        plan, session = command.plan, command.session
        try:
            counts = self._rows.apply(plan)
        except InvalidPlan as error:
            self._own(None)
            session.on_refused(error)
            return
        if plan.copies:
            self._device.copy_blocks(plan.copies)
        ready_ns = command.received_ns
        for step in range(plan.lease_steps):
            started_ns = time.perf_counter_ns()
            outcome, timings = self._step(counts, wait_us=(started_ns - ready_ns) // 1000)
            ready_ns = time.perf_counter_ns()
            counts = self._rows.steady_counts()
            is_last = step + 1 == plan.lease_steps or not counts.any() or not self._commands.empty()
            session.on_result(
                StepResult(
                    plan_id=plan.plan_id,
                    step=step,
                    outcome=outcome,
                    is_last=is_last,
                    timings=timings,
                )
            )
            if is_last:
                return

    def _step(self, counts: IntArray, *, wait_us: int) -> tuple[StepOutcome, StepTimings]:
        inputs = self._rows.step_inputs(counts)
        forward_us = sample_us = 0
        if not inputs.row_count:
            outcome = StepOutcome(slots=(), token_ids=())
        elif isinstance(samples := self._try(inputs), StepSamples):
            outcome = self._rows.advance(inputs, samples)
            forward_us, sample_us = samples.forward_us, samples.sample_us
        else:
            outcome = self._step_alone(inputs, samples)
        return outcome, StepTimings(
            wait_us=wait_us,
            forward_us=forward_us,
            sample_us=sample_us,
            tokens_computed=inputs.token_count,
            rows=inputs.row_count,
        )

    def _try(self, inputs: StepInputs) -> StepSamples | Exception:
        try:
            return self._device.execute(inputs)
        except Exception as error:
            log.error("step.failed", rows=inputs.row_count, exc_info=error)
            return error

    def _step_alone(self, together: StepInputs, error: Exception) -> StepOutcome:
        """A step failed as a whole: run its rows one by one, so that only the culprits fail.

        When every one of several rows fails it is the device, not the rows: that ends the worker.
        """
        outcomes = []
        for slot, count in zip(together.slots.tolist(), together.counts.tolist(), strict=True):
            counts = np.zeros(self._rows.limits.slots, np.int64)
            counts[slot] = count
            inputs = self._rows.step_inputs(counts)
            samples = self._try(inputs)
            if isinstance(samples, StepSamples):
                outcomes.append(self._rows.advance(inputs, samples))
            else:
                self._rows.fail(slot)
                text = f"the step failed for this row: {type(samples).__name__}"
                outcomes.append(StepOutcome(slots=(), token_ids=(), errors=((slot, text),)))
        if len(outcomes) > 1 and all(outcome.errors for outcome in outcomes):
            raise error
        return _merged(outcomes)


def _merged(outcomes: Iterable[StepOutcome]) -> StepOutcome:
    parts = tuple(outcomes)
    return StepOutcome(
        slots=tuple(chain.from_iterable(part.slots for part in parts)),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        finished=tuple(chain.from_iterable(part.finished for part in parts)),
        errors=tuple(chain.from_iterable(part.errors for part in parts)),
    )
