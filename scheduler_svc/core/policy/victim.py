"""Victim: who is preempted when blocks run short. The largest key is.

Whoever was preempted too often already comes last, whatever the policy (`planner.ensure`).
"""

from scheduler_svc.core.policy.order import by_priority
from scheduler_svc.core.requests import Sequence


def newest(sequence: Sequence) -> tuple[int, ...]:
    """The youngest has the least to lose, and the oldest can never starve."""
    return (sequence.sequence_id,)


def newest_of_the_largest(sequence: Sequence) -> tuple[int, ...]:
    """Whoever has most running gives first, and of that the newest."""
    return (sequence.live.tenant.tokens_running, sequence.sequence_id)


def least_urgent(sequence: Sequence, worth_ns: int) -> tuple[int, ...]:
    """Whoever would be the last in a queue by priority."""
    return by_priority(sequence, worth_ns)
