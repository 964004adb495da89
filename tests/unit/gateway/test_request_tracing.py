"""A request's root span: which are made, under which trace, and what they say."""

import asyncio
import time

import pytest

from gateway.observe.metrics import Meters, Visit, outcome_of
from gateway.observe.tracing import Tracing
from gateway.tenants import Tenant
from gateway.values.generation_request import GenerationRequest, TextPrompt
from kaiten.v1.common_pb2 import FinishReason, SamplingParams
from kaiten.v1.inference_service_pb2 import Done, Timings, Usage
from service_kit.errors import DeadlineExceeded, InvalidRequest, Unavailable
from service_kit.otlp import message_of
from service_kit.telemetry import Span, trace_id_of
from tests.support.exemplars import Exemplars
from tests.support.kept_spans import KeptSpans

CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNWANTED = CLIENTS[:-1] + "0"
# Of spans and of metrics.
REQUIRED = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


class Seen:
    """A gateway's tracing, and what came of it."""

    def __init__(self) -> None:
        self._exporter = KeptSpans()
        self.tracing = Tracing(self._exporter.sink(), model="m")
        self.exemplars = Exemplars()
        self.meters = Meters(self.exemplars.meter, model="m", has_exemplars=True)

    def visit(
        self,
        traceparent: str = "",
        done: Done | None = None,
        n: int = 1,
        *,
        id: str = "mine",
        is_repeat: bool = False,
        seed: int = 3,
        error: BaseException | None = None,
        is_stream: bool = False,
        arrived_ns: int = 0,
    ) -> Visit:
        """One request of tenant acme that ends for length, unless it is left for an error."""
        sampling = SamplingParams(max_tokens=7, temperature=0.9, seed=seed)
        ask = GenerationRequest(
            prompt=TextPrompt(text="another"),
            body_hash=b"",
            traceparent=traceparent,
            sampling=sampling,
            n=n,
            is_stream=is_stream,
            arrived_ns=arrived_ns,
        )
        tenant = Tenant(name="acme")
        with self.meters.opening(ask, tenant) as visit, self.tracing.opening(ask) as trace:
            trace.traceparent(f"acme:{id}", traceparent)
            trace.submitting()
            trace.is_repeat = is_repeat
        visit.trace = trace
        if error is None:
            done, reasons = done or Done(), [FinishReason.FINISH_REASON_LENGTH]
        else:
            done, reasons = None, []
        outcome = outcome_of(reasons, error, goes_on=False)
        is_kept = self.tracing.keeps(trace, outcome, reasons, done)
        self.meters.closed(visit, [7], outcome, is_kept=is_kept)
        counts = {"input_tokens": 4, "output_tokens": 7}
        self.tracing.closed(trace, outcome, reasons, **counts, first_s=0.25, done=done)
        return visit

    @property
    def roots(self) -> list[Span]:
        return [s for s in self._exporter.get_finished_spans() if s.name == "text_completion m"]

    def named(self, name: str) -> Span:
        (span,) = [s for s in self._exporter.get_finished_spans() if s.name == name]
        return span

    @property
    def accepts(self) -> list[Span]:
        return [s for s in self._exporter.get_finished_spans() if s.name == "kaiten.accept"]


def test_whoever_knows_a_request_knows_its_trace() -> None:
    seen = Seen()
    seen.visit()
    (root,) = seen.roots
    assert root.context.trace_id == trace_id_of("acme:mine") != trace_id_of("other:mine")
    # What the record has says it, to whichever gateway; of older leaders it follows from the id.
    for tracing in (seen.tracing, Tracing(None, model="m")):
        assert tracing.trace_id("acme:mine", CLIENTS) == CLIENTS.split("-")[1]
        assert tracing.trace_id("acme:mine", "") == ""
    assert f"{root.context.trace_id:032x}" == seen.tracing.trace_id("acme:mine", None)
    assert Tracing(None, model="m").trace_id("acme:mine", None) == ""


def test_a_clients_own_trace_is_continued() -> None:
    seen = Seen()
    seen.visit(CLIENTS)
    (root,) = seen.roots
    assert f"{root.context.trace_id:032x}" == CLIENTS.split("-")[1]


def test_it_says_what_the_conventions_ask_for_and_no_text() -> None:
    seen = Seen()
    seen.visit(done=Done(usage=Usage(cached_tokens=2)), n=2)
    (root,), (accept,) = seen.roots, seen.accepts
    assert root.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kaiten",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "kaiten.outcome": "length",
        "kaiten.preemptions": 0,
        "kaiten.first_token_us": 0,
    }
    told = {name: dict(point.attributes) for name, (point,) in seen.exemplars.points().items()}
    assert told["gen_ai.server.request.duration"] == {n: root.attributes[n] for n in REQUIRED}
    assert accept.attributes == {
        "messaging.system": "redis",
        "messaging.destination.name": "inbox",
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        "messaging.message.id": "mine",
    }


