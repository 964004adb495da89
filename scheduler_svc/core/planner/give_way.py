"""Give way: flex sequences are preempted where steps are longer than they may make them, so many
that what is left is short enough.
"""

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner.plan_builder import PlanBuilder
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.workers import Worker

# By so much a step may be too long before anybody leaves, so that who leaves does not come back at
# once.
SLACK_PERCENT = 5


def give_way(builder: PlanBuilder) -> None:
    """The newest first."""
    count = num_leaving(builder.cell, builder.worker)
    for sequence in newest_flex(builder.worker)[:count]:
        builder.give_way(sequence, Why.STEPS_TOO_LONG)


def newest_flex(worker: Worker) -> list[Sequence]:
    """The flex sequences of a worker, those first that have the least to lose."""
    return sorted(worker.flex.values(), key=lambda flex: flex.sequence_id, reverse=True)


def num_leaving(cell: CellState, worker: Worker) -> int:
    """How many flex sequences are to leave for the gaps of the others."""
    gap_us, rows = cell.config.batch_gap_us, len(worker.running)
    if gap_us is None or not 0 < len(worker.flex) < rows:
        return 0
    most = worker.cost.decodes_in(gap_us, near=rows)
    if most is None or rows * 100 <= most * (100 + SLACK_PERCENT):
        return 0
    return min(rows - most, len(worker.flex))
