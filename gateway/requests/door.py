"""Bounds what a gateway opens and follows at once; closed while it drains."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.cell.readiness import Readiness
from gateway.requests.stream import Generation
from service_kit.errors import Overloaded, Unavailable


class Door:
    """One per gateway. Everything that is followed here is in `active`. `share`: a keyring's."""

    def __init__(self, readiness: Readiness, streams_max: int, share: Callable[[int], int]) -> None:
        self.active: dict[Generation, None] = {}
        self._readiness = readiness
        self._streams_max = streams_max
        self._share = share
        self._opening = 0
        # What is opened and followed, by tenant.
        self._of = Counter[str]()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def opening(self, tenant: str) -> Iterator[None]:
        """For the time of a call, at whose end something may be followed. Unavailable, Overloaded:
        it is not let in.
        """
        if self._readiness.is_draining:
            raise Unavailable("this gateway is draining; use another one")
        if (live := len(self.active) + self._opening) >= self._streams_max:
            limit = self._streams_max
            raise Overloaded(
                "too many streams", 1.0, limit, live=live, subject="gateway", rule="streams_max"
            )
        if (theirs := self._of[tenant]) >= (limit := self._share(self._streams_max)):
            raise Overloaded(
                f"too many streams of tenant {tenant}",
                1.0,
                limit,
                live=theirs,
                subject="tenant",
                rule="streams_max",
                tenant=tenant,
            )
        self._opening += 1
        self._of[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._opening -= 1
            self._of[tenant] -= 1
            self._note_idle()

    def came(self, generation: Generation) -> None:
        """While it is being opened."""
        self.active[generation] = None
        self._of[generation.tenant] += 1

    def left(self, generation: Generation) -> None:
        if generation in self.active:
            del self.active[generation]
            self._of[generation.tenant] -= 1
        self._note_idle()

    async def drained(self) -> None:
        """Wait until nobody is followed here any more."""
        await self._idle.wait()

    def _note_idle(self) -> None:
        if not self.active and not self._opening:
            self._idle.set()
