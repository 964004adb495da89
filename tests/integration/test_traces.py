"""One request is one trace through every service, as a real collector gets it."""

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.processes import MOCK_WORKER
from tests.support.whole_stack import WAIT_S, WholeStack, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="no kaiten[otlp] here")
from tests.support.collector import Collector, collecting

PARENT = "b7ad6b7169203331"
PHASES = ("kaiten.queue", "kaiten.prefill", "kaiten.decode")


class Seen(WholeStack):
    """Every process sends its spans to one collector. The worker can be held."""

    def __init__(self, folder: Path, collector: Collector) -> None:
        self.gates = folder / "gates"
        self.gates.mkdir()
        flags = {"gates": self.gates, "step_ms": 1}
        super().__init__(folder, worker_module=MOCK_WORKER, worker_flags=flags)
        self.collector = collector
        for process in self.processes:
            process.environ = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_BSP_SCHEDULE_DELAY": "100",
            }

    def trace(self, trace_id: str) -> dict[str, Any]:
        """The spans of one request by name, when all have come."""
        wanted = {"text_completion mini", "kaiten.accept", *PHASES, "kaiten.deliver"}
        spans = self.collector.of_trace
        wait_until(
            lambda: wanted <= {span.name for span in spans(trace_id)},
            f"a whole trace; there is {[span.name for span in spans(trace_id)]}",
        )
        assert len(spans(trace_id)) == len(wanted)
        return {span.name: span for span in spans(trace_id)}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with collecting() as collector, Seen(tmp_path_factory.mktemp("traces"), collector) as running:
        yield running


def check_request(stack: Seen, trace_id: str, *, is_stream: bool) -> None:
    """Client → gateway → queue → prefill → decode, and the iterations point at it."""
    spans = stack.trace(trace_id)
    root = spans["text_completion mini"]
    assert root.parent_span_id.hex() == PARENT
    assert stack.collector.services[root.span_id] == "kaiten-gateway"
    for name in ("kaiten.accept", *PHASES, "kaiten.deliver"):
        assert spans[name].parent_span_id == root.span_id
    for name in PHASES:
        assert stack.collector.services[spans[name].span_id] == "kaiten-scheduler"
    took_ns = root.end_time_unix_nano - root.start_time_unix_nano
    queue, prefill, decode = (spans[name] for name in PHASES)
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.start_time_unix_nano < decode.end_time_unix_nano
    deliver = spans["kaiten.deliver"]
    assert stack.collector.services[deliver.span_id] == "kaiten-gateway"
    assert decode.start_time_unix_nano < deliver.start_time_unix_nano <= deliver.end_time_unix_nano
    # One after the other they are the request, but for the ways between processes.
    assert decode.end_time_unix_nano - queue.start_time_unix_nano <= took_ns

    def linking() -> list[Any]:
        return [
            span
            for span in stack.collector.named("kaiten.iteration")
            if any(link.span_id == root.span_id for link in span.links)
        ]

    wait_until(linking, "an iteration that links to the request")
    iteration = linking()[0]
    assert iteration.trace_id != root.trace_id
    assert iteration.parent_span_id == b""
    told = {each.key: each.value for each in root.attributes}
    streamed = ("gen_ai.request.stream", "gen_ai.response.time_to_first_chunk")
    assert [name in told for name in streamed] == [is_stream] * 2

    def below() -> list[Any]:
        steps = stack.collector.named("kaiten.worker.step")
        return [step for step in steps if step.parent_span_id == iteration.span_id]

    wait_until(below, "the worker's step of that iteration")
    assert stack.collector.services[below()[0].span_id] == "kaiten-worker"
    assert below()[0].trace_id == iteration.trace_id


def test_http(stack: Seen) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    reply = httpx.post(
        f"{stack.door.openai}/completions",
        json={"model": "mini", "prompt": "The chef", "max_tokens": 100, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-{PARENT}-01"},
        timeout=WAIT_S,
    )
    assert reply.status_code == 200
    check_request(stack, trace_id, is_stream=False)


def generate(stack: Seen, traceparent: str, **fields: Any) -> None:
    with grpc.insecure_channel(stack.door.grpc) as channel:
        call = InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(text="The chef", **fields),
            metadata=(("traceparent", traceparent),),
            timeout=WAIT_S,
        )
        for _ in call:
            pass


def test_grpc(stack: Seen) -> None:
    trace_id = "1bf7651916cd43dd8448eb211c80319c"
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    generate(stack, f"00-{trace_id}-{PARENT}-01", sampling=sampling)
    check_request(stack, trace_id, is_stream=True)


