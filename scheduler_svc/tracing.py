"""Spans of a leadership: one per traced iteration, and the phases of every traced request.

An iteration serves many requests, so its span is the root of its own trace and is *linked* to each
member request's span. Its ids go down with the plan, and the worker's step is its child; step k of
a plan has the ids of the first one, k further. Spans are made by a task of its own from what the
leadership leaves in a bounded queue: when tracing falls behind, spans are dropped and counted, and
steps are not delayed. What is not traced is still in the journal.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from kaiten.v1.worker_service_pb2 import StepResult, StepTimings
from scheduler_svc.core.outcome import Event, PassedOver, Plan, RequestOver, StepTokens
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason, SequenceId
from scheduler_svc.decisions import Blocks, Decision, Decisions, Kept, Waits, waits_of
from scheduler_svc.request_phases import phases_of
from scheduler_svc.timeline_track import Phase, Track
from service_kit import semconv
from service_kit.telemetry import (
    SLOW_FIRST_TOKEN_US,
    SLOW_STEP_US,
    Spans,
    context_of,
    minted,
    shifted,
    traceparent_of,
)

QUEUE_MAX: Final = 1024
# Sequences that an attribute of an iteration names, of each kind.
MEMBERS_TOLD_MAX: Final = 32
# Plans per second that are traced, with their steps, when nothing special happens in them.
PLANS_PER_S: Final = 10
# Requests that end like this are traced whoever was not interested before.
FAILED: Final = frozenset(
    {Reason.ERROR, Reason.UNSERVED, Reason.UNSATISFIABLE, Reason.DEADLINE_EXCEEDED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A plan that may still be answered, and its first step's span to be."""

    plan: Plan
    context: SpanContext
    # Of whoever's prompt its first step computes, with or without a token.
    chunked: Sequence[str] = ()
    # Of what its decision is told once a step of it is traced; None where no core is.
    kept: Kept | None = None
    # And who waited, of one that was to be traced when it was made.
    waits: tuple[Waits, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One answered step with the plan it belongs to."""

    traced: Traced
    step: int
    timings: StepTimings
    finished: int
    # Of the members; none for a later step of a plan, which has those of the first.
    traceparents: Sequence[str]
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that is over, and the span it belongs to."""

    over: RequestOver
    traceparent: str
    ended_ns: int
    # Of its choices.
    tracks: Sequence[Track]


class PlanSampler:
    """Pure: a rate limit that never refuses what somebody will ask about."""

    def __init__(self, per_s: int = PLANS_PER_S) -> None:
        self._wait_ns = 1_000_000_000 // per_s
        self._next_ns = 0

    def keeps(self, plan: Plan, now_ns: int) -> bool:
        """Preempting plans always; of the others so many per second, evenly."""
        if plan.preempted:
            return True
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + self._wait_ns
        return True


class Tracing:
    """Takes what happened, cheaply; makes spans of it in `run`."""

    def __init__(self, spans: Spans, *, policy: str) -> None:
        self._spans = spans
        self._policy, self._decisions = policy, Decisions(policy)
        self._sampler = PlanSampler()
        # By worker: plans that may still be answered, oldest first.
        self._plans: dict[str, deque[Traced]] = {}
        # With the number of the record that has its end, oldest first: what the ledger never gets
        # the next leader tells.
        self._uncommitted: deque[tuple[int, Ended]] = deque()
        self._queue: deque[Iteration | Ended] = deque()
        self._has_some = asyncio.Event()

    def planned(
        self,
        plan: Plan,
        now_ns: int,
        passed_over: Iterable[PassedOver] = (),
        core: Scheduler | None = None,
        of: Callable[[SequenceId], str] = lambda _: "",
    ) -> str:
        """A plan is about to be sent; what the worker is told of its trace. `core`: as it is then,
        for what of the decision is in no plan. `of`: the traceparent of a sequence's request.

        The first plan of a stream says that the older ones are void.
        """
        if plan.plan_id == 1:
            self._plans.pop(plan.worker_id, None)
        context = minted(is_sampled=self._sampler.keeps(plan, now_ns))
        kept = waits = None
        if core is not None:
            kept = self._decisions.keep(plan, passed_over, now_ns, core)
            if context.trace_flags.sampled:
                # Dear: a slow step of any other tells of those alone who were looked at.
                waits = waits_of(core, kept.passed_over, MEMBERS_TOLD_MAX)
        chunks = () if kept is None else kept.chunks
        chunked = [of(one) for one, count in chunks if count]
        traced = Traced(plan=plan, context=context, chunked=chunked, kept=kept, waits=waits)
        self._plans.setdefault(plan.worker_id, deque()).append(traced)
        return traceparent_of(context)

    def lost(self, worker_id: str) -> None:
        """Nothing of its plans will be answered any more."""
        self._plans.pop(worker_id, None)

    def stepped(
        self,
        worker_id: str,
        result: StepResult,
        tokens: StepTokens,
        of: Callable[[SequenceId], str],
        now_ns: int,
    ) -> None:
        """A step was answered. `of`: the traceparent of a sequence's request."""
        plans = self._plans[worker_id]
        while plans[0].plan.plan_id < result.plan_id:
            plans.popleft()
        traced = plans[0]
        is_sampled = traced.context.trace_flags.sampled
        if not is_sampled and result.timings.forward_us < SLOW_STEP_US:
            return
        members = [*map(of, tokens.sequence_ids)] if result.step == 0 or not is_sampled else []
        if result.step == 0:
            members += traced.chunked
        self._put(
            Iteration(
                traced=traced,
                step=result.step,
                timings=result.timings,
                finished=len(result.finished),
                traceparents=members,
                ended_ns=now_ns,
            )
        )

    def ended(
        self,
        seq: int,
        events: Iterable[Event],
        of: Callable[[SequenceId], str],
        now_ns: int,
        tracks: Callable[[str], Sequence[Track]] = lambda _: (),
    ) -> None:
        """Requests may be over by the record of this number. `tracks`: of a request's choices, by
        its id.
        """
        for event in events:
            if isinstance(event, RequestOver):
                ended = Ended(
                    over=event,
                    traceparent=of(event.sequence_id),
                    ended_ns=now_ns,
                    tracks=tracks(event.id),
                )
                if len(self._uncommitted) >= QUEUE_MAX:
                    self._spans.drop()
                else:
                    self._uncommitted.append((seq, ended))

    def committed(self, seq: int) -> None:
        """The ledger has the records up to this one."""
        while self._uncommitted and self._uncommitted[0][0] <= seq:
            self._put(self._uncommitted.popleft()[1])

    def _put(self, item: Iteration | Ended) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._spans.drop()
            return
        self._queue.append(item)
        self._has_some.set()

    async def run(self) -> None:
        """One item at a time, giving the loop back after each; at the end all that are left."""
        try:
            while True:
                await self._has_some.wait()
                self._make()
                if not self._queue:
                    self._has_some.clear()
                await asyncio.sleep(0)
        finally:
            while self._queue:
                self._make()

    def _make(self) -> None:
        item = self._queue.popleft()
        self._iteration(item) if isinstance(item, Iteration) else self._phases(item)

    def _iteration(self, item: Iteration) -> None:
        first, timings = item.traced.context, item.timings
        busy_us = timings.wait_us + timings.forward_us + timings.sample_us
        has_parent = item.step > 0 and first.trace_flags.sampled
        self._spans.put(
            "kaiten.iteration",
            context=shifted(first, item.step),
            parent=first if has_parent else None,
            links=[*filter(None, dict.fromkeys(item.traceparents))],
            start_ns=item.ended_ns - busy_us * 1000,
            end_ns=item.ended_ns,
            attributes=self._decision(item),
        )

    def _decision(self, item: Iteration) -> dict[str, AttributeValue]:
        plan, timings, is_first = item.traced.plan, item.timings, item.step == 0
        told: dict[str, AttributeValue] = {}
        chunk_rows = sum(count > 0 for _, count in plan.chunks) if is_first else 0
        # What a plan does at once is told of its first step alone, so that sums are right.
        if is_first:
            told["kaiten.rows.preempted"] = len(plan.preempted)
            told["kaiten.preempted"] = [str(one) for one in plan.preempted[:MEMBERS_TOLD_MAX]]
        return {
            "kaiten.policy": self._policy,
            "kaiten.worker.id": plan.worker_id,
            "kaiten.plan.id": plan.plan_id,
            "kaiten.plan.step": item.step,
            "kaiten.plan.lease_steps": plan.lease_steps,
            "kaiten.rows": timings.rows,
            # Of those planned some may have ended in the steps before.
            "kaiten.rows.decode": max(0, timings.rows - chunk_rows),
            "kaiten.rows.admitted": len(plan.joins) if is_first else 0,
            "kaiten.rows.finished": item.finished,
            "kaiten.tokens.computed": timings.tokens_computed,
            "kaiten.tokens.chunks": plan.chunk_tokens if is_first else 0,
            "kaiten.blocks.free": plan.blocks_free,
            "kaiten.queue.depth": plan.waiting,
            "kaiten.worker.wait_us": timings.wait_us,
            "kaiten.worker.forward_us": timings.forward_us,
            "kaiten.worker.sample_us": timings.sample_us,
            "kaiten.worker.is_graph": timings.is_graph,
            **told,
            **_decided(item),
        }

    def _phases(self, item: Ended) -> None:
        """queue, prefill and decode, end to end, below the request's own span; and again, for as
        often as it was preempted.
        """
        over = item.over
        reasons = [ending.reason for ending in over.endings]
        request = context_of(item.traceparent)
        if request is None or not (request.trace_flags.sampled or is_asked_about(over)):
            return
        attributes: dict[str, AttributeValue] = {
            "kaiten.request.sequence_id": over.sequence_id,
            semconv.GEN_AI_USAGE_INPUT_TOKENS: over.num_prompt_tokens,
            semconv.GEN_AI_USAGE_OUTPUT_TOKENS: over.num_output_tokens,
            semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: over.num_cached_tokens,
            semconv.GEN_AI_RESPONSE_FINISH_REASONS: [reason.value for reason in reasons],
            "kaiten.preemptions": over.num_preemptions,
        }
        phases = phases_of(over, item.tracks, item.ended_ns)
        received = semconv.inbox_received(over.id.partition(":")[2])
        for one in phases:
            # Out of the inbox it is taken once.
            is_receipt = one is phases[0] and one.phase is Phase.QUEUE
            self._spans.put(
                f"kaiten.{one.phase.value}",
                parent=request,
                start_ns=one.start_ns,
                end_ns=one.end_ns,
                kind=SpanKind.CONSUMER if is_receipt else SpanKind.INTERNAL,
                attributes={**attributes, **one.attributes, **(received if is_receipt else {})},
            )


def _decided(item: Iteration) -> dict[str, AttributeValue]:
    """Of the decision, what there is to say of this step: a later one has the rest in its parent,
    if that is traced.
    """
    traced, told = item.traced, dict[str, AttributeValue]()
    if traced.kept is None:
        return told
    told["kaiten.step.expected_us"] = traced.kept.expected_us[item.step > 0]
    if item.step == 0 or not traced.context.trace_flags.sampled:
        decision = traced.kept.decision(traced.waits)
        told |= _surroundings(decision)
        if item.step == 0:
            told |= _deeds(decision)
    return told


def _surroundings(decision: Decision) -> dict[str, AttributeValue]:
    """What lasts for as long as the plan, bounded; sequences by their ids."""
    waits = decision.waits[:MEMBERS_TOLD_MAX]
    return {
        "kaiten.budget.tokens": decision.budget,
        "kaiten.stages": [f"{stage}: {why}" for stage, why in decision.stages],
        "kaiten.not_scheduled": [f"{one.sequence_id}: {one.why}" for one in waits],
    }


def _deeds(decision: Decision) -> dict[str, AttributeValue]:
    """What the first step alone does, and is in no plan."""
    blocks = decision.blocks
    assert isinstance(blocks, Blocks)
    most = MEMBERS_TOLD_MAX
    return {
        "kaiten.budget.left": decision.budget - decision.tokens,
        "kaiten.chunks": [f"{one}: {count}" for one, count in decision.chunks[:most]],
        "kaiten.sat_out": [str(one) for one in decision.sat_out[:most]],
        "kaiten.admitted": [
            f"{one.sequence_id}: {one.tokens} tokens, {one.cached_tokens} cached"
            for one in decision.admitted[:most]
        ],
        "kaiten.tokens.cached": sum(one.cached_tokens for one in decision.admitted),
        "kaiten.blocks.allocated": blocks.allocated,
        "kaiten.blocks.evicted": blocks.evicted,
        "kaiten.blocks.shared": blocks.shared,
        "kaiten.blocks.freed": blocks.freed,
        "kaiten.blocks.swapped_out": blocks.swapped_out,
        "kaiten.blocks.swapped_in": blocks.swapped_in,
        "kaiten.preempted.why": [f"{one}: {why}" for one, why in decision.preempted[:most]],
    }


def is_asked_about(over: RequestOver) -> bool:
    """Failed, preempted, or late with its first token: the gateway keeps its root by the same
    rule.
    """
    is_failed = any(ending.reason in FAILED for ending in over.endings)
    first_token_us = (over.queue_ns + over.prefill_ns) // 1000
    return is_failed or bool(over.num_preemptions) or first_token_us >= SLOW_FIRST_TOKEN_US
