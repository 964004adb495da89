"""The store's clock, as a leader knows it: read once, and carried on by our own."""

from collections.abc import Awaitable, Callable
from typing import Final

from kaiten.v1.ledger_pb2 import ClockStep
from service_kit.clock import Clock

# Two clocks that differ by less were not set: it is drift, or the time between two looks.
CLOCK_STEP_NS: Final = 5_000_000_000
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


def stepped(known: ClockStep, store_ns: int, now_ns: int) -> ClockStep:
    """What a successor must know, who begins with the store's clock as it is then.

    `now_ns`: the leader's, which goes on as if nobody had set the other. One set back says nothing:
    ids of entries never go back.
    """
    by_ns = store_ns - now_ns
    if by_ns < CLOCK_STEP_NS or abs(by_ns - known.by_ns) < CLOCK_STEP_NS:
        return known
    return ClockStep(until_unix_ns=now_ns, by_ns=by_ns)
