"""Cancels that cannot be delivered wait, and the log says so now and then."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.requests import cancellation
from gateway.requests.cancellation import Release, Releases
from service_kit.errors import Unavailable

S = 1_000_000_000
AWAY_S = 600


class AwayLedger:
    """For so long, of which each try takes a second."""

    now_s = 0

    async def cancel(self, _id: str, **_: Any) -> bool:
        self.now_s += 1
        if self.now_s < AWAY_S:
            raise Unavailable("away")
        return True


async def test_what_is_not_delivered_for_long_is_not_told_at_each_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancellation, "RETRY_WAIT_S", 0)
    ledger: Any = AwayLedger()
    releases = Releases(lambda: ledger, lambda: ledger.now_s * S)
    releases.ask(Release("a"))
    with capture_logs() as lines:
        delivering = asyncio.create_task(releases.run())
        await releases.settled()
    delivering.cancel()
    *told, over = lines
    assert [line["lasts_s"] for line in told[:6]] == [0, 1, 3, 7, 15, 31]
    assert {line["waiting"] for line in told} == {1}
    assert len(told) < 20
    assert (over["event"], over["tries"]) == ("release.delivered", AWAY_S - 1)
