"""What a leader takes for the ledger's clock."""

from scheduler_svc.store_clock import CLOCK_READS, clock_offset_ns

MS = 1_000_000
AHEAD_NS = 5_000 * MS


class Trips:
    """A clock, and another one that is ahead of it and takes so long to answer, there and back."""

    def __init__(self, *trips_ms: tuple[int, int]) -> None:
        self.now_ns, self._trips = 0, iter(trips_ms)

    def monotonic_ns(self) -> int:
        return self.now_ns

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits")

    async def read(self) -> int:
        there_ms, back_ms = next(self._trips)
        self.now_ns += there_ms * MS
        read_ns = self.now_ns + AHEAD_NS
        self.now_ns += back_ms * MS
        return read_ns


async def test_a_slow_answer_makes_no_late_clock() -> None:
    """A leader whose clock is behind by the way back tells of phases that are as much too short."""
    trips = Trips(*[(10, 10)] * CLOCK_READS)
    assert await clock_offset_ns(trips.read, trips) == AHEAD_NS


async def test_the_shortest_trip_says_most() -> None:
    slow = [(0, 40)] * (CLOCK_READS - 1)
    trips = Trips((0, 90), *slow[1:], (1, 1))
    assert await clock_offset_ns(trips.read, trips) == AHEAD_NS
