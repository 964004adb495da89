"""Cadence: when the batch is re-decided. A rule says how many steps a plan may cover.

Whatever it says, a step is followed by a new plan as soon as somebody can join.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceView:
    """What a cadence rule may look at."""

    waiting: int
    # Until the first of those who run is certain to have finished, if all steps in flight happen.
    steps_to_end: int
    plans_in_flight_max: int
    lease_steps_max: int


def until_an_end_is_near(view: CadenceView) -> int:
    """A whole lease, but while somebody waits no further than the first end that is certain.

    The last plans before that are of one step, as many as may be in flight: so that the end is
    known one plan ahead, and the slot goes to the next at the very next step (`planner.retire`).
    """
    if not view.waiting:
        return view.lease_steps_max
    steps = view.steps_to_end - view.plans_in_flight_max
    return max(1, min(view.lease_steps_max, steps))
