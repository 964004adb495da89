"""What KEDA is told, without a network."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cell.readiness import CellWatch, ReadinessLimits
from gateway.grpc import scaler
from kaiten.v1.keda import external_scaler_pb2 as pb
from kaiten.v1.ledger_pb2 import CellRecord
from ledger import CellView, Lease
from service_kit.errors import InvalidRequest, Unavailable
from tests.support.slept_clock import SleptClock

LEASE = Lease(epoch=1, nonce=1, address="a", renew_seq=1, journal_seq=0, folded_seq=0)
RECORD = CellRecord(waiting=3, queue_time_forecast_s=1.25, kv_cache_usage=0.5)


def test_a_trigger_names_what_it_scales_by() -> None:
    others = {"scalerAddress": "gateway:50051", "unsafeSsl": "true"}
    assert scaler.targets(others) == {"queue_time_forecast_seconds": 2}
    named = {"num_requests_waiting": "8", "kv_cache_usage_perc": "0.75"}
    assert scaler.targets(others | named) == {
        "num_requests_waiting": 8,
        "kv_cache_usage_perc": 0.75,
    }


@pytest.mark.parametrize("text", ["", "many", "0", "-1", "nan", "inf"])
def test_a_target_that_is_none_is_named(text: str) -> None:
    rule = f"scalerMetadata.num_requests_waiting: must be a number above 0, got {text!r}"
    with pytest.raises(InvalidRequest) as refused:
        scaler.targets({"num_requests_waiting": text})
    assert str(refused.value) == rule


def test_each_signal_is_the_leaders_word() -> None:
    assert [scaler.value(RECORD, name) for name in scaler.SIGNALS] == [1.25, 3, 0.5]
    with pytest.raises(InvalidRequest, match="metricName: must be one of queue_time_forecast_"):
        scaler.value(RECORD, "s0-queue")


@pytest.mark.parametrize(("waiting", "running"), [(0, 0), (1, 0), (0, 1)])
def test_whoever_waits_or_runs_needs_a_worker(waiting: int, running: int) -> None:
    record = CellRecord(waiting=waiting, running=running)
    assert scaler.is_active(record) == bool(waiting + running)


async def test_while_nobody_leads_nothing_is_said_to_be_known() -> None:
    clock = SleptClock()
    watch = CellWatch(clock, ReadinessLimits(leader_quiet_s_max=10))
    readiness: Any = SimpleNamespace(watch=watch, is_draining=False)
    servicer = scaler.ScalerServicer(readiness, clock)
    asked = pb.GetMetricsRequest(metricName="num_requests_waiting")
    with pytest.raises(Unavailable, match="no scheduler has led"):
        await servicer.GetMetrics(asked, None)
    watch.saw(CellView(RECORD, LEASE))
    (told,) = (await servicer.GetMetrics(asked, None)).metricValues
    assert (told.metricName, told.metricValue, told.metricValueFloat) == (asked.metricName, 3, 3)
    await clock.sleep(11)
    with pytest.raises(Unavailable, match="has not been renewed for 11 s"):
        await servicer.IsActive(pb.ScaledObjectRef(), None)
