"""OpenTelemetry: real when OTEL_EXPORTER_OTLP_ENDPOINT is set, otherwise the API's own no-op.

The exporter is an optional dependency; asking for export without it is a ConfigError, not silence.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from opentelemetry import trace

from service_kit.errors import ConfigError

LINKS_MAX: Final = 1024
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
EXPORTER: Final = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def configure(service: str, environ: Mapping[str, str] | None = None) -> bool:
    """Install a tracer provider when an endpoint is named. True when spans are exported."""
    if not is_configured(environ):
        return False
    if not is_installed(EXPORTER):
        raise ConfigError(
            f"{ENDPOINT} is set but the exporter is not installed: pip install 'kaiten[otlp]', "
            f"or unset {ENDPOINT}"
        )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": f"kaiten-{service}"}),
        # The default of 128 links drops the rest of a large batch silently.
        span_limits=SpanLimits(max_links=LINKS_MAX),
    )
    provider.add_span_processor(BatchSpanProcessor(import_module(EXPORTER).OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def is_configured(environ: Mapping[str, str] | None = None) -> bool:
    """Spans go somewhere."""
    return bool((os.environ if environ is None else environ).get(ENDPOINT))


def tracer(name: str) -> trace.Tracer:
    """A tracer; a no-op until `configure` installed a provider."""
    return trace.get_tracer(name)


def is_installed(module: str) -> bool:
    """Whether an optional dependency is there, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a missing parent package
        return False
