"""Lease: how many steps the worker may run on its own under this plan."""

from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner.ensure import growth_of, is_possible
from scheduler_svc.core.planner.place import is_looked_at
from scheduler_svc.core.planner.plan_builder import PlanBuilder
from scheduler_svc.core.policy.cadence import LeaseView
from scheduler_svc.core.types import SlotIndex


def lease(builder: PlanBuilder, chunks: dict[SlotIndex, int]) -> int:
    """As many as the policy wants and blocks are free for; one while a prefill goes on, or rows
    sit out.
    """
    worker = builder.worker
    if not worker.running:
        return 1
    goes_on = any(sequence.gap > chunks.get(slot, 0) for slot, sequence in worker.prefills.items())
    if goes_on or 0 in chunks.values():
        builder.pass_over("lease", Why.PREFILL)
        return 1
    longest = worker.lease_steps_max(builder.cell.config.plans_in_flight_max)
    steps = min(_steps_wanted(builder), longest)
    while steps > 1:
        growth = growth_of(worker, steps)
        if is_possible(worker, growth):
            builder.extend(growth)
            break
        builder.pass_over("lease", Why.BLOCKS)
        steps //= 2
    return steps


def _steps_wanted(builder: PlanBuilder) -> int:
    cell, worker = builder.cell, builder.worker
    steps = cell.policy.cadence.lease_steps(
        LeaseView(
            waiting=len(cell.waiting) if is_looked_at(cell, worker, builder.now_ns) else 0,
            steps_to_end=worker.tokens_to_end - worker.optional_steps,
            plans_in_flight_max=cell.config.plans_in_flight_max,
            lease_steps_max=cell.config.lease_steps_max,
        )
    )
    if steps < cell.config.lease_steps_max and cell.waiting:
        builder.pass_over("lease", Why.END_IS_NEAR)
    return steps
