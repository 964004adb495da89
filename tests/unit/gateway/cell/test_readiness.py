"""What a gateway's log tells of its cell; health checks hear every change."""

from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from gateway.cell.readiness import Readiness, ReadinessLimits
from kaiten.v1.ledger_pb2 import CellRecord
from ledger import CellView, Lease
from tests.support.slept_clock import SleptClock


async def test_an_hour_without_a_leader_is_a_line_and_no_worker_then_another() -> None:
    clock = SleptClock()
    link: Any = SimpleNamespace(problem="", follower=SimpleNamespace(is_connected=True))
    card: Any = None
    limits = ReadinessLimits(leader_quiet_s_max=10)
    readiness = Readiness(link, card, clock=clock, limits=limits)
    heard: list[str] = []
    readiness.listen(heard.append)
    lease = Lease(epoch=1, nonce=1, address="a", renew_seq=1, journal_seq=0, folded_seq=0)
    with capture_logs() as lines:
        readiness.watch.saw(CellView(CellRecord(), lease))
        for _ in range(3600):
            await clock.sleep(1)
            readiness._tell()
    assert [line["reason"] for line in lines] == [
        "no worker is ready",
        "no scheduler leads: its lease has not been renewed for 11 s",
    ]
    assert heard[-1].endswith("for 3600 s")
    assert len(heard) > 3500
