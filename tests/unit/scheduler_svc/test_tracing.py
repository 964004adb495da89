"""What a trace says of iterations and requests, as it is sent."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import pytest
from opentelemetry.trace import SpanKind

from kaiten.v1.ledger_pb2 import JournalRecord
from kaiten.v1.worker_service_pb2 import StepResult, StepTimings
from scheduler_svc.core.blocks import BlockCounts
from scheduler_svc.core.commands import MakePlan
from scheduler_svc.core.outcome import Finished, Plan, RequestOver, StepTokens, Why
from scheduler_svc.core.types import Reason
from scheduler_svc.meters import Meters
from scheduler_svc.tracing import QUEUE_MAX, PlanSampler, Tracing
from service_kit.otlp import message_of
from service_kit.telemetry import LINKS_MAX, Span, Spans
from tests.support.answers import until
from tests.support.cell import Cell, spec
from tests.support.exemplars import Exemplars
from tests.support.kept_spans import KeptSpans
from tests.support.told_cell import Told

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


def plan(*, preempted: tuple[int, ...] = ()) -> Plan:
    return Plan(
        worker_id="w1",
        plan_id=3,
        lease_steps=1,
        leaves=(),
        joins=(),
        appends=((0, 7, 0),),
        replacements=(),
        swaps=(),
        copies=(),
        chunks=((1, 16),),
        checksum=0,
        preempted=preempted,
        decode_rows=2,
        blocks_free=5,
        waiting=4,
    )


def over(reason: Reason, *, queue_ns: int = 100, preemptions: int = 0) -> RequestOver:
    return RequestOver(
        id="default:r",
        sequence_id=1,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        outputs=((5, 6),),
        endings=(Finished(sequence_id=1, reason=reason, num_output_tokens=2),),
        queue_ns=queue_ns,
        prefill_ns=200,
        decode_ns=300,
        num_preemptions=preemptions,
    )


TIMINGS = StepTimings(wait_us=10, forward_us=1000, sample_us=90, tokens_computed=18, rows=3)


def step(tracing: Tracing, *traceparents: str) -> str:
    """One preempting plan and its first step, with a row per traceparent; the plan's own."""
    told = tracing.planned(plan(preempted=(9,)), 4_000_000)
    answer(tracing, 0, TIMINGS, *traceparents)
    return told


def answer(
    tracing: Tracing, step: int, timings: StepTimings, *traceparents: str, plan_id: int = 3
) -> None:
    sequence_ids = list(range(len(traceparents)))
    tokens = StepTokens(
        slots=tuple(sequence_ids),
        sequence_ids=sequence_ids,
        positions=sequence_ids,
        tokens=tuple(sequence_ids),
    )
    result = StepResult(plan_id=plan_id, step=step, timings=timings)
    tracing.stepped("w1", result, tokens, lambda sequence_id: traceparents[sequence_id], 5_000_000)


def spans() -> tuple[Spans, KeptSpans]:
    exporter = KeptSpans()
    return exporter.sink(), exporter


def ids(span: Span) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


@pytest.fixture
async def told() -> AsyncIterator[tuple[Tracing, KeptSpans]]:
    sink, exporter = spans()
    tracing = Tracing(sink, policy="fcfs")
    task = asyncio.create_task(tracing.run())
    yield tracing, exporter
    task.cancel()


async def test_an_iteration_is_a_root_linked_to_its_members(
    told: tuple[Tracing, KeptSpans],
) -> None:
    tracing, exporter = told
    told_worker = step(tracing, TRACE, "", OTHER, TRACE, "nonsense")
    await until(exporter.get_finished_spans, "a span")
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert tuple(told_worker.split("-")[1:]) == (*ids(span), "01")
    assert [link.trace_id.hex() for link in message_of(span).links] == [
        TRACE.split("-")[1],
        OTHER.split("-")[1],
    ]
    assert span.attributes["kaiten.preempted"] == ["9"]
    assert span.attributes["kaiten.tokens.chunks"] == 16
    assert span.attributes["kaiten.queue.depth"] == 4
    assert (span.start_ns, span.end_ns) == (5_000_000 - 1_100_000, 5_000_000)


