"""Spans by OpenTelemetry: sent when OTEL_EXPORTER_OTLP_ENDPOINT is set, otherwise there are none.

Others must know a span's id before the span exists: a request's before it is queued, an iteration's
before it runs. So ids are minted first and cost a microsecond; the spans are made of what happened
when it is over, off the path that clients wait for. A collector that is slow or away costs spans,
which are not even made, and counted (`Spans.dropped`), and nothing else.
"""

import os
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.util.types import AttributeValue

from service_kit.errors import ConfigError

# Of a larger batch the rest is counted.
LINKS_MAX: Final = 1024
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
# What is sent, as OpenTelemetry's variables name it.
TRACES: Final = "TRACES"
METRICS: Final = "METRICS"
# OpenTelemetry's own switch of all; that of each names exporters.
OFF: Final = "OTEL_SDK_DISABLED"
EXPORTER: Final = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
OURS: Final = "service_kit.otlp"
NO_ATTRIBUTES: Final[Mapping[str, AttributeValue]] = MappingProxyType({})
# A step this slow is traced whatever the rate limit says, by the scheduler and by the worker.
SLOW_STEP_US: Final = 1_000_000
# And a request that waited so long for its first token, queue and prompt together.
SLOW_FIRST_TOKEN_US: Final = 10_000_000
# What is left is sent for this long at the end; a collector that is away must not delay a stop.
CLOSE_S_MAX: Final = 2.0
# Spans that may wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says another number.
QUEUE_MAX: Final = 2048
QUEUE_VARIABLE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
# The SDK sends so many at a time, unless this says another number.
BATCH_MAX: Final = 512
BATCH_VARIABLE: Final = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
# The SDK ends, or goes on without, for other values of these, each with a traceback.
_EACH: Final = [f"OTEL_EXPORTER_OTLP_{of}" for of in ("", f"{TRACES}_", f"{METRICS}_")]
_NUMBERS: Final = (
    *("OTEL_BSP_SCHEDULE_DELAY", "OTEL_METRIC_EXPORT_INTERVAL"),
    *(f"{each}TIMEOUT" for each in _EACH),
)
_WORDS: Final = {
    f"{each}{name}": word
    for each in _EACH
    for name, word in (("PROTOCOL", "grpc"), ("COMPRESSION", "gzip"))
}
_FILES: Final = [
    f"{each}{name}"
    for each in _EACH
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
]
# W3C Trace Context: version, trace, span, flags, and what later versions append.
_TRACEPARENT: Final = re.compile(
    "[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:(-.*)|[ \t]*)"
)
# Of what is sent along, one: as the SDK takes it, printable and without quotes.
_HEADER: Final = re.compile(
    r"""[ \t]*([\w!#$%&'*+.^`|~-]+[ \t]*=[ \t]*[^\x00-\x1f",;\\\x7f-\U0010ffff]*[ \t]*)?""",
    re.ASCII,
)
_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One that is over. `links`: traceparents of others; `error`: it failed, and how."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    links: Sequence[str]
    attributes: Mapping[str, AttributeValue]
    kind: SpanKind
    start_ns: int
    end_ns: int
    error: str


