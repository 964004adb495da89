"""Retire: a sequence whose last token is certain to come gives up its slot one plan early, so that
its successor starts at the very next step although plans are pipelined.
"""

from scheduler_svc.core.planner.plan_builder import PlanBuilder


def retire(builder: PlanBuilder) -> None:
    """Everybody who is certain to finish with the steps in flight."""
    for sequence in list(builder.worker.finishing.values()):
        builder.retire(sequence)
