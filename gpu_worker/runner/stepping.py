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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from gpu_worker.batch.plans import Plan, StepOutcome, StepResult, StepTimings
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import (
    AheadRunner,
    Flight,
    IntArray,
    ModelRunner,
    StepInputs,
    StepSamples,
    TokenMasks,
)
from gpu_worker.runner.step_alone import noted, step_alone

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

    def __init__(self, rows: Rows, runner: ModelRunner) -> None:
        self._rows = rows
        self._runner = runner

    def run(
        self, plan: Plan, received_ns: int, report: Report, is_waiting: Callable[[], bool]
    ) -> None:
        counts = self._rows.apply(plan)
        if plan.swaps:
            self._runner.swap_blocks(plan.swaps)
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        ready_ns = received_ns
        for step in range(plan.lease_steps):
            started_ns = time.perf_counter_ns()
            chunked = {slot for slot, _ in plan.chunks} if step == 0 else ()
            wait_us = (started_ns - ready_ns) // 1000
            outcome, timings = self._step(counts, chunked, wait_us=wait_us)
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

    def _step(
        self, counts: IntArray, chunked: Collection[int] = (), *, wait_us: int
    ) -> tuple[StepOutcome, StepTimings]:
        inputs = self._rows.step_inputs(counts, self._rows.draft(counts, chunked))
        forward_us = sample_us = 0
        if not inputs.row_count:
            outcome = StepOutcome(slots=(), token_ids=())
        elif isinstance(samples := self._try(inputs), StepSamples):
            outcome = self._rows.advance(inputs, samples)
            forward_us, sample_us = samples.forward_us, samples.sample_us
        else:
            outcome = step_alone(self._rows, inputs, samples, self._try)
        return outcome, StepTimings(
            wait_us=wait_us,
            forward_us=forward_us,
            sample_us=sample_us,
            tokens_computed=inputs.token_count,
            rows=inputs.row_count,
            drafted=0 if inputs.drafts is None else int(inputs.drafts.sum()),
        )

    def _try(self, inputs: StepInputs) -> StepSamples | Exception:
        try:
            return self._runner.execute(inputs)
        except Exception as error:
            return noted(error, inputs)


_Outcome = tuple[StepOutcome, StepTimings]


@dataclass(slots=True, kw_only=True, eq=False)
class _Launched:
    """A step that the device was told of and the scheduler has not heard of."""

    plan: Plan
    step: int
    inputs: StepInputs
    wait_us: int
    report: Report
    # None: the step has no rows, or it is outcome.
    flight: Flight | None = None
    # What came of it, once that is known.
    outcome: _Outcome | None = None


