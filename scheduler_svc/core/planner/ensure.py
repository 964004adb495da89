"""Ensure blocks: for everything that may be written by the end of the plan's first step, at
whatever cost.

    num_tokens   [ known once the steps that are certain are answered ..)
    ahead                                      [ tokens that may come ..)
    places       [ a KV place for each .................................)

"""

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.planner.plan_builder import Growth, PlanBuilder
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.workers import Worker


def ensure_blocks(builder: PlanBuilder) -> None:
    """First from those that nobody will miss, then from victims."""
    cell, worker = builder.cell, builder.worker
    growth = growth_of(worker, lease_steps=1)
    while not is_possible(worker, growth):
        if worker.reclaim():
            continue
        assert len(worker.running) > 1, "one sequence alone was admitted only if it fits"
        builder.preempt(victim(cell, worker))
        growth = growth_of(worker, lease_steps=1)
    builder.extend(growth)


def growth_of(worker: Worker, lease_steps: int) -> Growth:
    """Whose tables are too short for a plan of so many steps, and by how many blocks."""
    ahead, shortfall = worker.tokens_ahead(lease_steps), worker.kv.shortfall
    return [
        (one, counts)
        for one in worker.running.values()
        if len(one.tokens) + one.num_tokens_ahead + ahead > one.kv.capacity
        and any(counts := shortfall(one.kv, one.num_scheduled_tokens, one.num_tokens, ahead))
    ]


def is_possible(worker: Worker, growth: Growth) -> bool:
    """Enough blocks are free."""
    return sum(sum(counts) for _, counts in growth) <= worker.kv.free_count


def victim(cell: CellState, worker: Worker) -> Sequence:
    """Who is preempted next: flex sequences first, and last whoever was too often."""

    def key(sequence: Sequence) -> tuple[int, ...]:
        may_be = sequence.num_preemptions < cell.config.preemptions_max
        return (sequence.is_flex, may_be, *cell.policy.victim(sequence))

    return max(worker.running.values(), key=key)
