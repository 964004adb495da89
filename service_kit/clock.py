"""Time as an argument: shells hold a Clock, tests hand in a fake one."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also be waited on."""

    def monotonic_ns(self) -> int: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own monotonic clock."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
