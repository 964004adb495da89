"""How a lease runs step by step: in turns with the device, or with the device one step ahead.

In turns      host: build k │            │ take k, send, build k+1 │
              device:       │ compute k  │                         │ compute k+1
One ahead     host:   launch k+1 │ take k, send │ launch k+2 │ take k+1, send
              device: ... k      │ k+1                       │ k+2

Both send the same results in the same order. A plan's first step always runs. Whether another
follows is decided once per step: not if the lease is used up, nothing is left to run, or something
newer waits.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import structlog

from gpu_worker.device import AheadDevice, Device, Flight, IntArray, StepInputs, StepSamples
from gpu_worker.plans import Plan, StepOutcome, StepResult, StepTimings
from gpu_worker.rows import Rows

log = structlog.get_logger()

Report = Callable[[StepResult], None]


class Stepper(Protocol):
    def run(
        self, plan: Plan, received_ns: int, report: Report, is_waiting: Callable[[], bool]
    ) -> None:
        """Apply the plan and run its lease. InvalidPlan: it does not fit, nothing was changed.

        `is_waiting` says whether something newer wants the thread.
        """

    @property
    def is_in_air(self) -> bool:
        """Whether a step is on its way whose result `land` would report."""

    @property
    def is_down(self) -> bool:
        """Whether `land` would not wait."""

    def land(self) -> None:
        """Report what is still on its way, if anything, as soon as it is done."""

    def clear(self) -> None:
        """Start of a stream: no members."""


class InTurns:
    """The host works while the device waits: for devices that are the host."""

    def __init__(self, rows: Rows, device: Device) -> None:
        self._rows = rows
        self._device = device

    def run(
        self, plan: Plan, received_ns: int, report: Report, is_waiting: Callable[[], bool]
    ) -> None:
        counts = self._rows.apply(plan)
        if plan.copies:
            self._device.copy_blocks(plan.copies)
        ready_ns = received_ns
        for step in range(plan.lease_steps):
            started_ns = time.perf_counter_ns()
            outcome, timings = self._step(counts, wait_us=(started_ns - ready_ns) // 1000)
            ready_ns = time.perf_counter_ns()
            counts = self._rows.steady_counts()
            is_last = step + 1 == plan.lease_steps or not counts.any() or is_waiting()
            report(_result(plan, step, outcome, timings, is_last=is_last))
            if is_last:
                return

    @property
    def is_in_air(self) -> bool:
        return False

    @property
    def is_down(self) -> bool:
        return True

    def land(self) -> None:
        pass

    def clear(self) -> None:
        self._rows.clear()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A step that the device was told of and the scheduler has not heard of."""

    plan: Plan
    step: int
    inputs: StepInputs
    # None: the step has no rows.
    flight: Flight | None
    wait_us: int
    report: Report


class OneAhead:
    """The device gets its next step before the result of this one is read: it never waits.

    Nothing of step k+1 depends on the host's having seen step k: the device holds the rows itself,
    feeds them their own tokens and knows which have ended. Only rows whose rules look at their last
    tokens (penalties, bad words) make the host read first.
    """

    def __init__(self, rows: Rows, device: AheadDevice) -> None:
        self._rows = rows
        self._device = device
        self._air: _Launched | None = None
        self._ready_ns = 0

    def run(
        self, plan: Plan, received_ns: int, report: Report, is_waiting: Callable[[], bool]
    ) -> None:
        counts = self._rows.apply(plan)
        self._device.apply(self._rows.changes(plan), plan.copies)
        self._ready_ns = received_ns
        if self._rows.needs_last_tokens:
            self.land()
        launched: _Launched | None = self._launch(plan, 0, counts, report)
        # What was in the air until now is of an older plan.
        self.land()
        while launched is not None:
            self._air = launched
            launched = self._follow(launched, is_waiting)

    @property
    def is_in_air(self) -> bool:
        return self._air is not None

    @property
    def is_down(self) -> bool:
        return self._air is None or self._air.flight is None or self._air.flight.is_done

    def land(self) -> None:
        if (launched := self._air) is not None:
            self._air = None
            self._report(launched, self._settle(launched), is_last=True)

    def clear(self) -> None:
        self.land()
        self._rows.clear()
        self._device.clear()

    def _follow(self, launched: _Launched, is_waiting: Callable[[], bool]) -> _Launched | None:
        """Launch the step after this one, if there is one; then read and report this one.

        The last of a lease stays in the air: the next plan launches its first step behind it.
        """
        if self._rows.needs_last_tokens:
            outcome = self._settle(launched)
            following = self._next(launched, is_waiting)
        elif (following := self._next(launched, is_waiting)) is None:
            return None
        else:
            outcome = self._settle(launched)
            if not self._rows.is_anyone_left(following.inputs):
                # The device found nobody left to compute.
                following = None
        self._air = None
        self._report(launched, outcome, is_last=following is None)
        return following

    def _next(self, launched: _Launched, is_waiting: Callable[[], bool]) -> _Launched | None:
        step = launched.step + 1
        if step == launched.plan.lease_steps or is_waiting():
            return None
        counts = self._rows.steady_counts()
        return self._launch(launched.plan, step, counts, launched.report) if counts.any() else None

    def _launch(self, plan: Plan, step: int, counts: IntArray, report: Report) -> _Launched:
        inputs = self._rows.step_inputs(counts)
        wait_us = (time.perf_counter_ns() - self._ready_ns) // 1000
        flight = self._device.launch(inputs) if inputs.row_count else None
        self._rows.expect(inputs)
        return _Launched(
            plan=plan, step=step, inputs=inputs, flight=flight, wait_us=wait_us, report=report
        )

    def _settle(self, launched: _Launched) -> tuple[StepOutcome, StepTimings]:
        inputs, absent, forward_us = launched.inputs, 0, 0
        outcome = StepOutcome(slots=(), token_ids=())
        if launched.flight is not None:
            samples = launched.flight.result()
            outcome = self._rows.settle(inputs, samples)
            forward_us = samples.forward_us
            absent = 0 if samples.is_there is None else int((~samples.is_there).sum())
        self._ready_ns = time.perf_counter_ns()
        return outcome, StepTimings(
            wait_us=launched.wait_us,
            forward_us=forward_us,
            # Part of the same launch.
            sample_us=0,
            tokens_computed=inputs.token_count - absent,
            rows=inputs.row_count - absent,
        )

    def _report(
        self, launched: _Launched, settled: tuple[StepOutcome, StepTimings], *, is_last: bool
    ) -> None:
        launched.report(_result(launched.plan, launched.step, *settled, is_last=is_last))


def _result(
    plan: Plan, step: int, outcome: StepOutcome, timings: StepTimings, *, is_last: bool
) -> StepResult:
    return StepResult(
        plan_id=plan.plan_id, step=step, outcome=outcome, is_last=is_last, timings=timings
    )


def _merged(outcomes: Iterable[StepOutcome]) -> StepOutcome:
    parts = tuple(outcomes)
    return StepOutcome(
        slots=tuple(chain.from_iterable(part.slots for part in parts)),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        finished=tuple(chain.from_iterable(part.finished for part in parts)),
        errors=tuple(chain.from_iterable(part.errors for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
    )
