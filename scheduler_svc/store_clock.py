"""The store's clock, as a leader knows it."""

from collections.abc import Awaitable, Callable
from typing import Final

from service_kit.clock import Clock

# How often it is read when a leadership begins.
CLOCK_READS: Final = 3


async def clock_offset_ns(read_ns: Callable[[], Awaitable[int]], clock: Clock) -> int:
    """The other clock less ours. It is read at some time of a round trip: of the shortest, then."""
    trips: list[tuple[int, int]] = []
    for _ in range(CLOCK_READS):
        asked_ns = clock.monotonic_ns()
        read = await read_ns()
        took_ns = clock.monotonic_ns() - asked_ns
        trips.append((took_ns, read - asked_ns - took_ns // 2))
    return min(trips)[1]
