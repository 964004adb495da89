"""A finished span as the SDK's own encoder would send it, and which traceparents are some."""

from importlib.metadata import version
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service_kit.metrics import Metrics
from service_kit.otlp import Exporter
from service_kit.telemetry import LINKS_MAX, configure, context_of, traceparent_of
from tests.support.kept_spans import KeptSpans

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MEMBERS = [f"00-{n:032x}-{n:016x}-01" for n in range(1, 40)]
ATTRIBUTES: dict[str, Any] = {
    "a.text": "rows",
    "a.flag": True,
    "a.number": -3,
    "a.share": 0.5,
    "some.texts": ["x", "y"],
    "none.of.them": [],
}


def made_by_the_sdk(fields: dict[str, Any]) -> Any:
    """The same span, and what its encoder makes of it."""
    exporter = InMemorySpanExporter()
    whose = {"service.name": "kaiten-test", "service.version": version("kaiten")}
    provider = TracerProvider(
        resource=Resource.create(whose),
        span_limits=SpanLimits(max_links=LINKS_MAX),
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent, above = fields["parent"], Context()
    if parent is not None:
        above = set_span_in_context(NonRecordingSpan(parent), above)
    span = provider.get_tracer("kaiten").start_span(
        "s",
        context=above,
        kind=fields["kind"],
        attributes=ATTRIBUTES,
        links=[Link(context) for one in MEMBERS if (context := context_of(one))],
        start_time=5,
    )
    if fields["error"]:
        span.set_status(Status(StatusCode.ERROR, fields["error"]))
    span.end(9)
    return encode_spans(exporter.get_finished_spans())


@pytest.mark.parametrize("error", ["", "INTERNAL"])
@pytest.mark.parametrize("kind", SpanKind)
@pytest.mark.parametrize("parent", [None, TRACE])
def test_it_is_what_the_sdk_would_send(parent: str | None, kind: SpanKind, error: str) -> None:
    above = context_of(parent) if parent else None
    fields: dict[str, Any] = {"parent": above, "kind": kind, "error": error}
    kept, exporter = KeptSpans(), Exporter("http://127.0.0.1:1", "test")
    kept.sink().put("s", links=MEMBERS, attributes=ATTRIBUTES, start_ns=5, end_ns=9, **fields)
    ours = exporter._translate_data(kept.get_finished_spans())
    theirs = made_by_the_sdk(fields)
    # Ids are drawn.
    for sent in (ours, theirs):
        span = sent.resource_spans[0].scope_spans[0].spans[0]
        assert len(span.span_id) == 8
        assert len(span.trace_id) == 16
        assert (span.trace_id.hex() in TRACE) == (parent is not None)
        span.span_id = span.trace_id = b""
        # Set or not, an empty one says nothing.
        span.status.SetInParent()
    assert ours == theirs
    exporter.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "is_plain"),
    [("http://127.0.0.1:1", True), ("https://127.0.0.1:1", False), ("127.0.0.1:1", False)],
)
def test_what_is_not_said_to_be_plain_goes_by_tls(endpoint: str, is_plain: bool) -> None:
    """As metrics do: OpenTelemetry has one rule for all signals."""
    exporter = Exporter(endpoint, "test")
    assert exporter._insecure is is_plain
    exporter.shutdown()


def test_spans_may_go_elsewhere_than_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.2:2")
    spans, metrics = configure("test"), Metrics("test", is_scraped=False)
    assert spans is not None
    assert spans._sending is not None
    assert spans._sending._exporter._endpoint == "127.0.0.2:2"
    assert metrics._exporter._endpoint == "127.0.0.1:1"
    for each in (spans, metrics):
        each.close()


@pytest.mark.parametrize(
    "given",
    [
        *(TRACE, TRACE[:-1] + "0", f"  {TRACE}\t", f"01{TRACE[2:]}-more", f"01{TRACE[2:]}"),
        *("", "nonsense", TRACE.upper(), f"{TRACE}-more", f"ff{TRACE[2:]}", TRACE[:-1]),
        *(f"00-{0:032x}-{1:016x}-01", f"00-{1:032x}-{0:016x}-01", f"x{TRACE}"),
    ],
)
def test_a_traceparent_is_read_as_the_sdk_reads_it(given: str) -> None:
    above = TraceContextTextMapPropagator().extract({"traceparent": given}, context=Context())
    theirs, ours = get_current_span(above).get_span_context(), context_of(given)
    assert ours == (theirs if theirs.is_valid else None)
    if ours is not None:
        assert context_of(traceparent_of(ours)) == ours
