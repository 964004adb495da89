"""Share: the token budget of the plan's first step among those with more than one token to go."""

from scheduler_svc.core.planner.draft import Draft
from scheduler_svc.core.policy.mix import MixView
from scheduler_svc.core.types import SlotIndex


def share(draft: Draft) -> dict[SlotIndex, int]:
    """Tokens by slot. Where nobody decodes, nobody is kept waiting by a larger step."""
    cell, worker = draft.cell, draft.worker
    if not worker.prefills:
        return {}
    prefills = sorted(worker.prefills.items(), key=lambda item: cell.waiting.key(item[1]))
    decodes, spec = len(worker.running) - len(prefills), worker.spec
    counts = cell.policy.mix(
        MixView(
            gaps=tuple(sequence.gap for _, sequence in prefills),
            budget=spec.mixed_budget - decodes if decodes else spec.step_tokens_max,
            minimum=cell.config.prefill_tokens_min,
        )
    )
    assert all(counts), "admitted only where its minimum can be promised"
    return {slot: count for (slot, _), count in zip(prefills, counts, strict=True)}
