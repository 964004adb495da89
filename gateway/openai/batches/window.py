"""How many lines of batches are under way at once: so many that no slot waits for the next line.

They are flex requests, so that others need not mind how many there are.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from gateway.cell.readiness import Readiness

# Of each slot of the cell.
LINES: Final = 2
# Slots of a cell that has not said how many it has.
SLOTS: Final = 16


class Window:
    """One per gateway, for all batches that it drives."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._taken = 0
        self._freed = asyncio.Event()

    @property
    def size(self) -> int:
        record = self._readiness.watch.record
        slots = 0 if record is None else record.model.slots_max * record.workers_ready
        return LINES * (slots or SLOTS)

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
        """Until another line may begin. A cell that has grown is seen when a line ends."""
        while self._taken >= self.size:
            self._freed.clear()
            await self._freed.wait()
