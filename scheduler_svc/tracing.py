"""Spans of a term: one per iteration, and the phases of every request.

An iteration serves many requests, so its span is the root of its own trace and is *linked* to each
member request's span. Spans are made by a task of its own from what the term leaves in a bounded
queue: when tracing falls behind, spans are dropped and counted, and steps are not delayed. What is
not sampled is still in the journal.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from protos.kaiten.v1.worker_service_pb2 import StepResult, StepTimings
from scheduler_svc.core.types import Committed, Event, Plan, RequestOver, Serial

QUEUE_MAX: Final = 1024
# Iterations per second that are traced when nothing special happens in them.
ITERATIONS_PER_S: Final = 10
SLOW_STEP_US: Final = 1_000_000
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One answered step with the plan it belongs to."""

    plan: Plan
    step: int
    timings: StepTimings
    finished: int
    traceparents: Sequence[str]
    policy: str
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that is over, and the span it belongs to."""

    over: RequestOver
    traceparent: str
    ended_ns: int


class IterationSampler:
    """Pure: a rate limit that never refuses what somebody will ask about."""

    def __init__(self, per_s: int = ITERATIONS_PER_S) -> None:
        self._wait_ns = 1_000_000_000 // per_s
        self._next_ns = 0

    def keeps(self, plan: Plan, step: int, timings: StepTimings, now_ns: int) -> bool:
        """Slow and preempting iterations always; of the others so many per second."""
        if timings.forward_us >= SLOW_STEP_US or (step == 0 and plan.preempted):
            return True
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + self._wait_ns
        return True


class Tracing:
    """Takes what happened, cheaply; makes spans of it in `run`."""

    def __init__(self, tracer: Tracer, *, policy: str) -> None:
        self._tracer = tracer
        self._policy = policy
        self._sampler = IterationSampler()
        # By worker: plans that may still be answered, oldest first.
        self._plans: dict[str, deque[Plan]] = {}
        self._queue: deque[Iteration | Ended] = deque()
        self._has_some = asyncio.Event()
        self.dropped = 0

    def planned(self, plan: Plan) -> None:
        """A plan was sent. The first one of a stream says that the older ones are void."""
        if plan.plan_id == 1:
            self._plans.pop(plan.worker_id, None)
        self._plans.setdefault(plan.worker_id, deque()).append(plan)

    def stepped(
        self,
        worker_id: str,
        result: StepResult,
        committed: Committed,
        traceparent_of: Callable[[Serial], str],
        now_ns: int,
    ) -> None:
        """A step was answered."""
        plans = self._plans[worker_id]
        while plans[0].plan_id < result.plan_id:
            plans.popleft()
        if self._sampler.keeps(plans[0], result.step, result.timings, now_ns):
            self._put(
                Iteration(
                    plan=plans[0],
                    step=result.step,
                    timings=result.timings,
                    finished=len(result.finished),
                    traceparents=[traceparent_of(serial) for serial in committed.serials],
                    policy=self._policy,
                    ended_ns=now_ns,
                )
            )

    def ended(
        self, events: Iterable[Event], traceparent_of: Callable[[Serial], str], now_ns: int
    ) -> None:
        """Requests may be over."""
        for event in events:
            if isinstance(event, RequestOver):
                traceparent = traceparent_of(event.serial)
                self._put(Ended(over=event, traceparent=traceparent, ended_ns=now_ns))

    def _put(self, item: Iteration | Ended) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self.dropped += 1
            return
        self._queue.append(item)
        self._has_some.set()

    async def run(self) -> None:
        """One span at a time, giving the loop back after each."""
        while True:
            await self._has_some.wait()
            item = self._queue.popleft()
            if not self._queue:
                self._has_some.clear()
            self._iteration(item) if isinstance(item, Iteration) else self._phases(item)
            await asyncio.sleep(0)

    def _iteration(self, item: Iteration) -> None:
        plan, timings = item.plan, item.timings
        busy_us = timings.wait_us + timings.forward_us + timings.sample_us
        span = self._tracer.start_span(
            "kaiten.iteration",
            context=Context(),
            links=[Link(member) for member in span_contexts(item.traceparents)],
            start_time=item.ended_ns - busy_us * 1000,
            attributes={
                "kaiten.policy": item.policy,
                "kaiten.worker.id": plan.worker_id,
                "kaiten.plan.id": plan.plan_id,
                "kaiten.plan.step": item.step,
                "kaiten.plan.lease_steps": plan.lease_steps,
                "kaiten.rows": timings.rows,
                "kaiten.rows.decode": plan.decode_rows,
                "kaiten.rows.admitted": len(plan.joins) if item.step == 0 else 0,
                "kaiten.rows.finished": item.finished,
                "kaiten.tokens.computed": timings.tokens_computed,
                "kaiten.tokens.chunks": plan.chunk_tokens if item.step == 0 else 0,
                "kaiten.preempted": [str(serial) for serial in plan.preempted],
                "kaiten.blocks.allocated": len(plan.appends),
                "kaiten.blocks.free": plan.blocks_free,
                "kaiten.queue.depth": plan.waiting,
                "kaiten.worker.wait_us": timings.wait_us,
                "kaiten.worker.forward_us": timings.forward_us,
                "kaiten.worker.sample_us": timings.sample_us,
            },
        )
        span.end(item.ended_ns)

    def _phases(self, item: Ended) -> None:
        """queue, prefill and decode, end to end, below the request's own span."""
        over = item.over
        parent = _PROPAGATOR.extract({"traceparent": item.traceparent})
        start_ns = item.ended_ns - over.queue_ns - over.prefill_ns - over.decode_ns
        attributes: dict[str, AttributeValue] = {
            "kaiten.request.serial": over.serial,
            "gen_ai.usage.input_tokens": over.prompt_tokens,
            "gen_ai.usage.output_tokens": over.output_tokens,
            "kaiten.usage.cached_tokens": over.cached_tokens,
            "kaiten.preemptions": over.preemptions,
            "gen_ai.response.finish_reasons": [ending.reason.value for ending in over.endings],
        }
        phases = (
            ("queue", over.queue_ns),
            ("prefill", over.prefill_ns),
            ("decode", over.decode_ns),
        )
        for phase, took_ns in phases:
            span = self._tracer.start_span(
                f"kaiten.{phase}", context=parent, start_time=start_ns, attributes=attributes
            )
            start_ns += took_ns
            span.end(start_ns)


def span_contexts(traceparents: Iterable[str]) -> list[SpanContext]:
    """Of the requests that have one, each once, in order."""
    contexts = []
    for traceparent in dict.fromkeys(traceparents):
        extracted = _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())
        context = get_current_span(extracted).get_span_context()
        if context.is_valid:
            contexts.append(context)
    return contexts
