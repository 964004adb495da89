"""Who leads: elect, renew, resign, and the candidate that waits for its turn.

No wall clock is compared between machines. A candidate watches the lease's renew_seq with its own
monotonic clock and may steal only after it has seen it stand still for the whole TTL; at once from
a leader of which it was told that it has ended. The lease itself is the proof: it names its holder.
"""

import asyncio
import secrets
from contextlib import suppress
from typing import Final, Protocol

from kaiten.v1.ledger_pb2 import CellRecord
from ledger import scripts
from ledger.store import Store, time_ns
from ledger.types import Fenced, Leader, Lease, StoreLost
from service_kit.clock import Clock
from service_kit.errors import Unavailable

POLLS_PER_TTL: Final = 8
# Whoever asks a candidate who leads wants to know it of late, however long the TTL is.
POLL_S_MAX: Final = 0.5
# After a pause longer than this many polls (a stopped process, a stalled store) the pause does not
# count as watching.
PAUSE_POLLS_MAX: Final = 2
# Of a candidate that is told to stop while it is elected; the lease then runs out by itself.
GIVE_BACK_S_MAX: Final = 1.0


class LeaseWatch:
    """Pure: decides when a lease has been quiet for long enough. Fed with every poll, and with
    every failed one.
    """

    def __init__(self, *, ttl_ns: int) -> None:
        self._ttl_ns = ttl_ns
        self._pause_ns_max = PAUSE_POLLS_MAX * ttl_ns // POLLS_PER_TTL
        self._seen: tuple[int, int] | None = None
        self._polled_ns = 0
        self._quiet_ns = 0

    def missed(self) -> None:
        """A poll failed: whatever happened meanwhile was not watched."""
        self._seen = None

    def may_take(self, lease: Lease | None, now_ns: int) -> bool:
        """True when nobody holds the lease or its holder has been quiet for the whole TTL."""
        if lease is None or lease.nonce == 0:
            return True
        seen = (lease.epoch, lease.renew_seq)
        if seen == self._seen:
            self._quiet_ns += min(now_ns - self._polled_ns, self._pause_ns_max)
        else:
            self._seen, self._quiet_ns = seen, 0
        self._polled_ns = now_ns
        return self._quiet_ns >= self._ttl_ns


class Leadership:
    """Part of Ledger; see there."""

    _store: Store

    async def elect(
        self,
        address: str,
        nonce: int,
        *,
        seen: Lease | None = None,
        has_ended: bool = False,
        above_epoch: int = 0,
    ) -> Leader | None:
        """Take the lease if it still is what was seen, or if nobody holds it. None: somebody else
        holds it. `has_ended`: so has the leader that was seen, whatever it renewed last.
        `above_epoch`: some worker has seen this one.

        A repeat with the same nonce gives the same answer.
        """
        verdict, *rest = await self._store.script(
            scripts.ELECT,
            (self._store.keys.lease,),
            (
                nonce,
                address,
                seen.epoch if seen is not None else "",
                seen.renew_seq if seen is not None and not has_ended else "",
                above_epoch,
            ),
        )
        if verdict != b"OK":
            return None
        epoch, journal_seq, after_seq = map(int, rest)
        return Leader(epoch=epoch, nonce=nonce, journal_seq=journal_seq, after_seq=after_seq)

    async def renew(self, leader: Leader, cell: CellRecord | None) -> int:
        """The leader is alive and its cell looks like this; None: it cannot say yet, and what was
        said of it stays. The store's clock then. Fenced: stop leading.
        """
        verdict, *time = await self._store.script(
            scripts.RENEW,
            (self._store.keys.lease,),
            (leader.epoch, leader.nonce, b"" if cell is None else cell.SerializeToString()),
        )
        if verdict != b"OK":
            raise Fenced(f"renewal refused: epoch {leader.epoch} no longer leads")
        return time_ns(time)

    async def resign(self, leader: Leader) -> None:
        """Let a standby take over at once. Nothing happens when somebody else leads already."""
        await self._store.script(
            scripts.RESIGN, (self._store.keys.lease,), (leader.epoch, leader.nonce)
        )


class LeaseSource(Protocol):
    """What a candidate needs of the ledger."""

    async def leader(self) -> Lease | None: ...

    async def elect(
        self,
        address: str,
        nonce: int,
        *,
        seen: Lease | None = None,
        has_ended: bool = False,
        above_epoch: int = 0,
    ) -> Leader | None: ...

    async def resign(self, leader: Leader) -> None: ...


class LeaseObserver(Protocol):
    """Who wants to know what a candidate sees at every poll."""

    def saw(self, lease: Lease | None) -> None: ...

    def missed(self, error: Unavailable) -> None: ...


class Candidate:
    """One scheduler's wish to lead. Every campaign uses a fresh nonce."""

    def __init__(
        self,
        ledger: LeaseSource,
        clock: Clock,
        ttl_s: float,
        *,
        address: str = "",
        observer: LeaseObserver | None = None,
        above_epoch: int = 0,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._address = address
        self._observer = observer
        self._above_epoch = above_epoch
        self._poll_s = min(ttl_s / POLLS_PER_TTL, POLL_S_MAX)
        self._ttl_ns = int(ttl_s * 1e9)
        self._ended: set[int] = set()
        self._news = asyncio.Event()

    def has_ended(self, nonce: int) -> None:
        """The leader of that nonce leads no more: its lease need not run out."""
        self._ended.add(nonce)
        self._news.set()

    async def campaign(self) -> Leader:
        """Wait until this candidate leads. StoreLost ends the wait; an unreachable store only
        prolongs it.
        """
        nonce = secrets.randbits(64) or 1
        watch = LeaseWatch(ttl_ns=self._ttl_ns)
        while True:
            self._news.clear()
            leader = await self._try(nonce, watch)
            if leader is not None:
                return leader
            await self._pause()

    async def _try(self, nonce: int, watch: LeaseWatch) -> Leader | None:
        try:
            lease = await self._ledger.leader()
            if self._observer is not None:
                self._observer.saw(lease)
            has_ended = lease is not None and lease.nonce in self._ended
            # Elected, and not told: asked once more, the store says so.
            is_ours = lease is not None and lease.nonce == nonce
            may_take = watch.may_take(lease, self._clock.monotonic_ns())
            if not (may_take or has_ended or is_ours):
                return None
            return await self._elect(nonce, lease, has_ended=has_ended)
        except StoreLost:
            raise
        except Unavailable as error:
            watch.missed()
            if self._observer is not None:
                self._observer.missed(error)
            return None

    async def _elect(self, nonce: int, seen: Lease | None, *, has_ended: bool) -> Leader | None:
        """Cancelled, it gives back what it was given meanwhile: else nobody leads for a TTL."""
        electing = asyncio.ensure_future(
            self._ledger.elect(
                self._address,
                nonce,
                seen=seen,
                has_ended=has_ended,
                above_epoch=self._above_epoch,
            )
        )
        try:
            return await asyncio.shield(electing)
        except asyncio.CancelledError:
            with suppress(TimeoutError, Unavailable):
                async with asyncio.timeout(GIVE_BACK_S_MAX):
                    if (leader := await electing) is not None:
                        await self._ledger.resign(leader)
            raise

    async def _pause(self) -> None:
        """Until the next poll is due, or there is news."""
        waits = {
            asyncio.ensure_future(self._clock.sleep(self._poll_s)),
            asyncio.ensure_future(self._news.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