async def test_an_iteration_says_who_was_not_scheduled_and_why(
    told: tuple[Tracing, KeptSpans],
) -> None:
    """What is in no plan: the rest of the budget, blocks, cached tokens, what it should take."""
    tracing, exporter = told
    cell = Cell(spec(blocks=12, slots=8, step_tokens=72), lease=1)
    first = cell.submit(tuple(range(1, 31)), 10)
    plan = cell.must_plan()
    tracing.planned(plan, 0, (), cell.scheduler)
    tracing.planned(replace(plan, plan_id=2), 1, (), cell.scheduler)  # Not traced.
    cell.step()
    cell.submit((*range(1, 13), 7, 8), 2)
    large = cell.submit(20, 2)
    outcome = cell.apply(MakePlan(worker_id="w1"))
    assert outcome.plan is not None
    told_plan = replace(outcome.plan, plan_id=3)
    tracing.planned(told_plan, 10**9, outcome.passed_over, cell.scheduler, lambda _: OTHER)
    answer(tracing, 0, StepTimings(forward_us=9, is_graph=True), TRACE)
    # Not traced, but for its slow steps.
    slow, late = replace(told_plan, plan_id=4), StepTimings(forward_us=2_000_000)
    tracing.planned(slow, 10**9 + 1, outcome.passed_over, cell.scheduler, lambda _: OTHER)
    for step in (0, 1, 2):
        answer(tracing, step, TIMINGS if step == 1 else late, TRACE, plan_id=4)
    await until(lambda: len(exporter.get_finished_spans()) == 3, "three spans")
    span, first_slow, later = exporter.get_finished_spans()
    members = [one.links for one in (span, first_slow, later)]
    assert members == [[TRACE, OTHER]] * 2 + [[TRACE]], "whose prompt is computed is a member"
    found = span.attributes
    assert found["kaiten.not_scheduled"] == [f"{large}: {Why.BLOCKS.value}"]
    assert found["kaiten.admitted"] == [f"{first + 1}: 14 tokens, 12 cached"]
    assert (found["kaiten.blocks.shared"], found["kaiten.tokens.cached"]) == (3, 12)
    assert found["kaiten.chunks"] == [f"{first + 1}: 2"]
    assert found["kaiten.budget.left"] == 72 - 3
    assert found["kaiten.worker.is_graph"] is True
    whole, part = set(found), set(later.attributes)
    assert set(first_slow.attributes) == whole
    assert first_slow.attributes["kaiten.not_scheduled"] == found["kaiten.not_scheduled"]
    assert later.attributes["kaiten.not_scheduled"] == found["kaiten.not_scheduled"]
    assert {name for name in whole - part if name.startswith("kaiten.blocks")} == {
        f"kaiten.blocks.{deed}" for deed in BlockCounts._fields
    }


async def test_the_phases_of_a_request_follow_each_other_below_its_span(
    told: tuple[Tracing, KeptSpans],
) -> None:
    tracing, exporter = told
    tracing.ended(1, [over(Reason.LENGTH)], lambda sequence_id: TRACE, 1000)
    tracing.committed(1)
    await until(lambda: len(exporter.get_finished_spans()) == 3, "three spans")
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["kaiten.queue", "kaiten.prefill", "kaiten.decode"]
    assert [(s.start_ns, s.end_ns) for s in spans] == [(400, 500), (500, 700), (700, 1000)]
    for span in spans:
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == TRACE.split("-")[2]


async def test_an_end_is_told_once_the_ledger_has_it(told: tuple[Tracing, KeptSpans]) -> None:
    """A leader that dies, or is replaced, before leaves it to the next one, who tells all of it."""
    tracing, exporter = told
    for seq, traceparent in ((5, TRACE), (6, OTHER), (9, TRACE)):
        tracing.ended(seq, [over(Reason.LENGTH)], lambda _, it=traceparent: it, 1000)  # type: ignore[misc]
    tracing.committed(4)
    tracing.committed(6)
    tracing.ended(10, [over(Reason.LENGTH)], lambda _: TRACE, 1000)
    step(tracing, TRACE)
    await until(lambda: len(exporter.get_finished_spans()) == 7, "six phases and an iteration")
    *phases, iteration = exporter.get_finished_spans()
    assert iteration.name == "kaiten.iteration"
    told_of = [ids(span)[0] for span in phases]
    assert told_of == [TRACE.split("-")[1]] * 3 + [OTHER.split("-")[1]] * 3


