"""What a leader takes for the ledger's clock, also when that is set."""

import pytest

from kaiten.v1.ledger_pb2 import ClockStep, SubmitRecord
from ledger import InboxEntry
from scheduler_svc import wire
from scheduler_svc.store_clock import CLOCK_READS, clock_offset_ns, stepped

MS = 1_000_000
S_NS = 1_000_000_000
HOUR_NS = 3600 * S_NS
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


@pytest.mark.parametrize(
    ("id_ns", "read_ns", "now_ns", "arrived_ns"),
    [
        # A millisecond ago; the clocks drifted a little; nobody looked.
        (10 * HOUR_NS, 10 * HOUR_NS + 10**6, 10 * HOUR_NS + 10**6, 10 * HOUR_NS),
        (10 * HOUR_NS, 10 * HOUR_NS + 10**6, 10 * HOUR_NS + 10**9, 10 * HOUR_NS),
        (10 * HOUR_NS, 0, 20 * HOUR_NS, 10 * HOUR_NS),
        # Never later than now.
        (10 * HOUR_NS, 10 * HOUR_NS, 10 * HOUR_NS - 10**6, 10 * HOUR_NS - 10**6),
        # The store's clock was set an hour on: ids go with it.
        (11 * HOUR_NS, 11 * HOUR_NS + 10**6, 10 * HOUR_NS + 10**6, 10 * HOUR_NS),
        # An hour back: ids stand still.
        (10 * HOUR_NS, 9 * HOUR_NS + 10**9, 10 * HOUR_NS + 10**9, 10 * HOUR_NS + 10**9),
    ],
)
def test_a_store_whose_clock_was_set_makes_nobody_late(
    id_ns: int, read_ns: int, now_ns: int, arrived_ns: int
) -> None:
    record = SubmitRecord(n=1, prompt_token_ids=[1])
    entry_id = f"{id_ns // 1_000_000}-0"
    entry = InboxEntry(entry_id=entry_id, sequence_id=9, record=record, read_ns=read_ns)
    assert wire.arrived_ns(entry, now_ns) == arrived_ns


@pytest.mark.parametrize(
    ("id_ns", "arrived_ns"),
    [
        # Five seconds before the clock was set an hour on, and five behind that.
        (10 * HOUR_NS - 5 * S_NS, 11 * HOUR_NS - 5 * S_NS),
        (11 * HOUR_NS + 5 * S_NS, 11 * HOUR_NS + 5 * S_NS),
    ],
)
def test_nor_under_the_leader_behind(id_ns: int, arrived_ns: int) -> None:
    """Who begins with the store's clock as it is now."""
    step = stepped(ClockStep(), 10 * HOUR_NS, 10 * HOUR_NS - S_NS)
    assert step == ClockStep()
    step = stepped(step, 11 * HOUR_NS, 10 * HOUR_NS)
    assert (step.until_unix_ns, step.by_ns) == (10 * HOUR_NS, HOUR_NS)
    # It goes on to look, under the leader behind as well.
    assert stepped(step, 11 * HOUR_NS + S_NS, 10 * HOUR_NS + S_NS) == step
    assert stepped(step, 12 * HOUR_NS, 12 * HOUR_NS) == step
    record = SubmitRecord(n=1, prompt_token_ids=[1])
    entry = InboxEntry(entry_id=f"{id_ns // 1_000_000}-0", sequence_id=9, record=record)
    assert wire.arrived_ns(entry, 11 * HOUR_NS + 10 * S_NS, step) == arrived_ns
