"""How many lines of batches are under way at once: so many that no slot waits for the next line.

They are flex requests, so that others need not mind how many there are.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from gateway.cell.readiness import Readiness

# Of each slot of the cell.
LINES: Final = 2
# Slots of a cell that has not said how many it has.
SLOTS: Final = 16


class Window:
    """One per gateway, for all batches that it drives. Tenants have equal parts of it."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._parts: dict[str, TenantWindow] = {}

    @property
    def size(self) -> int:
        record = self._readiness.watch.record
        slots = 0 if record is None else record.model.slots_max * record.workers_ready
        return LINES * (slots or SLOTS)

    @property
    def part(self) -> int:
        """Who comes to others has theirs at once: for as long as their lines take it is more."""
        return max(1, self.size // max(1, len(self._parts)))

    @contextmanager
    def of(self, tenant: str) -> Iterator["TenantWindow"]:
        """For the time in which lines of a batch are under way."""
        part = self._parts.setdefault(tenant, TenantWindow(self))
        part.batches += 1
        try:
            yield part
        finally:
            part.batches -= 1
            if not part.batches:
                del self._parts[tenant]


class TenantWindow:
    """A tenant's part, for all its batches: whatever its lines wait for, others' do not."""

    def __init__(self, window: Window) -> None:
        self.batches = 0
        self._window = window
        self._taken = 0
        self._freed = asyncio.Event()
        # Whoever comes first is first.
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """For the time of a line, once there is room."""
        async with self._queue:
            await self._room()
            self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._freed.set()

    async def room(self) -> None:
        """Until another line may begin."""
        async with self._queue:
            await self._room()

    async def _room(self) -> None:
        """A part that has grown is seen when a line ends."""
        while self._taken >= self._window.part:
            self._freed.clear()
            await self._freed.wait()


class Share:
    """One batch's of its tenant's window. A line of it that is refused waits outside, so that those
    of other batches go on, and no further line of this one begins before that one was let in.
    """

    def __init__(self, window: TenantWindow) -> None:
        self.window = window
        self._refused: set[int] = set()
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Until another line may begin."""
        while self._refused:
            await self._changed.wait()
        await self.window.room()

    def refused(self, line: int) -> None:
        self._refused.add(line)

    def let_in(self, line: int) -> None:
        """Or it is over."""
        if line in self._refused:
            self._refused.remove(line)
            self._tell()

    def answered(self) -> None:
        """A line is: another may find what it lacked."""
        self._tell()

    async def change(self, within_s: float) -> None:
        """Until something has changed for this batch."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
