"""Place: who of those who wait is this worker's to take."""

from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from itertools import islice

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.kv import Hits
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner.plan_builder import PASSED_OVER_MAX, PlanBuilder
from scheduler_svc.core.planner.share import flex_budget, num_decodes, prompt_budget
from scheduler_svc.core.policy.admission import AdmissionView
from scheduler_svc.core.policy.cadence import QueueView
from scheduler_svc.core.policy.order import LOOK_AHEAD
from scheduler_svc.core.policy.placement import PlacementView
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import BlockId
from scheduler_svc.core.workers import Worker

# Long prompts that a look at the queue passes over, at most, to find a short one.
LONGS_PASSED_OVER_MAX = 64


def place(builder: PlanBuilder) -> Iterator[Sequence]:
    """Those in the queue whom this worker can hold, in order, while it is this worker's turn."""
    cell, worker = builder.cell, builder.worker
    if not cell.waiting:
        return
    # Some: of why nobody else joins there is to be something, too.
    for tenant in islice(cell.waiting.throttled, PASSED_OVER_MAX // 2):
        builder.pass_over("place", Why.TENANT, tenant.queue[0][1].sequence_id)
    why = why_closed(cell, worker)
    if why is Why.NO_SLOT and worker.flex and cell.waiting.has_non_flex:
        why = None
    if why is None and not builder.joins and not is_looked_at(cell, worker, builder.now_ns):
        why = Why.CADENCE
    if why is not None:
        builder.pass_over("place", why)
        return
    longs = 0
    for sequence in _candidates(builder):
        if (why := _why_not_this(cell, worker, sequence)) is not None:
            builder.pass_over("place", why, sequence.sequence_id)
            longs += why is Why.LONG_PREFILL
            if longs == LONGS_PASSED_OVER_MAX:
                return
        elif sequence.is_flex and (why := _why_no_flex(cell, worker)) is not None:
            builder.pass_over("place", why, sequence.sequence_id)
            return
        else:
            yield sequence


def why_not_here(builder: PlanBuilder, sequence: Sequence) -> Why | None:
    """Why another worker is to have one that fits here, and those behind it. A look at all others:
    that is for last.
    """
    cell, worker = builder.cell, builder.worker
    counts = tuple([len(other.running) for other in others(builder, sequence)])
    view = PlacementView(len(worker.running), counts, cell.waiting.num_admissible)
    # Where somebody gives way for a slot, none is free elsewhere.
    is_ours = not worker.slots_free or view.running < cell.policy.placement(view)
    return None if is_ours else Why.ANOTHER_WORKER


def _why_no_flex(cell: CellState, worker: Worker) -> Why | None:
    if not worker.slots_free:
        return Why.NO_SLOT
    if (gap_us := cell.config.batch_gap_us) is None:
        return None
    if not _has_flex_room(cell, worker):
        return Why.BATCH_GAP
    num_rows, is_alone = len(worker.running) + 1, len(worker.flex) == len(worker.running)
    most = worker.cost.decodes_in(gap_us, near=num_rows)
    return None if is_alone or most is None or num_rows <= most else Why.BATCH_GAP


def _has_flex_room(cell: CellState, worker: Worker) -> bool:
    """The next step has room for a prompt token of one more; or where nobody else runs, for what
    one more prefill is promised.
    """
    gaps = {True: 0, False: 0}
    for sequence in worker.prefills.values():
        gaps[sequence.is_flex] += sequence.gap
    prompt_tokens = min(gaps[False], prompt_budget(cell, worker)) if gaps[False] else 0
    budget = flex_budget(cell, worker, sum(num_decodes(worker)), prompt_tokens)
    if gaps[True] < budget:
        return True
    is_alone = len(worker.flex) == len(worker.running)
    return is_alone and _can_promise(cell, budget, len(worker.prefills))


def _why_not_this(cell: CellState, worker: Worker, sequence: Sequence) -> Why | None:
    """Why those behind it may be looked at, and not this one."""
    if not worker.can_hold(sequence):
        return Why.TOO_LARGE
    if sequence.is_awaiting_verdict:
        # Or it might go through all workers before the first is known dead.
        return Why.VERDICT
    if sequence.is_suspect and any(s.is_suspect for s in worker.members):
        # One at a time, so that the next death has one name.
        return Why.SUSPECT
    if sequence.live.tenant.would_exceed(sequence):
        return Why.TENANT
    return Why.LONG_PREFILL if _is_one_long_too_many(cell, worker, sequence) else None


def _candidates(builder: PlanBuilder) -> Iterator[Sequence]:
    """In the queue's order. Where cached tokens are worth some waiting, the first few, of one
    tenant if the order is fair, go by that too; but no flex ones before others.
    """
    cell, worker = builder.cell, builder.worker
    order, queue = cell.policy.order, cell.waiting.next_up(builder.now_ns)
    if order.prefix_worth_ns and not cell.waiting.num_overdue(builder.now_ns):

        def rank(sequence: Sequence) -> int:
            hits = worker.kv.lookup(sequence.kv, sequence.max_cached_tokens)
            return sequence.live.request.arrived_ns - hits.num_tokens * order.prefix_worth_ns

        few = list(islice(queue, LOOK_AHEAD))
        near = [s for s in few if s.is_flex is few[0].is_flex]
        near = [s for s in near if not order.is_fair or s.live.tenant is few[0].live.tenant]
        yield from sorted(near, key=rank)
        yield from (s for s in few if s not in near)
    yield from queue


def is_looked_at(cell: CellState, worker: Worker, now_ns: int) -> bool:
    """Whether the cadence has the worker look at the queue; whoever else joins then joins too."""
    looks = cell.policy.cadence.looks
    if looks is None or not worker.running or cell.waiting.num_overdue(now_ns):
        return True
    return looks(
        QueueView(
            waiting=len(cell.waiting),
            running=len(worker.running),
            steps_since_join=worker.steps_since_join,
        )
    )


def _is_one_long_too_many(cell: CellState, worker: Worker, sequence: Sequence) -> bool:
    """As many long prompts as may be are being computed, and this would be another."""
    tokens = cell.config.long_prefill_tokens
    if tokens is None or len(sequence.tokens) <= tokens:
        return False
    longs = (other for other in worker.prefills.values() if len(other.tokens) > tokens)
    return next(islice(longs, (cell.config.long_prefills_max or 1) - 1, None), None) is not None


def why_closed(cell: CellState, worker: Worker) -> Why | None:
    """Why nobody can join this worker, whoever it is; None: somebody might."""
    if worker.is_draining or worker.is_late:
        return Why.DRAINING if worker.is_draining else Why.LATE
    if cell.waiting.places[0] > worker.kv.places_max:
        # However many they are, nobody looks at each.
        return Why.TOO_LARGE
    if not worker.slots_free:
        return Why.NO_SLOT
    return None if _has_budget(cell, worker) else Why.NO_BUDGET


def _has_budget(cell: CellState, worker: Worker) -> bool:
    """One more prefill can be promised its minimum of every step, whoever decodes beside it. To
    flex sequences nothing is promised beside others.
    """
    is_for_flex = not cell.waiting.has_non_flex
    if is_for_flex and cell.config.batch_gap_us is not None:
        # By time and not by count: `_why_no_flex`.
        return True
    count = sum(is_for_flex or not one.is_flex for one in worker.prefills.values())
    return _can_promise(cell, prompt_budget(cell, worker), count)


def _can_promise(cell: CellState, budget: int, prefills: int) -> bool:
    return budget >= (prefills + 1) * min(cell.config.prefill_tokens_min, budget)


def others(builder: PlanBuilder, sequence: Sequence) -> list[Worker]:
    """Workers that could start it too, with nobody giving way. Of them nothing changes while a plan
    is made: they are asked once for all that are alike.
    """
    cell, request = builder.cell, sequence.live.request
    shape = (len(sequence.tokens), sequence.kv.places_max, request.needs, sequence.num_preemptions)
    alike = (cell.waiting.has_non_flex, request.priority, sequence.is_suspect, *shape)
    if alike not in builder.others or cell.policy.cadence.looks:
        rest = [other for other in cell.workers.values() if other is not builder.worker]
        some = [each for each in rest if _could_start(cell, each, sequence, builder.now_ns)]
        builder.others[alike] = some
    return builder.others[alike]


def _could_start(cell: CellState, worker: Worker, sequence: Sequence, now_ns: int) -> bool:
    """Without a look at its cached prefixes: that costs as much as admitting it."""
    why = why_closed(cell, worker) or _why_not_this(cell, worker, sequence)
    if sequence.is_flex:
        why = why or _why_no_flex(cell, worker)
    if why is not None or not is_looked_at(cell, worker, now_ns):
        return False
    return cell.policy.admission(admission_view(cell, worker, sequence)) is None


def admission_view(
    cell: CellState,
    worker: Worker,
    sequence: Sequence,
    joining: int = 0,
    hits: Hits | None = None,
    freed: AbstractSet[BlockId] = frozenset(),
    leaving: AbstractSet[Sequence] = frozenset(),
) -> AdmissionView:
    """`hits`: a cached prefix to start from; `freed`: blocks that could be free besides; `leaving`:
    who would not be there.
    """
    kv, preemptions_max = worker.kv, cell.config.preemptions_max
    ahead = worker.spec.slot_tokens_max - 1
    blocks_now, blocks_worst = kv.cost(sequence.kv, hits, freed, ahead)
    is_reserved = sequence.num_preemptions >= preemptions_max
    rows: Collection[Sequence] = worker.running.values()
    running = [s for s in rows if s not in leaving] if leaving else rows
    reserved = [s for s in running if s.num_preemptions >= preemptions_max] if is_reserved else []
    return AdmissionView(
        running=len(running) - joining,
        joining=joining,
        block_count=kv.block_count,
        blocks_free=kv.free_count + len(freed),
        blocks_now=blocks_now,
        blocks_worst=blocks_worst,
        group_count=kv.group_count,
        worst_case_need=kv.worst_case_need - kv.worst_case_of(s.kv for s in leaving),
        was_preempted=sequence.num_preemptions > 0,
        is_reserved=is_reserved,
        blocks_reserved=sum(kv.worst(s.kv.places_max) for s in [sequence, *reserved])
        if is_reserved
        else 0,
        priority=sequence.live.request.priority,
        steps_to_batch_end=lambda: max(s.tokens_max - s.num_scheduled_tokens for s in running) - 1,
    )
