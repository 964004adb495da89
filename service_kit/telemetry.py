"""Spans by OpenTelemetry: sent when OTEL_EXPORTER_OTLP_ENDPOINT is set, otherwise there are none.

Others must know a span's id before the span exists: a request's before it is queued, an iteration's
before it runs. So ids are minted first and cost a microsecond; the spans are made of what happened
when it is over, off the path that clients wait for. A collector that is away costs spans, which
are counted by the SDK and dropped, and nothing else.
"""

import os
import random
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from service_kit.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# The SDK's default of 128 drops the rest of a large batch silently.
LINKS_MAX: Final = 1024
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
# OpenTelemetry's own switch.
SWITCH: Final = "OTEL_TRACES_EXPORTER"
EXPORTER: Final = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
# A step this slow is traced whatever the rate limit says, by the scheduler and by the worker.
SLOW_STEP_US: Final = 1_000_000
# What is left is sent for this long at the end; a collector that is away must not delay a stop.
CLOSE_S_MAX: Final = 2.0
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NS_PER_S: Final = 1_000_000_000


class _Ids:
    """The SDK asks here for ids: those that were chosen for the next span, or random ones."""

    def __init__(self) -> None:
        self.chosen: SpanContext | None = None

    def generate_trace_id(self) -> int:
        return self.chosen.trace_id if self.chosen is not None else _random_id(128)

    def generate_span_id(self) -> int:
        chosen, self.chosen = self.chosen, None
        return chosen.span_id if chosen is not None else _random_id(64)

    def is_trace_id_random(self) -> bool:
        return False


class Spans:
    """Where finished spans go. All calls on one thread."""

    def __init__(self, provider: "TracerProvider", ids: _Ids) -> None:
        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("kaiten")

    def put(
        self,
        name: str,
        *,
        start_ns: int,
        end_ns: int,
        context: SpanContext | None = None,
        parent: SpanContext | None = None,
        links: Iterable[SpanContext] = (),
        attributes: Attributes = None,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> None:
        """One span that is over. `context`: the ids that others were told; `error`: it failed."""
        self._ids.chosen = context
        above = Context()
        if parent is not None:
            above = set_span_in_context(NonRecordingSpan(parent), above)
        span = self._tracer.start_span(
            name,
            context=above,
            kind=kind,
            attributes=attributes,
            links=[Link(linked) for linked in links],
            start_time=start_ns,
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, but not for long."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S_MAX)


class RateLimit:
    """So many per second; pure but for the time it is given."""

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._second = -1
        self._count = 0

    def allows(self, now_ns: int) -> bool:
        """Whether one more is within the limit of this second."""
        if now_ns // _NS_PER_S != self._second:
            self._second, self._count = now_ns // _NS_PER_S, 0
        self._count += 1
        return self._count <= self._per_s


def configure(service: str, environ: Mapping[str, str] | None = None) -> Spans | None:
    """Spans to the endpoint that is named, or None."""
    given = os.environ if environ is None else environ
    if not is_configured(given) or given.get(SWITCH) == "none":
        return None
    if not is_installed(EXPORTER):
        raise ConfigError(
            f"{ENDPOINT} is set but the exporter is not installed: pip install 'kaiten[otlp]', "
            f"or unset {ENDPOINT}"
        )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint = given[ENDPOINT]
    exporter = import_module(EXPORTER).OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https:")
    )
    return spans_to(BatchSpanProcessor(exporter), service)


def spans_to(processor: object, service: str) -> Spans:
    """Spans to a processor of the SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    assert isinstance(processor, SpanProcessor)
    ids = _Ids()
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource.create({"service.name": f"kaiten-{service}"}),
        span_limits=SpanLimits(max_links=LINKS_MAX),
        id_generator=ids,  # type: ignore[arg-type] # The same methods; its class loads the SDK.
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return Spans(provider, ids)


def is_configured(environ: Mapping[str, str] | None = None) -> bool:
    """A collector is named."""
    return bool((os.environ if environ is None else environ).get(ENDPOINT))


def is_installed(module: str) -> bool:
    """Whether an optional dependency is there, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a missing parent package
        return False


def minted(parent: SpanContext | None = None, *, is_sampled: bool) -> SpanContext:
    """Ids of a span to be, in its parent's trace or in a new one."""
    trace_id = _random_id(128) if parent is None else parent.trace_id
    return SpanContext(trace_id, _random_id(64), is_remote=False, trace_flags=_flags(is_sampled))


def shifted(context: SpanContext, count: int) -> SpanContext:
    """The context of step `count` of a plan whose first step has this one: both ends know it."""
    span_id = (context.span_id - 1 + count) % (2**64 - 1) + 1
    return SpanContext(
        context.trace_id, span_id, is_remote=False, trace_flags=_flags(is_sampled=True)
    )


def traceparent_of(context: SpanContext) -> str:
    """As W3C writes it."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def context_of(traceparent: str) -> SpanContext | None:
    """None for what is no traceparent."""
    if not traceparent:
        return None
    extracted = _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())
    context = get_current_span(extracted).get_span_context()
    return context if context.is_valid else None


def _flags(is_sampled: bool) -> TraceFlags:
    return TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)


def _random_id(bits: int) -> int:
    """Never 0, which stands for no id."""
    return random.getrandbits(bits) or 1
