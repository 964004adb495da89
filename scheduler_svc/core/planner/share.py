"""Share: the token budget of the plan's first step among those with more than one token to go."""

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.planner.draft import Draft
from scheduler_svc.core.policy.mix import MixView
from scheduler_svc.core.types import SlotIndex
from scheduler_svc.core.workers import Worker


def prompt_budget(cell: CellState, worker: Worker) -> int:
    """Prompt tokens of a step in which others decode: as many as the worker allows, and as by its
    steps so far fit the target; but never less than one prefill is promised.
    """
    decodes = len(worker.running) - len(worker.prefills)
    room = worker.spec.mixed_budget - decodes * worker.spec.slot_tokens_max
    if (target_us := cell.config.itl_target_us) is None:
        return room
    fit = worker.cost.prompt_tokens_in(target_us, decodes=decodes)
    return room if fit is None else min(room, max(fit, cell.config.prefill_tokens_min))


def share(draft: Draft) -> dict[SlotIndex, int]:
    """Tokens by slot, 0 of those who decode and sit the step out. Where nobody decodes, nobody is
    kept waiting by a larger step.
    """
    cell, worker = draft.cell, draft.worker
    if not worker.prefills:
        return {}
    prefills = sorted(worker.prefills.items(), key=lambda item: cell.waiting.key(item[1]))
    decodes, spec = len(worker.running) - len(prefills), worker.spec
    budget = prompt_budget(cell, worker) if decodes else spec.step_tokens_max
    shares = cell.policy.mix(
        MixView(
            gaps=tuple(sequence.gap for _, sequence in prefills),
            decodes=decodes,
            budget=budget,
            budget_alone=spec.step_tokens_max,
            # Less where a budget has shrunk since they were admitted.
            minimum=min(cell.config.prefill_tokens_min, budget // len(prefills)),
        )
    )
    assert shares.counts[0] > 0, "the first in the order gets on with every step"
    sharers = zip(prefills, shares.counts, strict=True)
    chunks = {slot: count for (slot, _), count in sharers if count}
    if shares.decodes_wait:
        chunks |= {slot: 0 for slot in worker.running if slot not in worker.prefills}
    return chunks
