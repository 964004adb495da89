"""Retire: a sequence whose last token is certain to come gives up its slot one plan early, so that
its successor starts at the very next step although plans are pipelined.
"""

from scheduler_svc.core.planner.draft import Draft


def retire(draft: Draft) -> None:
    """Everybody who is certain to finish with the steps in flight."""
    worker = draft.worker
    if not worker.num_finishing:
        return
    for sequence in [s for s in worker.running.values() if s.is_certain_to_finish]:
        draft.retire(sequence)
