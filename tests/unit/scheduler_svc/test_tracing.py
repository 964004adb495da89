"""What a trace says of iterations and requests, read back from the real SDK."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.kaiten.v1.worker_service_pb2 import StepResult, StepTimings
from scheduler_svc.core.types import Committed, Finished, Plan, Reason, RequestOver
from scheduler_svc.tracing import QUEUE_MAX, IterationSampler, Tracing
from tests.support.answers import until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


def plan(*, preempted: tuple[int, ...] = ()) -> Plan:
    return Plan(
        worker_id="w1",
        plan_id=3,
        lease_steps=1,
        leaves=(),
        joins=(),
        appends=((0, 7),),
        copies=(),
        chunks=((1, 16),),
        checksum=0,
        preempted=preempted,
        decode_rows=2,
        blocks_free=5,
        waiting=4,
    )


TIMINGS = StepTimings(wait_us=10, forward_us=1000, sample_us=90, tokens_computed=18, rows=3)


def step(tracing: Tracing, *traceparents: str) -> None:
    """One preempting plan and its first step, with a row per traceparent."""
    tracing.planned(plan(preempted=(9,)))
    serials = list(range(len(traceparents)))
    committed = Committed(
        slots=serials, serials=serials, positions=serials, tokens=serials, events=[]
    )
    result = StepResult(plan_id=3, timings=TIMINGS)
    tracing.stepped("w1", result, committed, lambda serial: traceparents[serial], 5_000_000)


@pytest.fixture
async def told() -> AsyncIterator[tuple[Tracing, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"), policy="fcfs")
    task = asyncio.create_task(tracing.run())
    yield tracing, exporter
    task.cancel()


async def test_an_iteration_is_a_root_linked_to_its_members(
    told: tuple[Tracing, InMemorySpanExporter],
) -> None:
    tracing, exporter = told
    step(tracing, TRACE, "", OTHER, TRACE, "nonsense")
    await until(exporter.get_finished_spans, "a span")
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [
        TRACE.split("-")[1],
        OTHER.split("-")[1],
    ]
    assert span.attributes is not None
    assert span.attributes["kaiten.preempted"] == ("9",)
    assert span.attributes["kaiten.tokens.chunks"] == 16
    assert span.attributes["kaiten.queue.depth"] == 4
    assert (span.start_time, span.end_time) == (5_000_000 - 1_100_000, 5_000_000)


async def test_the_phases_of_a_request_follow_each_other_below_its_span(
    told: tuple[Tracing, InMemorySpanExporter],
) -> None:
    tracing, exporter = told
    over = RequestOver(
        id="default:r",
        serial=1,
        prompt_tokens=3,
        cached_tokens=0,
        outputs=((5, 6),),
        endings=(Finished(serial=1, reason=Reason.LENGTH, output_tokens=2),),
        queue_ns=100,
        prefill_ns=200,
        decode_ns=300,
        preemptions=0,
    )
    tracing.ended([over], lambda serial: TRACE, 1000)
    await until(lambda: len(exporter.get_finished_spans()) == 3, "three spans")
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["kaiten.queue", "kaiten.prefill", "kaiten.decode"]
    assert [(s.start_time, s.end_time) for s in spans] == [(400, 500), (500, 700), (700, 1000)]
    for span in spans:
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == TRACE.split("-")[2]


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    tracing = Tracing(TracerProvider().get_tracer("test"), policy="fcfs")
    for _ in range(QUEUE_MAX + 3):
        step(tracing)
    assert tracing.dropped == 3


def test_the_sampler_limits_the_rate_but_keeps_what_matters() -> None:
    sampler, quick = IterationSampler(per_s=10), StepTimings(forward_us=1000)
    kept = [sampler.keeps(plan(), 0, quick, now_ns) for now_ns in range(0, 10**9, 10**7)]
    assert sum(kept) == 10
    assert sampler.keeps(plan(preempted=(1,)), 0, quick, 10**9 - 1)
    assert not sampler.keeps(plan(preempted=(1,)), 1, quick, 10**9 - 1)
    assert sampler.keeps(plan(), 5, StepTimings(forward_us=2_000_000), 10**9 - 1)
