"""A span per traced step, below the iteration's span that the plan names.

Made on the stream's side when a step is reported: the compute thread knows nothing of it. Which
plans are traced the scheduler decides; a slow step always is, here and there.
"""

import time
from collections import deque

from opentelemetry.trace import SpanContext

from gpu_worker.batch.plans import StepResult
from service_kit.telemetry import SLOW_STEP_US, Spans, context_of, shifted


class StepTracing:
    """Of one stream: plans in, steps out, both in order."""

    def __init__(self, spans: Spans | None) -> None:
        self._spans = spans
        # Plans that may still be answered, oldest first.
        self._plans: deque[tuple[int, str, int]] = deque()

    def planned(self, plan_id: int, traceparent: str, expected_step_us: int) -> None:
        """A plan came."""
        if self._spans is not None and traceparent:
            self._plans.append((plan_id, traceparent, expected_step_us))

    def stepped(self, result: StepResult) -> None:
        """A step of it was computed, just now."""
        while self._plans and self._plans[0][0] < result.plan_id:
            self._plans.popleft()
        if self._spans is None or not self._plans or self._plans[0][0] != result.plan_id:
            return
        _, traceparent, expected_us = self._plans[0]
        is_slow = result.timings.forward_us >= SLOW_STEP_US
        # The last two digits are the flags: only what is kept is worth parsing.
        if (is_slow or traceparent.endswith("01")) and (context := context_of(traceparent)):
            _put(self._spans, context, result, expected_us if result.step == 0 else 0)


def _put(spans: Spans, plan: SpanContext, result: StepResult, expected_us: int) -> None:
    timings, now_ns = result.timings, time.time_ns()
    spans.put(
        "kaiten.worker.step",
        parent=shifted(plan, result.step),
        start_ns=now_ns - (timings.forward_us + timings.sample_us) * 1000,
        end_ns=now_ns,
        attributes={
            "kaiten.plan.id": result.plan_id,
            "kaiten.plan.step": result.step,
            "kaiten.rows": timings.rows,
            "kaiten.tokens.computed": timings.tokens_computed,
            "kaiten.rows.failed": len(result.outcome.errors),
            "kaiten.worker.forward_us": timings.forward_us,
            "kaiten.worker.sample_us": timings.sample_us,
            "kaiten.worker.wait_us": timings.wait_us,
            # By the leader, of a plan's first step; 0: it did not know.
            "kaiten.worker.expected_us": expected_us,
        },
    )
