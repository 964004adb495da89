"""Place: who of those who wait is this worker's to take."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.kv import Hits
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner.draft import Draft
from scheduler_svc.core.policy.admission import AdmissionView
from scheduler_svc.core.policy.placement import PlacementView
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import BlockId
from scheduler_svc.core.workers import Worker


def place(draft: Draft) -> Iterator[Sequence]:
    """Those in the queue whom this worker can hold, in order, while it is this worker's turn."""
    cell, worker = draft.cell, draft.worker
    if not cell.waiting:
        return
    if (why := why_closed(cell, worker)) is not None:
        draft.pass_over("place", why)
        return
    for sequence in cell.waiting.in_order():
        if not worker.can_hold(sequence):
            draft.pass_over("place", Why.TOO_LARGE, sequence.sequence_id)
        elif sequence.is_awaiting_verdict:
            # Or it might go through all workers before the first is known dead.
            draft.pass_over("place", Why.VERDICT, sequence.sequence_id)
        elif sequence.is_suspect and any(s.is_suspect for s in worker.members):
            # One at a time, so that the next death has one name.
            draft.pass_over("place", Why.SUSPECT, sequence.sequence_id)
        elif len(worker.running) < cell.policy.placement(_view(cell, worker, sequence)):
            yield sequence
        else:
            draft.pass_over("place", Why.ANOTHER_WORKER, sequence.sequence_id)
            return


def why_closed(cell: CellState, worker: Worker) -> Why | None:
    """Why nobody can join this worker, whoever it is; None: somebody might."""
    if worker.is_draining or worker.is_late:
        return Why.DRAINING if worker.is_draining else Why.LATE
    if worker.slots_free == 0:
        return Why.NO_SLOT
    return None if _has_budget(cell, worker) else Why.NO_BUDGET


def _has_budget(cell: CellState, worker: Worker) -> bool:
    """One more prefill can be promised its minimum of every step, whoever decodes beside it."""
    prefills = len(worker.prefills)
    decodes = len(worker.running) - prefills
    budget = worker.spec.mixed_budget - decodes * worker.spec.slot_tokens_max
    return budget >= (prefills + 1) * min(cell.config.prefill_tokens_min, budget)


def _view(cell: CellState, worker: Worker, sequence: Sequence) -> PlacementView:
    others = [
        len(other.running)
        for other in cell.workers.values()
        if other is not worker and _could_start(cell, other, sequence)
    ]
    return PlacementView(
        running=len(worker.running),
        others=tuple(others),
        num_admissible=cell.waiting.num_admissible,
    )


def _could_start(cell: CellState, worker: Worker, sequence: Sequence) -> bool:
    """Without a look at its cached prefixes: that costs as much as admitting it."""
    if why_closed(cell, worker) is not None or not worker.can_hold(sequence):
        return False
    return cell.policy.admission(admission_view(cell, worker, sequence)) is None


def admission_view(
    cell: CellState,
    worker: Worker,
    sequence: Sequence,
    joining: int = 0,
    hits: Hits | None = None,
    freed: AbstractSet[BlockId] = frozenset(),
) -> AdmissionView:
    """`hits`: a cached prefix to start from; `freed`: blocks that could be free besides."""
    kv, preemptions_max = worker.kv, cell.config.preemptions_max
    ahead = worker.spec.slot_tokens_max - 1
    blocks_now, blocks_worst = kv.cost(sequence.kv, hits, freed, ahead)
    is_reserved = sequence.num_preemptions >= preemptions_max
    reserved = [s for s in worker.running.values() if s.num_preemptions >= preemptions_max]
    return AdmissionView(
        running=len(worker.running) - joining,
        joining=joining,
        block_count=kv.block_count,
        blocks_free=kv.free_count + len(freed),
        blocks_now=blocks_now,
        blocks_worst=blocks_worst,
        group_count=kv.group_count,
        worst_case_need=kv.worst_case_need,
        was_preempted=sequence.num_preemptions > 0,
        is_reserved=is_reserved,
        blocks_reserved=sum(kv.worst(s.kv.places_max) for s in [sequence, *reserved])
        if is_reserved
        else 0,
    )
