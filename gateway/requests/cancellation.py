"""Cancels on their way to the ledger: asked for where one cannot wait, delivered with retries.

A handler whose client is gone is being cancelled itself and must not await. It leaves a note here;
one task delivers. Notes are bounded by what was accepted: one per choice and one per request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

from kaiten.v1.common_pb2 import FinishReason
from ledger import StoreLost
from service_kit.errors import NotFound, Unavailable
from service_kit.outages import Outage

RETRY_WAIT_S: Final = 0.5
# Delivered at once; more wait their turn.
BATCH_MAX: Final = 32


class Release(NamedTuple):
    """One cancel. choice None: the whole request. `output_tokens` counts with STOP. `waiter` and
    `goes_on`: as Ledger.cancel has them, of who left.
    """

    id: str
    choice: int | None = None
    reason: FinishReason = FinishReason.FINISH_REASON_CANCELLED
    output_tokens: int = 0
    waiter: str = ""
    goes_on: bool = False


class Canceller(Protocol):
    """What of the ledger is needed."""

    async def cancel(
        self,
        id: str,
        *,
        choice: int | None,
        reason: FinishReason,
        output_tokens: int,
        waiter: str,
        goes_on: bool,
    ) -> bool: ...


class Releases:
    """The notes not yet delivered, oldest first; the same note twice is one."""

    def __init__(
        self, ledger: Callable[[], Canceller], now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._ledger, self._now_ns = ledger, now_ns
        self._outage = Outage("release.delayed", over="release.delivered")
        self._notes: dict[Release, None] = {}
        self._asked = asyncio.Event()
        self._done = asyncio.Event()
        self._done.set()
        self._adopted: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._notes)

    def ask(self, release: Release) -> None:
        """Leave a note."""
        self._notes[release] = None
        self._done.clear()
        self._asked.set()

    def adopt(self, asking: "asyncio.Future[Any]", left: Release, unheard: Release) -> None:
        """A submit, or somebody's return, whose client left while it was under way: what is to be
        asked if it is done, and if it may have been.
        """

        def settle(finished: "asyncio.Future[Any]") -> None:
            self._adopted.discard(finished)
            if finished.cancelled():
                return
            error = finished.exception()
            if error is None:
                self.ask(left)
            elif isinstance(error, Unavailable):
                self.ask(unheard)

        self._adopted.add(asking)
        asking.add_done_callback(settle)

    async def run(self) -> None:
        """Deliver for as long as the gateway lives."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._notes:
                batch = list(self._notes)[:BATCH_MAX]
                delivered = await asyncio.gather(*map(self._deliver, batch))
                for release, is_delivered in zip(batch, delivered, strict=True):
                    if is_delivered:
                        del self._notes[release]
                if all(delivered):
                    self._outage.ended(self._now_ns())
                else:
                    self._outage.failed(self._now_ns(), waiting=len(self._notes))
                    await asyncio.sleep(RETRY_WAIT_S)
            self._done.set()

    def settled(self) -> Awaitable[object]:
        """Wait until everything asked for so far has been delivered."""
        return self._done.wait()

    async def _deliver(self, release: Release) -> bool:
        try:
            await self._ledger().cancel(
                release.id,
                choice=release.choice,
                reason=release.reason,
                output_tokens=release.output_tokens,
                waiter=release.waiter,
                goes_on=release.goes_on,
            )
        except (NotFound, StoreLost):
            # It ended and was forgotten, or everything was.
            return True
        except Unavailable:
            return False
        return True
