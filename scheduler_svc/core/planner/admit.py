"""Admit: whether the one that is this worker's to take may start now."""

from scheduler_svc.core.kv import Hits
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner.draft import Admission, Draft
from scheduler_svc.core.planner.place import admission_view, place
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import BlockId


def admit(draft: Draft) -> None:
    """One after the other, until somebody may not. Nobody joins in a plan that preempts."""
    if draft.preempted:
        draft.pass_over("admit", Why.PREEMPTED)
        return
    while (admission := choose(draft)) is not None:
        draft.admit(admission)


def choose(draft: Draft) -> Admission | None:
    """Who joins next, or None. A question.

    The first whose turn it is, or nobody: who needs many blocks is not overtaken by those who need
    few. But one that may not be preempted, and waits for another such to end, is passed over.
    """
    for sequence in place(draft):
        admission, why = _try(draft, sequence)
        if why is None:
            return admission
        draft.pass_over("admit", why, sequence.sequence_id)
        if why is not Why.RESERVED:
            return None
    return None


def _try(draft: Draft, sequence: Sequence) -> tuple[Admission, Why | None]:
    """Blocks of those that are retiring are taken only where that helps: unasked, they are
    committed.
    """
    kv, retiring = draft.worker.kv, draft.worker.retiring.values()
    hits = kv.lookup(sequence.kv, sequence.max_cached_tokens)
    why, freed = _why_not(draft, sequence, hits, set()), set[BlockId]()
    if why is not None and (freed := kv.freed_by(retired.kv for retired in retiring)):
        why = _why_not(draft, sequence, hits, freed)
    return Admission(sequence=sequence, hits=hits, needs_reclaim=bool(freed)), why


def _why_not(draft: Draft, sequence: Sequence, hits: Hits, freed: set[BlockId]) -> Why | None:
    joining = len(draft.joins)
    view = admission_view(draft.cell, draft.worker, sequence, joining, hits, freed)
    return draft.cell.policy.admission(view)
