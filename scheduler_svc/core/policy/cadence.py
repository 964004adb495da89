"""Cadence: when the batch is re-decided. One function says when the queue is looked at, another how
many steps a plan may cover.

It delays admission, never an end, a cancel or a deadline: those come with the next plan whatever
the cadence. An empty batch, and who has waited longer than is promised, are not kept waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class LeaseView(NamedTuple):
    """What decides how long a lease is."""

    # Who might join; 0 while the queue is not looked at.
    waiting: int
    # Until the first of those who run is certain to have finished, if all steps in flight happen.
    steps_to_end: int
    plans_in_flight_max: int
    lease_steps_max: int


class QueueView(NamedTuple):
    """What decides whether the queue is looked at."""

    waiting: int
    running: int
    # Steps of the worker answered since somebody joined it last.
    steps_since_join: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """When the queue is looked at (None: whenever somebody might join), and how long leases are."""

    lease_steps: Callable[[LeaseView], int]
    looks: Callable[[QueueView], bool] | None = None


def until_an_end_is_near(view: LeaseView) -> int:
    """A whole lease, but while somebody waits no further than the first end that is certain.

    What is left to it are plans of one step, one fewer than may be in flight: the last of them is
    on its way while the lease ends, so that the end is certain before it comes, and the slot goes
    to the next at the very next step (`planner.retire`).
    """
    if not view.waiting:
        return view.lease_steps_max
    steps = view.steps_to_end - (view.plans_in_flight_max - 1)
    return max(1, min(view.lease_steps_max, steps))


def one_step(view: LeaseView) -> int:
    """Everything is decided anew for every step, as Orca does."""
    return 1


def interval(
    view: QueueView, *, steps: int, served_permille: int | None, steps_max: int | None
) -> bool:
    """Not before `steps` have passed since somebody joined; then if those who wait are many enough
    beside those who run, or `steps_max` have passed.
    """
    are_many = served_permille is None or view.waiting * 1000 > served_permille * view.running
    is_overdue = steps_max is not None and view.steps_since_join >= steps_max
    return view.steps_since_join >= steps and (are_many or is_overdue)