class _Counting:
    """An exporter of the SDK that counts what it is handed, on the thread that sends."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        # Each only grows, as counters do that are read at any moment.
        self.handed = self.taken = self.failed = 0

    def export(self, spans: Sequence[object]) -> object:
        self.handed += len(spans)
        is_taken = False
        try:
            result = self._exporter.export(spans)
            is_taken = result.name == "SUCCESS"
        finally:
            self.taken += len(spans) * is_taken
            self.failed += len(spans) * (not is_taken)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


class Spans:
    """Where finished spans go. All calls on one thread."""

    def __init__(
        self, processor: Any, sending: _Counting | None = None, queue_max: int = QUEUE_MAX
    ) -> None:
        """`processor`: of the SDK, as far as it hands on whatever it is given; `sending`: to where,
        so that no more than `queue_max` wait for it.
        """
        self._processor = processor
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
        return 0 if self._sending is None else self._sending.taken

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
        links: Sequence[str] = (),
        attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> None:
        """One span that is over. `context`: the ids that others were told, whether or not they were
        told to keep it.
        """
        # Counted before the SDK's own queue is full: what would be dropped there is not made.
        if self._sending is not None and self._put - self._sending.handed >= self._queue_max:
            self._dropped["sender"] += 1
            return
        self._put += 1
        if context is None or not context.trace_flags.sampled:
            context = _kept(context or minted(parent, is_sampled=True))
        span = Span(
            name=name,
            context=context,
            parent=parent,
            links=links,
            attributes=attributes,
            kind=kind,
            start_ns=start_ns,
            end_ns=end_ns,
            error=error,
        )
        self._processor.on_end(span)

    def close(self) -> None:
        """Send what is left, but not for long."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
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
    if not (endpoint := endpoint_of(TRACES, given)):
        return None
    if not is_installed(EXPORTER):
        raise ConfigError(
            f"{ENDPOINT} is set but the exporter is not installed: pip install 'kaiten[otlp]', "
            f"or unset {ENDPOINT}"
        )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    batch_max = _size(given, BATCH_VARIABLE, BATCH_MAX, 1)
    queue_max = _size(given, QUEUE_VARIABLE, max(QUEUE_MAX, batch_max), batch_max)
    sending = _Counting(import_module(OURS).Exporter(endpoint, service))
    # The same calls; its class loads the SDK.
    exporter: Any = sending
    processor = BatchSpanProcessor(
        exporter, max_queue_size=queue_max, max_export_batch_size=batch_max
    )
    return Spans(processor, sending, queue_max)


def _size(given: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = given.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} must be {least} or more, got {text!r}")
    return int(text)


def endpoint_of(signal: str, environ: Mapping[str, str] | None = None) -> str:
    """Of the collector that is sent spans or metrics; empty: nobody wants them. ConfigError: what
    is said of how they are sent is wrong.
    """
    given = os.environ if environ is None else environ
    exporters = given.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    is_off = given.get(OFF, "").lower() == "true"
    if is_off or "otlp" not in [each.strip() for each in exporters.split(",")]:
        return ""
    endpoint = given.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or given.get(ENDPOINT) or ""
    if endpoint:
        _check(given)
    return endpoint


def _check(given: Mapping[str, str]) -> None:
    for name in _NUMBERS:
        if (text := given.get(name)) and not _is_above_0(text):
            raise ConfigError(f"{name} must be a number above 0, got {text!r}")
    for name, word in _WORDS.items():
        if (text := given.get(name)) and text.strip().lower() != word:
            raise ConfigError(f"{name} must be {word!r}, if it is set, got {text!r}")
    for name in _FILES:
        if (text := given.get(name)) and not os.access(text, os.R_OK):
            raise ConfigError(f"{name}: {text!r} cannot be read")
    for each in _EACH:
        if not all(map(_HEADER.fullmatch, given.get(f"{each}HEADERS", "").split(","))):
            # Not what it is: somebody's key.
            raise ConfigError(f"{each}HEADERS must be name=value, with commas between several")


def _is_above_0(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def resource_of(service: str) -> dict[str, AttributeValue]:
    """Who sends, but for what the SDK adds: which process it is, for one."""
    return {"service.name": f"kaiten-{service}", "service.version": version("kaiten")}


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


def ids_of(traceparent: str) -> tuple[str, str, str] | None:
    """Of trace and span, and the flags, in hex; None for what is no traceparent."""
    if (found := _TRACEPARENT.fullmatch(traceparent)) is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_wrong = version == "ff" or (version == "00" and more)
    if is_wrong or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, flags


def context_of(traceparent: str) -> SpanContext | None:
    """None for what is no traceparent."""
    if (ids := ids_of(traceparent)) is None:
        return None
    trace_id, span_id, flags = (int(each, 16) for each in ids)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _kept(context: SpanContext) -> SpanContext:
    """Whatever was said to others of it."""
    return SpanContext(
        context.trace_id, context.span_id, is_remote=False, trace_flags=_flags(is_sampled=True)
    )


def _flags(is_sampled: bool) -> TraceFlags:
    return TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)


def _random_id(bits: int) -> int:
    """Never 0, which stands for no id."""
    return random.getrandbits(bits) or 1
