"""Order: who goes first. A smaller key does.

Two functions: among tenants by a share of the tokens they were served, then among sequences. The
key of a sequence is unique and does not change while it waits, for the queue is sorted by it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.requests import Sequence

PRIORITY_WORTH_NS = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Among tenants the one with the smaller share is first, then the one whose first sequence has
    the smaller key.
    """

    share: Callable[[int], int]
    key: Callable[[Sequence], tuple[int, ...]]


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
    """First come, first served: ids are minted in the order of arrival."""
    return (sequence.sequence_id,)


def by_priority(sequence: Sequence) -> tuple[int, ...]:
    """Each step of priority is worth some seconds of waiting.

    So it ages without being touched: whatever arrives that much later stands behind the least
    urgent request, however urgent it is, and nobody starves.
    """
    request = sequence.live.request
    return (request.arrived_ns - request.priority * PRIORITY_WORTH_NS, sequence.sequence_id)
