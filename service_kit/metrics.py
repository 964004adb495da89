"""Metrics of a process: one set of OpenTelemetry instruments, read by Prometheus and sent by OTLP.

Instruments are made from `Metrics.meter`, which is the API's own no-op when nobody listens: then
counting costs nothing. A value that changes with every step is a plain number of its owner, read by
an observable instrument only when somebody looks; histograms are recorded once per request or step,
never per token.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import structlog
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeterProvider, Observation
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from service_kit import telemetry
from service_kit.errors import ConfigError, Unavailable
from service_kit.metrics_server import MetricsServer, Page
from service_kit.tls import Expiry

log = structlog.get_logger()

PROMETHEUS: Final = "opentelemetry.exporter.prometheus"
OTLP: Final = "opentelemetry.exporter.otlp.proto.grpc.metric_exporter"
# OpenTelemetry's own switch: collectors that take only traces refuse metrics.
OTLP_SWITCH: Final = "OTEL_METRICS_EXPORTER"
FIX: Final = "pip install 'kaiten[metrics]'"
Number = int | float
# For who is built without a process around it.
NO_METER: Final = NoOpMeterProvider().get_meter("kaiten")


class Metrics:
    """The instruments of one process and whoever reads them. Close it at the end."""

    def __init__(
        self, service: str, *, is_scraped: bool, environ: Mapping[str, str] | None = None
    ) -> None:
        """`is_scraped`: there will be a page for Prometheus."""
        # Of the model that is served, for the names of others (`metric_aliases`); empty: not known.
        self.model_name: Callable[[], str] = str
        self._registry: Any = None
        self._server: MetricsServer | None = None
        self._provider: Any = None
        self._exporter = _otlp_exporter(environ)
        sending = () if self._exporter is None else (_sending(self._exporter),)
        readers = [*self._page_reader(is_scraped), *sending]
        # Only who is sent metrics by OTLP gets exemplars: a page in Prometheus' text has none.
        has_spans = bool(telemetry.endpoint_of(telemetry.TRACES, environ))
        self.has_exemplars = bool(sending) and has_spans
        if not readers:
            self.meter: Meter = NO_METER
            return
        from opentelemetry.sdk import metrics as sdk
        from opentelemetry.sdk.resources import Resource

        self._provider = sdk.MeterProvider(
            metric_readers=readers,
            resource=Resource.create(telemetry.resource_of(service)),
            shutdown_on_exit=False,
            # They are most of a record's cost, so only where somebody can look a trace up.
            exemplar_filter=sdk.TraceBasedExemplarFilter()
            if self.has_exemplars
            else sdk.AlwaysOffExemplarFilter(),
        )
        self.meter = self._provider.get_meter("kaiten")

    @property
    def is_heard(self) -> bool:
        """Somebody reads them."""
        return self._provider is not None

    def page(self, accept: str = "") -> Page:
        """All metrics as text, in the form that `accept` asks for. Unavailable without a reader."""
        if self._registry is None:
            raise Unavailable(f"there are no metrics here; {FIX}")
        from service_kit.metric_aliases import encoded

        body, content_type = encoded(self._registry, accept)
        return Page(body=body, content_type=content_type)

    def serve(self, host: str, port: int | None) -> str:
        """A small HTTP server of its own thread, for processes that have none; its address.

        Without a port there is none.
        """
        if port is None:
            return ""
        if self._registry is None:
            raise ConfigError(f"--metrics-port is set, but {PROMETHEUS} is missing: {FIX}")
        try:
            self._server = MetricsServer(host, port, self.page)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; see --metrics-port"
            ) from error
        return f"http://{host}:{self._server.port}/metrics"

    def close(self) -> None:
        """Free the port and send what is left, but not for long: a stop waits for no collector."""
        if self._server is not None:
            self._server.close()
        if self._provider is not None:
            closing = threading.Thread(target=self._send_left, daemon=True)
            closing.start()
            closing.join(telemetry.CLOSE_S_MAX)
            if closing.is_alive() and self._exporter is not None:
                # What is under way fails.
                self._exporter.shutdown()

    def _send_left(self) -> None:
        try:
            self._provider.shutdown()
        except Exception as error:  # readers' own, of any kind; they may be of no use to anybody
            log.warning("metrics.unsent", reason=str(error))

    def _page_reader(self, is_scraped: bool) -> Sequence[Any]:
        if not is_scraped:
            return ()
        if not telemetry.is_installed(PROMETHEUS):
            log.warning("metrics.unavailable", missing=PROMETHEUS, fix=FIX)
            return ()
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        from service_kit.metric_aliases import AliasedRegistry

        self._registry = AliasedRegistry(lambda: self.model_name())
        return (
            PrometheusMetricReader(
                disable_target_info=True, scope_info_enabled=False, registry=self._registry
            ),
        )


async def close_all(metrics: Metrics, spans: telemetry.Spans | None) -> None:
    """At once: a collector that is away is waited for by both."""
    closing = [metrics.close] if spans is None else [metrics.close, spans.close]
    await asyncio.gather(*map(asyncio.to_thread, closing))


def count_spans(meter: Meter, spans: telemetry.Spans | None) -> None:
    """Say how many spans were sent, and how many nobody will see. None: none are made."""
    if spans is None:
        return
    exported, dropped = seen(lambda: spans.exported), seen(lambda: spans.dropped, "by")
    meter.create_observable_counter("kaiten.spans_exported", exported, "", "that a collector took")
    meter.create_observable_counter("kaiten.spans_dropped", dropped, "", "that nobody will see")


def tell_expiries(meter: Meter, *sources: Callable[[], Iterable[Expiry]]) -> None:
    """Say until when certificates can be used; of who has none there are no series."""

    def read() -> dict[str, float]:
        return {each.flag: each.at.timestamp() for source in sources for each in source()}

    name = "kaiten.certificate_expiry_timestamp"
    told = "unix time from which on nothing in a file of certificates is valid"
    meter.create_observable_gauge(name, seen(read, "flag"), "s", told)


def exemplar(span: SpanContext | None, *, is_kept: bool) -> Context | None:
    """What a value is recorded with, so that the trace it was measured in can be looked up.
    `is_kept`: whatever its flag says, as somebody will ask about it.

    None: there is none, or nobody keeps it.
    """
    if span is None or not (span.trace_flags.sampled or is_kept):
        return None
    # An instrument goes by the flag alone.
    flags = TraceFlags(span.trace_flags | TraceFlags.SAMPLED)
    span = SpanContext(span.trace_id, span.span_id, span.is_remote, flags)
    return set_span_in_context(NonRecordingSpan(span), Context())


def seen(
    read: Callable[[], Number | Mapping[Any, Number]], *labels: str
) -> list[Callable[[CallbackOptions], Sequence[Observation]]]:
    """Callbacks of an observable instrument.

    `read` gives a number, or numbers by the value of a label (a tuple, if there are several labels;
    empty values are left out). It is called on the thread of whoever looks.
    """

    def observe(_options: CallbackOptions) -> Sequence[Observation]:
        value = read()
        if not isinstance(value, Mapping):
            return (Observation(value),)
        # A copy, because the owner may go on counting meanwhile.
        return [Observation(count, _attributes(labels, key)) for key, count in list(value.items())]

    return [observe]


def _attributes(labels: Sequence[str], key: str | Sequence[str]) -> dict[str, str]:
    values = (key,) if isinstance(key, str) else key
    return {label: value for label, value in zip(labels, values, strict=True) if value}


def _otlp_exporter(environ: Mapping[str, str] | None) -> Any:
    """None: nobody is named who wants metrics."""
    if not (endpoint := telemetry.endpoint_of(telemetry.METRICS, environ)):
        return None
    if not telemetry.is_installed(OTLP):
        raise ConfigError(
            f"{telemetry.ENDPOINT} is set but the exporter is not installed: pip install "
            f"'kaiten[otlp]', or set {OTLP_SWITCH}=none"
        )
    return import_module(OTLP).OTLPMetricExporter(endpoint)


def _sending(exporter: Any) -> Any:
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(exporter)
