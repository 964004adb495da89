"""The stages of a plan, in order.

Each stage is a function over the builder. It looks at the cell as the stages before have left it,
chooses by a rule of the policy, and has the builder make the move; whom it passed over, and why, it
writes down too. Whether there is to be a plan is a question asked first, so that no move is ever
undone, and a plan that is not made leaves no trace.
"""

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.outcome import PassedOver, Plan, Why
from scheduler_svc.core.planner.admit import admit, choose
from scheduler_svc.core.planner.ensure import ensure_blocks
from scheduler_svc.core.planner.give_way import give_way, num_leaving
from scheduler_svc.core.planner.lease import lease
from scheduler_svc.core.planner.plan_builder import PlanBuilder
from scheduler_svc.core.planner.retire import retire
from scheduler_svc.core.planner.share import share
from scheduler_svc.core.workers import Worker

# What most questions for a plan are answered with.
_NONE = {why: (PassedOver("plan", why),) for why in Why}


def make_plan(
    cell: CellState, worker: Worker, now_ns: int
) -> tuple[Plan | None, tuple[PassedOver, ...]]:
    """The worker's next plan, or None when it needs none now, which changes nothing."""
    if (why := why_none(cell, worker, now_ns)) is not None:
        return None, _NONE[why]
    builder = PlanBuilder(cell, worker, now_ns)
    if not is_due(cell, worker):
        if (admission := choose(builder)) is None:
            return None, tuple(builder.passed_over)
        if admission.needs_reclaim:
            worker.reclaim()
    retire(builder)
    give_way(builder)
    ensure_blocks(builder)
    admit(builder)
    chunks = share(builder)
    lease_steps, is_idle = lease(builder, chunks), not worker.flights
    plan = builder.seal(chunks, lease_steps)
    if is_idle:
        worker.begin_step(now_ns)
    return plan, tuple(builder.passed_over)


def why_none(cell: CellState, worker: Worker, now_ns: int) -> Why | None:
    """Why there is to be no plan, whoever could join; None: there may be one."""
    if cell.is_store_behind or worker.is_late:
        return Why.STORE_BEHIND if cell.is_store_behind else Why.LATE
    is_full = worker.first_steps_unanswered >= cell.config.plans_in_flight_max
    if is_full or held_until_ns(cell, worker, now_ns) is not None:
        return Why.PLANS_IN_FLIGHT
    return None if cell.waiting or is_due(cell, worker) else Why.NOTHING_CHANGED


def held_until_ns(cell: CellState, worker: Worker, now_ns: int) -> int | None:
    """Beside flex sequences steps are long, and a plan that is sent when one has begun waits for
    its end; so does whoever comes after it, and then for all of the step that it is for. So it is
    made when the step is nearly over. None: now, or nobody knows when that is.
    """
    until_ns = worker.step_end_ns - worker.hold_us * 1000
    is_held = cell.config.batch_gap_us and worker.flex and worker.flights and until_ns > now_ns
    return until_ns if is_held else None


def is_due(cell: CellState, worker: Worker) -> bool:
    """Something changed in the batch, a prefill has tokens left, the lease runs low, or steps are
    too long.
    """
    if worker.leaves or worker.finishing or worker.prefills or num_leaving(cell, worker):
        return True
    return bool(worker.running) and worker.is_lease_low
