"""Order: who goes first. A smaller key does.

Among tenants by the tokens that they were served, where it is fair; then among sequences, by a key.
It is unique, and is taken when a sequence begins to wait: the queue is sorted by it. So whatever
ages does so without being touched, because its key is a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.requests import Sequence

# Where a request without a deadline stands among those that have one: as if it had so long.
NO_DEADLINE_NS = 60_000_000_000
# Of how many who are next the cached prefix is looked at.
LOOK_AHEAD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Among tenants the one whose first sequence has the smaller key is first; in a fair one the
    one that was served least, each by its weight.

    With the counters of `WaitingQueue` that is fair queueing over tenants, in tokens (Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024): of two tenants that both have requests
    waiting, neither gets ahead by more than about one request and what runs.
    """

    key: Callable[[Sequence], tuple[int, ...]]
    is_fair: bool = False
    # Waiting that a cached token is worth among those who are next; 0: nobody looks.
    prefix_worth_ns: int = 0


def by_arrival(sequence: Sequence) -> tuple[int, ...]:
    """First come, first served: ids are minted in the order of arrival."""
    return (sequence.sequence_id,)


def by_priority(sequence: Sequence, worth_ns: int) -> tuple[int, ...]:
    """Each step of priority is worth some waiting.

    So it ages without being touched: whatever arrives that much later stands behind the least
    urgent request, however urgent it is, and nobody starves.
    """
    request = sequence.live.request
    return (request.arrived_ns - request.priority * worth_ns, sequence.sequence_id)


def by_remaining(sequence: Sequence, worth_ns: int) -> tuple[int, ...]:
    """Shortest remaining first: each token that may be left to compute costs some waiting.

    Whoever has begun to answer keeps most of its prompt in the prefix cache: it is not counted.
    """
    has_begun = sequence.num_output_tokens > 0
    left = sequence.tokens_max - (len(sequence.tokens) if has_begun else 0)
    return (sequence.live.request.arrived_ns + left * worth_ns, sequence.sequence_id)


def by_deadline(sequence: Sequence) -> tuple[int, ...]:
    """Earliest deadline first. One without a deadline is never overtaken by all that come later."""
    request = sequence.live.request
    deadline_ns = request.deadline_ns
    if deadline_ns is None:
        deadline_ns = request.arrived_ns + NO_DEADLINE_NS
    return (deadline_ns, sequence.sequence_id)