async def test_what_was_left_at_the_end_of_a_leadership_is_told() -> None:
    sink, exporter = spans()
    tracing = Tracing(sink, policy="fcfs")
    task = asyncio.create_task(tracing.run())
    await asyncio.sleep(0)
    tracing.ended(1, [over(Reason.LENGTH)] * 2, lambda _: TRACE, 1000)
    tracing.committed(1)
    task.cancel()
    await asyncio.wait([task])
    assert len(exporter.get_finished_spans()) == 6


async def test_a_preempted_request_has_its_phases_again_with_the_reason(
    told: tuple[Tracing, KeptSpans],
) -> None:
    """Every chunk, and every preemption: without holes, from its arrival to its end."""
    tracing, exporter = told
    cell = Told(spec(blocks=8, slots=2, step_tokens=6), lease=1)
    cell.submit(8, 20)
    one = cell.submit(8, 20)
    cell.finish()
    over = cell.overs[one]
    assert over.num_preemptions
    tracing.ended(1, [over], lambda _: TRACE, cell.now_ns, cell.timelines.tracks)
    tracing.committed(1)
    count = 3 + 3 * over.num_preemptions
    await until(lambda: len(exporter.get_finished_spans()) == count, "all phases")
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["kaiten.queue", "kaiten.prefill", "kaiten.decode"] * (
        1 + over.num_preemptions
    )
    assert all(one.end_ns == other.start_ns for one, other in pairwise(spans))
    track = cell.timelines.tracks(over.id)[0]
    assert (spans[0].start_ns, spans[-1].end_ns) == (track.transitions[0].at_ns, track.end_ns)
    assert [span.kind is SpanKind.CONSUMER for span in spans] == [True] + [False] * (count - 1)
    first, again = spans[1], spans[3]
    assert sum(first.attributes["kaiten.chunks"]) == 8  # type: ignore[arg-type]
    assert len(first.attributes["kaiten.chunks"]) > 1  # type: ignore[arg-type]
    assert f"preempted: {Why.BLOCKS.value}" in again.attributes["kaiten.why"]  # type: ignore[operator]


async def test_later_steps_are_children_with_the_ids_that_the_worker_counts_on(
    told: tuple[Tracing, KeptSpans],
) -> None:
    tracing, exporter = told
    step(tracing, TRACE)
    answer(tracing, 1, TIMINGS, TRACE)
    await until(lambda: len(exporter.get_finished_spans()) == 2, "two spans")
    first, second = exporter.get_finished_spans()
    assert second.parent is not None
    assert second.parent == first.context
    assert int(ids(second)[1], 16) == int(ids(first)[1], 16) + 1
    assert not second.links
    # The row whose prompt the first one computed decodes in all others.
    assert first.attributes["kaiten.rows.decode"] == 2
    assert second.attributes["kaiten.rows.decode"] == second.attributes["kaiten.rows"] == 3
    answer(tracing, 0, StepTimings(rows=2), TRACE, plan_id=3)
    await until(lambda: len(exporter.get_finished_spans()) == 3, "one whose row had ended")
    assert exporter.get_finished_spans()[-1].attributes["kaiten.rows.decode"] == 1
    assert first.attributes["kaiten.rows.preempted"] == 1
    assert not {"kaiten.rows.preempted", "kaiten.preempted"} & second.attributes.keys(), "once"


async def test_every_member_of_a_large_batch_is_linked(
    told: tuple[Tracing, KeptSpans],
) -> None:
    tracing, exporter = told
    members = [f"00-{number:032x}-b7ad6b7169203331-01" for number in range(1, LINKS_MAX + 1)]
    step(tracing, *members)
    await until(exporter.get_finished_spans, "a span")
    (span,) = exporter.get_finished_spans()
    assert len(message_of(span).links) == LINKS_MAX > 128
    assert message_of(span).dropped_links_count == 0


