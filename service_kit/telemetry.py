"""Spans by OpenTelemetry: sent when OTEL_EXPORTER_OTLP_ENDPOINT is set, otherwise there are none.

Others must know a span's id before the span exists: a request's before it is queued, an iteration's
before it runs. So ids are minted first and cost a microsecond; the spans are made of what happened
when it is over, off the path that clients wait for. A collector that is slow or away costs spans,
which are not even made, and counted (`Spans.dropped`), and nothing else.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

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
# And a request that waited so long for its first token, queue and prompt together.
SLOW_FIRST_TOKEN_US: Final = 10_000_000
# What is left is sent for this long at the end; a collector that is away must not delay a stop.
CLOSE_S_MAX: Final = 2.0
# Spans that may wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says another number.
QUEUE_MAX: Final = 2048
# The SDK sends so many at a time.
BATCH_MAX: Final = 512
QUEUE_VARIABLE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
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


class _Counting:
    """An exporter of the SDK that counts what it is handed, on the thread that sends."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.handed = self.failed = 0

    def export(self, spans: Sequence[object]) -> object:
        self.handed += len(spans)
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


class Spans:
    """Where finished spans go. All calls on one thread."""

    def __init__(
        self,
        provider: "TracerProvider",
        ids: _Ids,
        sending: _Counting | None = None,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        """`sending`: to where, so that no more than `queue_max` wait for it."""
        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("kaiten")
        self._sending, self._queue_max = sending, queue_max
        self._put = 0
        # By whoever had no room for them.
        self._dropped = Counter(maker=0, sender=0)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Spans that nobody will see, by who had no room for them: `maker`, which falls behind,
        `sender`, which waits for the collector; or `refused`, by the collector, after retries.
        """
        failed = 0 if self._sending is None else self._sending.failed
        return {**self._dropped, "refused": failed}

    @property
    def exported(self) -> int:
        """That the collector took."""
        return 0 if self._sending is None else self._sending.handed - self._sending.failed

    def drop(self) -> None:
        """Whoever makes spans has left one out."""
        self._dropped["maker"] += 1

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
        # Counted before the SDK's own queue is full: what would be dropped there is not made.
        if self._sending is not None and self._put - self._sending.handed >= self._queue_max:
            self._dropped["sender"] += 1
            return
        self._put += 1
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
    if not has_spans(given):
        return None
    if not is_installed(EXPORTER):
        raise ConfigError(
            f"{ENDPOINT} is set but the exporter is not installed: pip install 'kaiten[otlp]', "
            f"or unset {ENDPOINT}"
        )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint, queue_max = given[ENDPOINT], _queue_max(given)
    sending = _Counting(
        import_module(EXPORTER).OTLPSpanExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https:")
        )
    )
    # The same calls; its class loads the SDK.
    exporter: Any = sending
    processor = BatchSpanProcessor(
        exporter, max_queue_size=queue_max, max_export_batch_size=BATCH_MAX
    )
    return spans_to(processor, service, sending, queue_max)


def _queue_max(given: Mapping[str, str]) -> int:
    text = given.get(QUEUE_VARIABLE, str(QUEUE_MAX))
    if not text.isdecimal() or int(text) < BATCH_MAX:
        raise ConfigError(f"{QUEUE_VARIABLE} must be {BATCH_MAX} or more, got {text!r}")
    return int(text)


def spans_to(
    processor: object,
    service: str,
    sending: _Counting | None = None,
    queue_max: int = QUEUE_MAX,
) -> Spans:
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
    return Spans(provider, ids, sending, queue_max)


def is_configured(environ: Mapping[str, str] | None = None) -> bool:
    """A collector is named."""
    return bool((os.environ if environ is None else environ).get(ENDPOINT))


def has_spans(environ: Mapping[str, str] | None = None) -> bool:
    """A collector is named, and wants spans."""
    given = os.environ if environ is None else environ
    return is_configured(given) and given.get(SWITCH) != "none"


def is_installed(module: str) -> bool:
    """Whether an optional dependency is there, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a missing parent package
        return False


def trace_id_of(name: str) -> int:
    """Of a request without a parent: whoever knows its name can look its trace up."""
    return int.from_bytes(sha256(name.encode()).digest()[:16]) or 1


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
