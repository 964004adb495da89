"""Finished spans as OTLP. Needs `kaiten[otlp]`, so that only who sends spans imports it.

Connection, retries and OTEL_EXPORTER_OTLP_* are the SDK's. The messages are made here, straight of
what happened: the SDK's objects for a span and each of its links were most of what tracing cost,
5.6 ms for an iteration with 256 members and 260 us for a bare one.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanKind

from service_kit.telemetry import LINKS_MAX, Span, ids_of, resource_of

SCOPE: Final = InstrumentationScope(name="kaiten")
LINKS_KEPT: Final = 4096
KINDS: Final = {kind: SpanMessage.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}


class Exporter(OTLPSpanExporter):
    """The SDK's, but for how spans become a message."""

    def __init__(self, endpoint: str, service: str) -> None:
        super().__init__(endpoint=endpoint)
        of = Resource.create(resource_of(service))
        self._resource = ResourceMessage(attributes=_attributes(of.attributes))

    def _translate_data(  # type: ignore[override] # They are ours, as all that it is handed.
        self, data: Sequence[Span]
    ) -> ExportTraceServiceRequest:
        spans = ScopeSpans(scope=SCOPE, spans=map(message_of, data))
        return ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[spans])]
        )


def message_of(span: Span) -> SpanMessage:
    """As it is sent."""
    parent = span.parent
    message = SpanMessage(
        trace_id=span.context.trace_id.to_bytes(16, "big"),
        span_id=span.context.span_id.to_bytes(8, "big"),
        parent_span_id=b"" if parent is None else parent.span_id.to_bytes(8, "big"),
        name=span.name,
        kind=KINDS[span.kind],
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_attributes(span.attributes),
        links=filter(None, map(_link, span.links[:LINKS_MAX])),
        dropped_links_count=max(0, len(span.links) - LINKS_MAX),
        flags=_flags(is_remote=parent is not None and parent.is_remote),
    )
    if span.error:
        message.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=span.error))
    return message


@lru_cache(maxsize=LINKS_KEPT)
def _link(traceparent: str) -> SpanMessage.Link | None:
    """None for what is no traceparent. Requests are linked by many iterations."""
    if (ids := ids_of(traceparent)) is None:
        return None
    trace_id, span_id, _ = map(bytes.fromhex, ids)
    return SpanMessage.Link(trace_id=trace_id, span_id=span_id, flags=_flags(is_remote=True))


def _flags(*, is_remote: bool) -> int:
    """Whether what it hangs on is of another process, which is known."""
    return 0x300 if is_remote else 0x100


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in values.items()]


def _value(value: Any) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=map(_value, value)))
