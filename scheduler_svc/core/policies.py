"""Policies are data: orders among tenants, within one and of victims, and an admission rule, each
a plain function.

Another policy is another row of `POLICIES`; the scheduler never asks for a name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.sequence import Sequence

PRIORITY_WORTH_NS = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What an admission rule may look at: a candidate and the worker it would join."""

    # Rows that ran before this plan, and rows this plan has admitted.
    running: int
    joining: int
    blocks_free: int
    # Blocks to take for the tokens known now, and for the longest the sequence can become.
    blocks_now: int
    blocks_worst: int
    # Blocks that the rows in the batch may still come to need.
    blocks_owed: int
    is_reserved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Smaller `order` runs first; larger `victim` is preempted first.

    Among tenants the one with the smaller `share` of the tokens it has been served goes first, then
    the one whose first sequence has the smaller `order`.
    """

    name: str
    share: Callable[[int], int]
    order: Callable[[Sequence], tuple[int, ...]]
    victim: Callable[[Sequence], tuple[int, ...]]
    admit: Callable[[Seat], bool]


def everybody_alike(served: int) -> int:
    """Who belongs to whom does not matter."""
    return 0


def by_service(served: int) -> int:
    """Whoever was served least goes first.

    With the counters of `WaitingQueue` this is fair queueing over tenants, in tokens (Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024): of two tenants that both have requests
    waiting, neither gets ahead by more than about one request and what runs.
    """
    return served


def by_arrival(sequence: Sequence) -> tuple[int, ...]:
    """First come, first served; the serial breaks no tie because it is the arrival order."""
    return (sequence.serial,)


def by_priority(sequence: Sequence) -> tuple[int, ...]:
    """Each step of priority is worth some seconds of waiting.

    So it ages without being touched: whatever arrives that much later stands behind the least
    urgent request, however urgent it is, and nobody starves.
    """
    request = sequence.life.request
    return (request.arrived_ns - request.priority * PRIORITY_WORTH_NS, sequence.serial)


def newest(sequence: Sequence) -> tuple[int, ...]:
    """The youngest has the least to lose, and the oldest can never starve."""
    return (sequence.serial,)


def newest_of_the_largest(sequence: Sequence) -> tuple[int, ...]:
    """Whoever has most running gives first, and of that the newest."""
    return (sequence.life.tenant.tokens_running, sequence.serial)


def whenever_it_fits(seat: Seat) -> bool:
    """Continuous batching: a seat is taken as soon as it is free.

    One block stays free per row in the batch, so that the newcomer does not preempt at the next
    block border.
    """
    if seat.is_reserved:
        return seat.blocks_worst + seat.blocks_owed <= seat.blocks_free
    spare = seat.running + seat.joining
    return seat.blocks_now + spare <= seat.blocks_free


def when_all_are_done(seat: Seat) -> bool:
    """Static batching, the old way.

    Fill an empty batch, reserve the worst case, run until all are done.
    """
    return seat.running == 0 and seat.blocks_worst + seat.blocks_owed <= seat.blocks_free


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            name="fair",
            share=by_service,
            order=by_arrival,
            victim=newest_of_the_largest,
            admit=whenever_it_fits,
        ),
        Policy(
            name="fcfs",
            share=everybody_alike,
            order=by_arrival,
            victim=newest,
            admit=whenever_it_fits,
        ),
        Policy(
            name="priority",
            share=everybody_alike,
            order=by_priority,
            victim=by_priority,
            admit=whenever_it_fits,
        ),
        Policy(
            name="static",
            share=everybody_alike,
            order=by_arrival,
            victim=newest,
            admit=when_all_are_done,
        ),
    )
}
