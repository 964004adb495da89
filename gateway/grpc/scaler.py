"""How loaded the cell is, as KEDA's external scalers ask: who scales workers needs no Prometheus.

The numbers are the leader's last word, which every gateway has. While nobody leads nothing is known
of them, and that is an error: KEDA keeps its fallback for it, and a 0 would take workers away.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from gateway.cell.readiness import Readiness
from kaiten.v1.keda import external_scaler_pb2 as pb
from kaiten.v1.keda import external_scaler_pb2_grpc as pb_grpc
from kaiten.v1.ledger_pb2 import CellRecord
from service_kit.clock import Clock
from service_kit.errors import InvalidRequest, Unavailable
from service_kit.grpc_health import AtMost

SERVICE_NAME: Final = "externalscaler.ExternalScaler"
STREAMS_MAX: Final = 64
# What readiness has seen of the cell is looked at; a gateway that drains gives streams a second.
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Signal:
    """What a trigger may ask for. `target`: unless it names another."""

    target: float
    value: Callable[[CellRecord], float]


# By their names in /metrics.
SIGNALS: Final[Mapping[str, Signal]] = {
    "queue_time_forecast_seconds": Signal(2, lambda record: record.queue_time_forecast_s),
    "num_requests_waiting": Signal(64, lambda record: record.waiting),
    "kv_cache_usage_perc": Signal(0.9, lambda record: record.kv_cache_usage),
}
DEFAULT: Final = "queue_time_forecast_seconds"


def targets(metadata: Mapping[str, str]) -> dict[str, float]:
    """The signals that a trigger names; none: the forecast. Other keys are KEDA's own."""
    named = {name: _target(name, metadata[name]) for name in SIGNALS if name in metadata}
    return named or {DEFAULT: SIGNALS[DEFAULT].target}


def value(record: CellRecord, name: str) -> float:
    """What a signal says now."""
    if name not in SIGNALS:
        raise InvalidRequest("metricName", f"must be one of {', '.join(SIGNALS)}")
    return SIGNALS[name].value(record)


def is_active(record: CellRecord) -> bool:
    """Somebody waits or runs, flex too: the last worker stays, or a first one is needed."""
    return bool(record.waiting or record.running)


def _target(name: str, text: str) -> float:
    try:
        target = float(text)
    except ValueError:
        target = 0.0
    if not 0 < target < float("inf"):
        raise InvalidRequest(f"scalerMetadata.{name}", f"must be a number above 0, got {text!r}")
    return target


class ScalerServicer(pb_grpc.ExternalScalerServicer):
    """KEDA has no keys to show, so nobody is asked for one."""

    def __init__(self, readiness: Readiness, clock: Clock) -> None:
        self._readiness, self._clock = readiness, clock
        self._streams = AtMost(STREAMS_MAX, "scalers' streams")

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=is_active(self._record))

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        told: bool | None = None
        with self._streams:
            while not self._readiness.is_draining:
                if (now := is_active(self._record)) is not told:
                    yield pb.IsActiveResponse(result=now)
                    told = now
                await self._clock.sleep(POLL_S)

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> pb.GetMetricSpecResponse:
        found = targets(request.scalerMetadata).items()
        return pb.GetMetricSpecResponse(
            metricSpecs=[
                pb.MetricSpec(metricName=name, targetSize=round(target), targetSizeFloat=target)
                for name, target in found
            ]
        )

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: Any
    ) -> pb.GetMetricsResponse:
        name = request.metricName
        now = value(self._record, name)
        told = pb.MetricValue(metricName=name, metricValue=round(now), metricValueFloat=now)
        return pb.GetMetricsResponse(metricValues=[told])

    @property
    def _record(self) -> CellRecord:
        watch = self._readiness.watch
        if watch.silence or watch.record is None:
            raise Unavailable(watch.silence)
        return watch.record


def add_to(server: "grpc.aio.Server", readiness: Readiness, clock: Clock) -> None:
    """Register the service."""
    servicer = ScalerServicer(readiness, clock)
    pb_grpc.add_ExternalScalerServicer_to_server(servicer, server)
