"""Who renews leads on however far away the store is; in a time that passes by being waited for."""

import asyncio
import selectors
from dataclasses import replace
from typing import Any

import pytest

from kaiten.v1.ledger_pb2 import CellRecord
from ledger import Candidate, Leader, Lease
from scheduler_svc.renewal import Renewal

TTL_S = 2.0


class Waited(selectors.DefaultSelector):
    """Of a loop where nothing happens but time: it has passed when it would be waited for."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.now_s += timeout
        return super().select(0)


class LoopClock:
    """The running loop's."""

    def monotonic_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FarLedger:
    """A lease behind a way that takes so long in each direction."""

    def __init__(self, way_s: float) -> None:
        self._way_s = way_s
        self._lease = Lease(epoch=0, nonce=0, address="", renew_seq=0, journal_seq=0, folded_seq=0)

    async def leader(self) -> Lease:
        await asyncio.sleep(self._way_s)
        lease = self._lease
        await asyncio.sleep(self._way_s)
        return lease

    async def elect(
        self,
        address: str,
        nonce: int,
        *,
        seen: Lease | None = None,
        has_ended: bool = False,
        above_epoch: int = 0,
    ) -> Leader | None:
        await asyncio.sleep(self._way_s)
        before = self._lease
        is_taken = before.nonce == 0 or before == seen
        if is_taken:
            self._lease = replace(before, epoch=before.epoch + 1, nonce=nonce, address=address)
        await asyncio.sleep(self._way_s)
        return Leader(epoch=self._lease.epoch, nonce=nonce, journal_seq=0) if is_taken else None

    async def resign(self, leader: Leader) -> None:
        raise AssertionError("nobody resigns")

    async def renew(self, _leader: Leader, _cell: CellRecord | None) -> int:
        await asyncio.sleep(self._way_s)
        self._lease = replace(self._lease, renew_seq=self._lease.renew_seq + 1)
        await asyncio.sleep(self._way_s)
        return LoopClock().monotonic_ns()


async def decided() -> None:
    """At once."""


async def story(way_s: float) -> None:
    clock, ledger = LoopClock(), FarLedger(way_s)
    far: Any = ledger
    leader = await Candidate(ledger, clock, TTL_S).campaign()
    renewal = Renewal(far, leader, clock, TTL_S, CellRecord, clock.monotonic_ns)
    renewing = asyncio.create_task(renewal.run(decided))
    rival = asyncio.create_task(Candidate(ledger, clock, TTL_S).campaign())
    await clock.sleep(100 * TTL_S)
    assert not rival.done(), "a false fail-over"
    renewing.cancel()
    assert (await rival).epoch == leader.epoch + 1, "who is silent is succeeded there, too"


@pytest.mark.parametrize("way_s", [0.0, 0.1, 0.4, TTL_S])
def test_a_store_that_is_far_away_deposes_nobody_who_renews(way_s: float) -> None:
    selector = Waited()
    loop = asyncio.SelectorEventLoop(selector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: selector.now_s)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(story(way_s))
