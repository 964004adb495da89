"""Share: the token budget of the plan's first step among those with more than one token to go."""

from scheduler_svc.core.planner.draft import Draft
from scheduler_svc.core.policy.mix import MixView
from scheduler_svc.core.types import SlotIndex


def share(draft: Draft) -> dict[SlotIndex, int]:
    """Tokens by slot, 0 of those who decode and sit the step out. Where nobody decodes, nobody is
    kept waiting by a larger step.
    """
    cell, worker = draft.cell, draft.worker
    if not worker.prefills:
        return {}
    prefills = sorted(worker.prefills.items(), key=lambda item: cell.waiting.key(item[1]))
    decodes, spec = len(worker.running) - len(prefills), worker.spec
    for_decodes = decodes * spec.slot_tokens_max
    budget = spec.mixed_budget - for_decodes if decodes else spec.step_tokens_max
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
