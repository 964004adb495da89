"""What counting and tracing cost: processor time per step and per request, listened to or not.

`python -m benchmarks.serving.seeing --save`. Nothing here waits for anybody: a step of the
scheduler and of the worker is counted by plain numbers and, in the scheduler, two histograms; spans
are made by a task of its own (`spans` figures), of so many iterations and requests per second.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

from benchmarks.core.bench_scheduler import Bench
from benchmarks.recording import record
from gateway.observe import metrics as gateway_meters
from gateway.tenants import DEFAULT
from gateway.values.generation_request import GenerationRequest, TextPrompt
from gpu_worker.batch.plans import StepOutcome, StepResult, StepTimings
from gpu_worker.service import metrics as worker_meters
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.ledger_pb2 import JournalRecord
from kaiten.v1.worker_service_pb2 import StepTimings as TimingsMessage
from scheduler_svc import meters as scheduler_meters
from scheduler_svc.core.commands import Command, StepDone
from scheduler_svc.core.outcome import Finished, Outcome, RequestOver
from scheduler_svc.core.types import Reason
from scheduler_svc.timeline import Timelines
from service_kit.metrics import NO_METER, Metrics
from service_kit.otlp import message_of
from service_kit.telemetry import minted, traceparent_of
from tests.support.kept_spans import KeptSpans

TURNS = 5
TIMINGS = {"wait_us": 10, "forward_us": 2000, "sample_us": 90, "tokens_computed": 64, "rows": 64}
RESULT = StepResult(
    plan_id=1,
    step=0,
    outcome=StepOutcome(slots=(), token_ids=()),
    is_last=True,
    timings=StepTimings(
        wait_us=TIMINGS["wait_us"],
        forward_us=TIMINGS["forward_us"],
        sample_us=TIMINGS["sample_us"],
        tokens_computed=TIMINGS["tokens_computed"],
        rows=TIMINGS["rows"],
    ),
)
OVER = RequestOver(
    id="default:r",
    sequence_id=1,
    num_prompt_tokens=30,
    num_cached_tokens=16,
    outputs=((5, 6),),
    endings=(Finished(sequence_id=1, reason=Reason.LENGTH, num_output_tokens=2),),
    queue_ns=1_000_000,
    prefill_ns=2_000_000,
    decode_ns=300_000_000,
    num_preemptions=0,
)
ASK = GenerationRequest(prompt=TextPrompt(text="x"), body_hash=b"")
LENGTH = FinishReason.FINISH_REASON_LENGTH


def cost_us(work: Callable[[], object], count: int = 5000) -> float:
    """Processor time of one call; the median of some turns."""
    turns = []
    for _ in range(TURNS):
        begin_ns = time.thread_time_ns()
        for _ in range(count):
            work()
        turns.append((time.thread_time_ns() - begin_ns) / 1000 / count)
    return round(median(turns), 2)


def counting(metrics: Metrics | None) -> dict[str, float]:
    """With these metrics, or with nobody listening."""
    meter = NO_METER if metrics is None else metrics.meter
    scheduler = scheduler_meters.Meters(meter)
    worker = worker_meters.Meters(meter)
    gateway = gateway_meters.Meters(meter, model="m")
    timings = TimingsMessage()
    for name, value in TIMINGS.items():
        setattr(timings, name, value)

    def visit() -> None:
        with gateway.opening(ASK, DEFAULT) as one:
            one.prompt_tokens = 30
        one.first_ns = one.started_ns + 1
        outcome = gateway_meters.outcome_of([LENGTH], None, goes_on=False)
        gateway.closed(one, [20], outcome, is_kept=False)

    def end() -> None:
        scheduler.ended(1, [OVER], lambda _: "")
        scheduler.committed([JournalRecord(seq=1)])

    return {
        "scheduler_step": cost_us(lambda: scheduler.stepped(timings)),
        "scheduler_request": cost_us(end),
        "worker_step": cost_us(lambda: worker.stepped(RESULT)),
        "gateway_request": cost_us(visit),
    }


def spans() -> dict[str, float]:
    """Minting ids, which a plan waits for; and what nobody waits for: spans of an iteration with so
    many members, until they are bytes.
    """
    kept, links = KeptSpans(), [traceparent_of(minted(is_sampled=True)) for _ in range(256)]
    sink = kept.sink()
    attributes = {f"kaiten.some.attribute.{n}": n for n in range(20)}

    def iteration(members: int) -> None:
        context = minted(is_sampled=True)
        sink.put(
            "i",
            context=context,
            start_ns=1,
            end_ns=2,
            links=links[:members],
            attributes=attributes,
        )
        message_of(kept.spans.pop()).SerializeToString()

    return {
        "mint": cost_us(lambda: minted(is_sampled=True)),
        "span": cost_us(lambda: iteration(0), 1000),
        "span_with_64_links": cost_us(lambda: iteration(64), 500),
        "span_with_256_links": cost_us(lambda: iteration(256), 200),
    }


def timelines_us(load: str, rows: int = 256, steps: int = 300) -> float:
    """Of a step of so many rows: writing down where requests' time goes (`Explain`). The median."""
    bench, timelines, spent_ns = Bench(load, rows, steps), Timelines(), [0]
    apply = bench.scheduler.apply

    def told(command: Command, now_ns: int) -> Outcome:
        outcome = apply(command, now_ns)
        began_ns = time.thread_time_ns()
        timelines.take(command, outcome, now_ns)
        spent_ns[-1] += time.thread_time_ns() - began_ns
        if isinstance(command, StepDone):
            spent_ns.append(0)
        return outcome

    with mock.patch.object(bench.scheduler, "apply", told):
        bench.run()
    return round(median(spent_ns[:-1]) / 1000, 2)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    listened = Metrics("bench", is_scraped=True)
    silent_us, counted_us, span_us = counting(None), counting(listened), spans()
    figures: dict[str, object] = {
        "unheard_us": silent_us,
        "counted_us": counted_us,
        "page_us": cost_us(listened.page, 20),
        "spans_us": span_us,
        "timelines_us": {load: timelines_us(load) for load in ("steady", "crowded")},
    }
    listened.close()
    record("seeing", figures, save=arguments.save)


if __name__ == "__main__":
    main()
