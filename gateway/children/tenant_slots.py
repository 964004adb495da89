"""Work that takes a while, shared out among tenants."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantSlots:
    """Places that tenants share: those who wait take turns, and one alone never has the last
    `spared`.

    Invariant: whoever waits has no place left, or is a tenant that already has all but those.
    """

    def __init__(self, count: int, *, spared: int = 1) -> None:
        assert 0 <= spared < count
        self._free = count
        self._most = count - spared
        self._taken: dict[str, int] = {}
        # In the order of their turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiting.values()))
        return f"TenantSlots({self._free} free, {waiting} waiting)"

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place for as long as it takes."""
        if self._may_take(tenant) and tenant not in self._waiting:
            self._take(tenant)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(tenant)
            raise

    def _may_take(self, tenant: str) -> bool:
        return self._free > 0 and self._taken.get(tenant, 0) < self._most

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._taken[tenant] = self._taken.get(tenant, 0) + 1

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        for name in tuple(self._waiting):
            if self._may_take(name):
                self._next_of(name)

    def _next_of(self, tenant: str) -> None:
        """The tenant's next one, if it still waits; the tenant goes to the end of the line."""
        turns = self._waiting.pop(tenant)
        while turns and turns[0].cancelled():
            turns.popleft()
        if turns:
            self._take(tenant)
            turns.popleft().set_result(None)
        if turns:
            self._waiting[tenant] = turns
