"""A policy is six functions, chosen one by one; these are the usual sets.

Another rule is one function in one file and its name here. The core never asks for a name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from scheduler_svc.core.outcome import Why
from scheduler_svc.core.policy.admission import (
    AdmissionView,
    when_all_are_done,
    whenever_it_fits,
)
from scheduler_svc.core.policy.cadence import CadenceView, until_an_end_is_near
from scheduler_svc.core.policy.mix import MixView, half_of_the_rest
from scheduler_svc.core.policy.order import (
    Order,
    by_arrival,
    by_priority,
    by_service,
    everybody_alike,
)
from scheduler_svc.core.policy.placement import PlacementView, even_share
from scheduler_svc.core.policy.victim import least_urgent, newest, newest_of_the_largest
from scheduler_svc.core.requests import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is decided, and by which rule; each is explained in the file of its name."""

    placement: Callable[[PlacementView], int]
    order: Order
    victim: Callable[[Sequence], tuple[int, ...]]
    admission: Callable[[AdmissionView], Why | None]
    mix: Callable[[MixView], list[int]]
    cadence: Callable[[CadenceView], int]


_FCFS: Final = Policy(
    placement=even_share,
    order=Order(share=everybody_alike, key=by_arrival),
    victim=newest,
    admission=whenever_it_fits,
    mix=half_of_the_rest,
    cadence=until_an_end_is_near,
)

POLICIES: Final = {
    "fair": replace(
        _FCFS, order=Order(share=by_service, key=by_arrival), victim=newest_of_the_largest
    ),
    "fcfs": _FCFS,
    "priority": replace(
        _FCFS, order=Order(share=everybody_alike, key=by_priority), victim=least_urgent
    ),
    "static": replace(_FCFS, admission=when_all_are_done),
}