class OneAhead:
    """The device gets its next step before the result of this one is read: it never waits.

    Nothing of step k+1 depends on the host's having seen step k: the device holds the rows itself,
    feeds them their own tokens, applies their rules to them and knows which have ended.

    A launch that fails has left the rows as they were: everything before it is read, and its rows
    are run one by one. A device that fails while it computes has lost all of them: that ends the
    worker.
    """

    def __init__(self, rows: Rows, runner: AheadRunner) -> None:
        self._rows = rows
        self._runner = runner
        self._air: _Launched | None = None
        self._ready_ns = 0

    def run(
        self, plan: Plan, received_ns: int, report: Report, is_waiting: Callable[[], bool]
    ) -> None:
        counts = self._rows.apply(plan)
        with self._telling_if_lost():
            self._runner.apply(self._rows.changes(plan), plan.swaps, plan.copies)
        self._ready_ns = received_ns
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
            _report(launched, self._wait_for(launched), is_last=True)

    def clear(self) -> None:
        self.land()
        self._rows.clear()
        with self._telling_if_lost():
            self._runner.clear()

    @contextmanager
    def _telling_if_lost(self) -> Iterator[None]:
        """What fails inside may have met what failed before: then DeviceLost is raised instead."""
        try:
            yield
        except Exception:
            self._runner.finish()
            raise

    def _follow(self, launched: _Launched, is_waiting: Callable[[], bool]) -> _Launched | None:
        """Launch the step after this one, if there is one; then read and report this one.

        The last of a lease stays in the air: the next plan launches its first step behind it.
        """
        if (following := self._next(launched, is_waiting)) is None:
            return None
        outcome = self._wait_for(launched)
        if self._is_void(following):
            following = None
        self._air = None
        _report(launched, outcome, is_last=following is None)
        return following

    def _is_void(self, launched: _Launched) -> bool:
        """Whether the device found nobody left to compute."""
        if launched.outcome is None:
            return not self._rows.is_anyone_left(launched.inputs)
        outcome, _ = launched.outcome
        return not outcome.slots and not outcome.errors

    def _next(self, launched: _Launched, is_waiting: Callable[[], bool]) -> _Launched | None:
        step = launched.step + 1
        if step == launched.plan.lease_steps or is_waiting():
            return None
        counts = self._rows.steady_counts()
        return self._launch(launched.plan, step, counts, launched.report) if counts.any() else None

    def _launch(self, plan: Plan, step: int, counts: IntArray, report: Report) -> _Launched:
        inputs = self._after_air(self._rows.step_inputs(counts))
        wait_us = (time.perf_counter_ns() - self._ready_ns) // 1000
        launched = _Launched(plan=plan, step=step, inputs=inputs, wait_us=wait_us, report=report)
        if inputs.row_count:
            flight = self._try(inputs)
            if isinstance(flight, Exception):
                launched.outcome = self._launch_alone(launched, flight)
                return launched
            launched.flight = flight
        self._rows.expect(inputs)
        return launched

    def _after_air(self, inputs: StepInputs) -> StepInputs:
        """Masks are of the tokens that are in the air, so these are read first."""
        sampling, air = inputs.sampling, self._air
        if sampling.masks is None or air is None:
            return inputs
        masks = sampling.masks

        def settled_masks() -> TokenMasks:
            self._wait_for(air)
            return masks()

        return replace(inputs, sampling=replace(sampling, masks=settled_masks))

    def _try(self, inputs: StepInputs) -> Flight | Exception:
        try:
            return self._runner.launch(inputs)
        except AssertionError:
            # About this program, and not about a row.
            raise
        except Exception as error:
            return noted(error, inputs)

    def _launch_alone(self, launched: _Launched, error: Exception) -> _Outcome:
        if self._air is not None:
            self._wait_for(self._air)
        # A device that is lost fails every launch: its rows are not to blame.
        self._runner.finish()

        def attempt(inputs: StepInputs) -> StepSamples | Exception:
            flight = self._try(inputs)
            if not isinstance(flight, Exception):
                return flight.result()
            self._runner.finish()
            return flight

        # Rows that turned out to have ended meanwhile.
        absent = sum(map(self._rows.is_idle, launched.inputs.slots.tolist()))
        outcome = step_alone(self._rows, launched.inputs, error, attempt)
        return outcome, _timings(launched, absent=absent)

    def _wait_for(self, launched: _Launched) -> _Outcome:
        """Wait for what comes of it. Again: what came of it."""
        if launched.outcome is None:
            outcome, timings = StepOutcome(slots=(), token_ids=()), _timings(launched)
            if launched.flight is not None:
                samples = launched.flight.result()
                outcome = self._rows.settle(launched.inputs, samples)
                absent = 0 if samples.is_there is None else int((~samples.is_there).sum())
                timings = _timings(launched, samples.forward_us, absent, is_graph=samples.is_graph)
            launched.outcome = outcome, timings
        self._ready_ns = time.perf_counter_ns()
        return launched.outcome


def _timings(
    launched: _Launched, forward_us: int = 0, absent: int = 0, *, is_graph: bool = False
) -> StepTimings:
    """`absent` rows had ended before the step."""
    return StepTimings(
        wait_us=launched.wait_us,
        forward_us=forward_us,
        # Part of the same launch.
        sample_us=0,
        tokens_computed=launched.inputs.token_count - absent,
        rows=launched.inputs.row_count - absent,
        is_graph=is_graph,
    )


def _report(launched: _Launched, outcome: _Outcome, *, is_last: bool) -> None:
    launched.report(_result(launched.plan, launched.step, *outcome, is_last=is_last))


def _result(
    plan: Plan, step: int, outcome: StepOutcome, timings: StepTimings, *, is_last: bool
) -> StepResult:
    return StepResult(
        plan_id=plan.plan_id, step=step, outcome=outcome, is_last=is_last, timings=timings
    )
