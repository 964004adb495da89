"""Bounds what a gateway opens and follows at once; closed while it drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.cell.readiness import Readiness
from gateway.requests.stream import Generation
from service_kit.errors import Overloaded, Unavailable


class Door:
    """One per gateway. Everything that is followed here is in `active`."""

    def __init__(self, readiness: Readiness, streams_max: int) -> None:
        self.active: dict[Generation, None] = {}
        self._readiness = readiness
        self._streams_max = streams_max
        self._opening = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def opening(self) -> Iterator[None]:
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
        self._opening += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._opening -= 1
            self._note_idle()

    def came(self, generation: Generation) -> None:
        """While it is being opened."""
        self.active[generation] = None

    def left(self, generation: Generation) -> None:
        self.active.pop(generation, None)
        self._note_idle()

    async def drained(self) -> None:
        """Wait until nobody is followed here any more."""
        await self._idle.wait()

    def _note_idle(self) -> None:
        if not self.active and not self._opening:
            self._idle.set()