def test_it_begins_with_the_first_byte() -> None:
    """However long the rest of it takes to come, and to be read."""
    arrived_ns, seen = time.perf_counter_ns() - 5 * 10**9, Seen()
    seen.visit(arrived_ns=arrived_ns)
    (root,), (accept,) = seen.roots, seen.accepts
    assert root.start_ns == accept.start_ns <= time.time_ns() - 5 * 10**9


def test_a_stream_is_one_and_says_when_it_began() -> None:
    """Which is of no answer that is sent whole."""
    seen = Seen()
    for is_stream in (True, False):
        seen.visit(is_stream=is_stream)
    names = ("gen_ai.request.stream", "gen_ai.response.time_to_first_chunk")
    told = [[root.attributes.get(name) for name in names] for root in seen.roots]
    assert told == [[True, 0.25], [None, None]]


@pytest.mark.parametrize(
    ("given", "told"), [(2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)]
)
def test_a_seed_is_told_as_the_signed_number_that_clients_know(given: int, told: int) -> None:
    """What no attribute can hold would cost all that is sent with it."""
    seen = Seen()
    seen.visit(seed=given)
    (root,) = seen.roots
    assert root.attributes["gen_ai.request.seed"] == told
    (sent,) = [a.value for a in message_of(root).attributes if a.key == "gen_ai.request.seed"]
    assert sent.int_value == told


@pytest.mark.parametrize(
    ("error", "outcome", "is_error", "is_always_kept"),
    [
        (DeadlineExceeded("queue"), "deadline_exceeded", True, True),
        (ZeroDivisionError(), "error", True, True),
        (Unavailable("this gateway is shutting down"), "moved", True, False),
        (asyncio.CancelledError(), "left", False, False),
    ],
)
def test_what_a_client_is_told_as_an_error_is_one_here(
    error: BaseException, outcome: str, *, is_error: bool, is_always_kept: bool
) -> None:
    """Whoever tells it, be it this gateway while no scheduler is there."""
    seen = Seen()
    for traceparent in (CLIENTS, UNWANTED):
        seen.visit(traceparent, error=error)
    assert len(seen.roots) == 1 + is_always_kept
    for root in seen.roots:
        assert root.attributes["kaiten.outcome"] == outcome
        assert root.attributes.get("error.type", "") == root.error == outcome * is_error


@pytest.mark.parametrize(
    ("timings", "is_kept"),
    [
        (Timings(), False),
        (Timings(queue_us=9_000_000, prefill_us=999_999, decode_us=60_000_000), False),
        (Timings(queue_us=9_000_000, prefill_us=1_000_000), True),
        (Timings(preemptions=1), True),
    ],
)
def test_unwanted_roots_are_kept_where_somebody_will_ask(timings: Timings, is_kept: bool) -> None:
    seen = Seen()
    seen.visit(UNWANTED, Done(timings=timings))
    assert len(seen.roots) == is_kept
    told = seen.exemplars.traces()["gen_ai.server.request.duration"]
    assert told == {root.context.trace_id for root in seen.roots}


@pytest.mark.parametrize(
    ("error", "code", "is_always_kept"),
    [
        (InvalidRequest("n", "is wrong"), "INVALID_ARGUMENT", False),
        (asyncio.CancelledError(), "CANCELLED", False),
        (ZeroDivisionError(), "INTERNAL", True),
    ],
)
def test_what_is_never_accepted_has_its_code(
    error: BaseException, code: str, is_always_kept: bool
) -> None:
    """Refused, left by its client, or lost by a fault of ours."""
    seen = Seen()
    for traceparent in ("", UNWANTED):
        ask = GenerationRequest(prompt=TextPrompt(text="x"), body_hash=b"", traceparent=traceparent)
        with pytest.raises(type(error)), seen.tracing.opening(ask):
            raise error
    codes = [root.attributes["error.type"] for root in seen.roots]
    assert codes == [code] * (1 + is_always_kept)


def test_nothing_is_untold_between_the_last_token_and_its_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the submit's answer takes: what the scheduler tells may begin as soon as it was
    sent, and what it tells of is over that much earlier than the answer would have it.
    """
    seen, ms = Seen(), 1_000_000
    # Begun, submitted, accepted after a slow answer, and told: then all spans have their end.
    times = iter([0, 10 * ms, 60 * ms, *[(200 + late) * ms for late in range(8)]])
    monkeypatch.setattr("gateway.observe.tracing.time.time_ns", lambda: next(times))
    seen.visit(done=Done(timings=Timings(queue_us=50_000, prefill_us=20_000, decode_us=30_000)))
    accept, deliver = seen.named("kaiten.accept"), seen.named("kaiten.deliver")
    assert (accept.start_ns, accept.end_ns) == (0, 60 * ms)
    assert (deliver.start_ns, deliver.end_ns) == (110 * ms, 200 * ms)
    assert seen.roots[0].end_ns == 200 * ms, "no part of it ends later"
