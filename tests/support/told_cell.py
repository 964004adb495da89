"""A cell of the pure core in which it is written down where every request's time goes."""

from itertools import pairwise
from typing import Any, Final

from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import Interval, Timeline, timelines_of
from scheduler_svc.timeline_track import Phase
from tests.support.cell import Cell

MS: Final = 1_000_000


class Told(Cell):
    """A cell whose every command is written down."""

    def __init__(self, *specs: Any, **knobs: Any) -> None:
        self.timelines = Timelines()
        super().__init__(*specs, **knobs)

    def see(self, command: Command, outcome: Outcome) -> None:
        super().see(command, outcome)
        self.timelines.take(command, outcome, self.now_ns, self.scheduler.waiting)

    def timeline(self, sequence_id: int, choice: int = 0) -> Timeline:
        return timelines_of(self.timelines.snapshot(f"r{sequence_id}"))[choice]

    def whys(self, sequence_id: int) -> list[str]:
        """For what it waited, one after the other."""
        waits = [i for i in self.timeline(sequence_id).intervals if i.phase is Phase.QUEUE]
        return list(dict.fromkeys(interval.why for interval in waits))

    def stalls(self, sequence_id: int) -> list[Interval]:
        """When it had begun and did not get on."""
        return [i for i in self.timeline(sequence_id).intervals if i.phase is Phase.STALL]


def check(told: Timeline, arrived_ns: int) -> None:
    """No holes, nothing twice, nothing empty."""
    assert all(interval.end_ns > interval.start_ns for interval in told.intervals)
    assert all(one.end_ns == other.start_ns for one, other in pairwise(told.intervals))
    assert not told.intervals or told.intervals[0].start_ns == arrived_ns
