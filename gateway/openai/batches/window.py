"""How many lines of batches are under way at once: all there is room for, and less beside others.

When nobody else is there, so many that no slot waits for the next line. Beside live requests some
slots stay free: lines that started together end together, and who comes between would wait for all.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from gateway.requests.ledger_session import LedgerLink
from gateway.requests.readiness import Readiness
from service_kit.errors import KaitenError

SLOTS_ALONE: Final = 2.0
SLOTS_BESIDE: Final = 0.75
# For so long after somebody else was seen there may come more.
CALM_S: Final = 5.0
LOOK_S: Final = 0.2
# Slots of a cell that has not said how many it has.
SLOTS: Final = 16


class Window:
    """One per gateway, for all batches that it drives."""

    def __init__(self, link: LedgerLink, readiness: Readiness) -> None:
        self._link = link
        self._readiness = readiness
        self._taken = 0
        self._seen_s = -CALM_S
        self._freed = asyncio.Event()

    @property
    def size(self) -> int:
        record = self._readiness.watch.record
        slots = 0 if record is None else record.model.slots_max * record.workers_ready
        is_beside = time.monotonic() - self._seen_s < CALM_S
        return max(1, int((slots or SLOTS) * (SLOTS_BESIDE if is_beside else SLOTS_ALONE)))

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Use after `room`: for the time of a line."""
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._freed.set()

    async def room(self) -> None:
        """Until another line may begin."""
        while self._taken >= self.size:
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._freed.wait()

    async def watch(self) -> None:
        """Who else is there, for ever."""
        while True:
            if self._taken:
                with suppress(KaitenError):
                    live = await self._link.ledger.load()
                    if live.choices > self._taken:
                        self._seen_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