async def test_a_slow_step_is_traced_though_its_plan_is_not(
    told: tuple[Tracing, KeptSpans],
) -> None:
    tracing, exporter = told
    tracing.planned(plan(), 0)
    tracing.planned(plan(), 1)  # Within the wait after the first.
    slow = StepTimings(forward_us=2_000_000)
    tracing._plans["w1"].popleft()
    answer(tracing, 0, TIMINGS, TRACE)
    answer(tracing, 5, slow, TRACE)
    await until(exporter.get_finished_spans, "a span")
    (span,) = exporter.get_finished_spans()
    assert span.attributes["kaiten.plan.step"] == 5
    assert span.parent is None
    assert len(span.links) == 1


async def test_a_request_nobody_traces_has_phases_only_if_it_failed(
    told: tuple[Tracing, KeptSpans],
) -> None:
    tracing, exporter = told
    unsampled = TRACE[:-1] + "0"
    tracing.ended(1, [over(Reason.LENGTH)], lambda _: unsampled, 1000)
    tracing.ended(1, [over(Reason.LENGTH)], lambda _: "", 1000)
    tracing.ended(1, [over(Reason.ERROR)], lambda _: unsampled, 1000)
    tracing.ended(1, [over(Reason.LENGTH)], lambda _: OTHER, 2000)
    tracing.committed(1)
    await until(lambda: len(exporter.get_finished_spans()) == 6, "six spans")
    traces = [ids(span)[0] for span in exporter.get_finished_spans()]
    assert traces == [TRACE.split("-")[1]] * 3 + [OTHER.split("-")[1]] * 3


async def test_phases_of_a_request_that_somebody_will_ask_about_are_always_kept(
    told: tuple[Tracing, KeptSpans],
) -> None:
    """Preempted, or ten seconds without a token."""
    tracing, exporter = told
    unsampled = TRACE[:-1] + "0"
    tracing.ended(1, [over(Reason.LENGTH, queue_ns=9_999_999_000)], lambda _: unsampled, 10**11)
    tracing.ended(1, [over(Reason.LENGTH, queue_ns=10**10)], lambda _: unsampled, 10**11)
    tracing.ended(1, [over(Reason.LENGTH, preemptions=1)], lambda _: unsampled, 10**11)
    tracing.ended(1, [over(Reason.LENGTH)], lambda _: OTHER, 10**11)
    tracing.committed(1)
    await until(lambda: len(exporter.get_finished_spans()) == 9, "nine spans")
    queue, prefill, _ = exporter.get_finished_spans()[:3]
    assert queue.kind is SpanKind.CONSUMER
    assert prefill.kind is SpanKind.INTERNAL
    assert queue.attributes["messaging.operation.type"] == "receive"
    assert queue.attributes["messaging.message.id"] == "r"
    assert queue.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    heard = Exemplars()
    meters = Meters(heard.meter, has_exemplars=True)
    meters.ended(1, [over(Reason.LENGTH)], lambda _: OTHER[:-1] + "0")
    meters.ended(2, [over(Reason.LENGTH, preemptions=1)], lambda _: unsampled)
    meters.committed([JournalRecord(seq=2)])
    assert set().union(*heard.traces().values()) == {queue.context.trace_id}


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    sent = spans()[0]
    tracing = Tracing(sent, policy="fcfs")
    for _ in range(QUEUE_MAX + 3):
        step(tracing)
    assert sent.dropped == {"maker": 3, "sender": 0, "refused": 0}
    tracing.ended(1, [over(Reason.LENGTH)] * (QUEUE_MAX + 4), lambda _: TRACE, 1000)
    assert sent.dropped["maker"] == 7


def test_nothing_is_kept_of_a_lost_worker() -> None:
    tracing = Tracing(spans()[0], policy="fcfs")
    step(tracing)
    tracing.lost("w1")
    tracing.lost("w1")
    assert not tracing._plans


def test_the_sampler_limits_the_rate_but_keeps_what_matters() -> None:
    sampler = PlanSampler(per_s=10)
    assert sum(sampler.keeps(plan(), now_ns) for now_ns in range(0, 10**9, 10**7)) == 10
    assert sampler.keeps(plan(preempted=(1,)), 10**9 - 1)
    assert not sampler.keeps(plan(), 10**9 - 1)