def test_a_client_that_wants_no_trace_gets_none(stack: Seen) -> None:
    unwanted, wanted = "2cf7651916cd43dd8448eb211c80319c", "3df7651916cd43dd8448eb211c80319c"
    for trace_id, flag in ((unwanted, "00"), (wanted, "01")):
        sampling = SamplingParams(max_tokens=20)
        generate(stack, f"00-{trace_id}-{PARENT}-{flag}", sampling=sampling)
    # Spans are sent in order: when the second request's are here, the first has none.
    stack.trace(wanted)
    assert not stack.collector.of_trace(unwanted)


def test_a_refused_request_is_a_root_with_its_error(stack: Seen) -> None:
    trace_id = "4ef7651916cd43dd8448eb211c80319c"
    with pytest.raises(grpc.RpcError):
        generate(stack, f"00-{trace_id}-{PARENT}-01", sampling=SamplingParams(max_tokens=0))
    wait_until(lambda: stack.collector.of_trace(trace_id), "the refused request's span")
    (span,) = stack.collector.of_trace(trace_id)
    assert span.status.message == "INVALID_ARGUMENT"
    attributes = {each.key: each.value.string_value for each in span.attributes}
    assert attributes["kaiten.outcome"] == "refused"


def test_nothing_of_a_prompt_is_in_any_span(stack: Seen) -> None:
    trace_id = "8af7651916cd43dd8448eb211c80319c"
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    generate(stack, f"00-{trace_id}-{PARENT}-01", sampling=sampling)
    stack.trace(trace_id)
    told = " ".join(str(span) for span in list(stack.collector.spans.values()))
    assert "chef" not in told.lower()


def test_a_plan_says_what_its_step_is_expected_to_take(stack: Seen) -> None:
    """The leader has seen steps as large before: the worker's span has its guess."""

    def guesses() -> list[int]:
        generate(
            stack,
            f"00-5af7651916cd43dd8448eb211c80319c-{PARENT}-01",
            sampling=SamplingParams(max_tokens=40, ignore_eos=True),
        )
        return [
            attribute.value.int_value
            for span in stack.collector.named("kaiten.worker.step")
            for attribute in span.attributes
            if attribute.key == "kaiten.worker.expected_us" and attribute.value.int_value > 0
        ]

    wait_until(guesses, "a plan for a step of a known size")
    assert max(guesses()) < 60_000_000


def iterations_of(stack: Seen, trace_id: str) -> list[Any]:
    """Those that link to a request."""
    return [
        span
        for span in stack.collector.named("kaiten.iteration")
        if any(link.trace_id.hex() == trace_id for link in span.links)
    ]


def workers_of(stack: Seen, trace_id: str) -> set[str]:
    """Who computed a request."""
    told = [each for one in iterations_of(stack, trace_id) for each in one.attributes]
    return {each.value.string_value for each in told if each.key == "kaiten.worker.id"}


def test_a_trace_outlives_its_worker_and_its_leader(stack: Seen) -> None:
    """The worker is killed, then the leader changes: all that comes after hangs where it began."""
    trace_id = "6bf7651916cd43dd8448eb211c80319c"
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
    # It is not over before the last of them has it.
    gates = [stack.gates / str(position) for position in (100, 200)]
    for gate in gates:
        gate.touch()

    def names() -> set[str]:
        return {span.name for span in stack.collector.of_trace(trace_id)}

    with grpc.insecure_channel(stack.door.grpc) as channel:
        call = InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(text="The chef", sampling=sampling),
            metadata=(("traceparent", f"00-{trace_id}-{PARENT}-01"),),
            timeout=4 * WAIT_S,
        )
        wait_until(lambda: workers_of(stack, trace_id), "an iteration of the first worker")
        stack.worker.kill()
        stack.worker.start()
        gates[0].unlink()
        wait_until(lambda: len(workers_of(stack, trace_id)) == 2, "one of the second")
        stack.scheduler.send(signal.SIGTERM)
        assert stack.scheduler.join() == 0
        seen = len(iterations_of(stack, trace_id))
        stack.scheduler.start()
        gates[1].unlink()
        wait_until(lambda: len(iterations_of(stack, trace_id)) > seen, "one of the next leader")
        call.cancel()
    wait_until(lambda: {"text_completion mini", "kaiten.decode"} <= names(), "the whole trace")
    spans = sorted(stack.collector.of_trace(trace_id), key=lambda span: span.start_time_unix_nano)
    (root,) = (span for span in spans if span.parent_span_id.hex() == PARENT)
    assert {span.parent_span_id for span in spans} - {root.parent_span_id} == {root.span_id}
    (iterated,) = {link.span_id for one in iterations_of(stack, trace_id) for link in one.links}
    assert iterated == root.span_id
    # What was before its leader is in the archive, and the rest is told end to end.
    phases = [span for span in spans if stack.collector.services[span.span_id] != "kaiten-gateway"]
    assert [span.name for span in phases] == ["kaiten.unknown", *PHASES]
    ends = [(one.end_time_unix_nano, other.start_time_unix_nano) for one, other in pairwise(phases)]
    assert all(end == start for end, start in ends)
