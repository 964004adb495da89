"""Admit: whether the one that is this worker's to take may start now."""

from bisect import bisect_left

from scheduler_svc.core.kv import Hits
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner.give_way import newest_flex
from scheduler_svc.core.planner.place import admission_view, others, place, why_not_here
from scheduler_svc.core.planner.plan_builder import Admission, PlanBuilder
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import BlockId

# Of a plan, in tokens that join; whoever else may join does with the next one. Each takes some 0.2
# us to hash, pack and send, for as long as nothing else is done, and a message has bounds.
EFFORT_MAX = 1 << 17
# What flex sequences can mend by leaving.
_MENDED = (Why.NO_SLOT, Why.BLOCKS, Why.MARGIN, Why.WORST_CASE, Why.RESERVED)


def admit(builder: PlanBuilder) -> None:
    """One after the other, until somebody may not, or the plan is large. Nobody joins in a plan
    that preempts.
    """
    if builder.preempted:
        builder.pass_over("admit", Why.PREEMPTED)
        return
    while admission := choose(builder):
        builder.admit(admission)
        if builder.effort >= EFFORT_MAX:
            return


def choose(builder: PlanBuilder) -> Admission | None:
    """Who joins next, or None. A question.

    The first whose turn it is, or nobody: who needs many blocks is not overtaken by those who need
    few. But one that may not be preempted, and waits for another such to end, is passed over.
    """
    for sequence in place(builder):
        admission, why = _try(builder, sequence)
        if why is None and (why := why_not_here(builder, sequence)) is None:
            return admission
        builder.pass_over("admit", why, sequence.sequence_id)
        if why is not Why.RESERVED:
            return None
    return None


def _try(builder: PlanBuilder, sequence: Sequence) -> tuple[Admission, Why | None]:
    """Blocks of those that are retiring are taken only where that helps: unasked, they are
    committed. And flex sequences leave only where nothing else does.
    """
    worker, kv = builder.worker, builder.worker.kv
    hits = kv.lookup(sequence.kv, sequence.max_cached_tokens)
    freed = set[BlockId]()
    why: Why | None = Why.NO_SLOT
    if worker.slots_free:
        why = _why_not(builder, sequence, hits, freed)
        if why is not None and (freed := kv.freed_by(one.kv for one in worker.retiring.values())):
            why = _why_not(builder, sequence, hits, freed)
    leaving: tuple[Sequence, ...] = ()
    if why in _MENDED and (leaving := _in_the_way(builder, sequence, hits)):
        why = None
    return Admission(sequence, hits, bool(freed or leaving), leaving), why


def _in_the_way(builder: PlanBuilder, sequence: Sequence, hits: Hits) -> tuple[Sequence, ...]:
    """The fewest flex sequences without whom it may start; nobody: that would not help, or there is
    no need.
    """
    worker, joined = builder.worker, {join.sequence_id for join in builder.joins}
    flex = [one for one in newest_flex(worker) if one.sequence_id not in joined]
    if sequence.is_flex or not flex or others(builder, sequence):
        return ()
    retiring = [retired.kv for retired in worker.retiring.values()]

    def is_enough(count: int) -> bool:
        leaving = frozenset(flex[:count])
        freed = worker.kv.freed_by([*retiring, *(one.kv for one in leaving)])
        return _why_not(builder, sequence, hits, freed, leaving) is None

    if not is_enough(len(flex)):
        return ()
    return tuple(flex[: bisect_left(range(len(flex)), True, lo=1, key=is_enough)])


def _why_not(
    builder: PlanBuilder,
    sequence: Sequence,
    hits: Hits,
    freed: set[BlockId],
    leaving: frozenset[Sequence] = frozenset(),
) -> Why | None:
    joining = len(builder.joins)
    view = admission_view(builder.cell, builder.worker, sequence, joining, hits, freed, leaving)
    return builder.cell.policy.admission(view)
