"""Share: the token budget of the plan's first step among those with more than one token to go."""

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.planner.draft import Draft
from scheduler_svc.core.policy.mix import MixView, StepShares
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


def flex_budget(cell: CellState, worker: Worker, budget: int) -> int:
    """Of so many prompt tokens of a step, as many as fit the gap that flex sequences may make;
    where nobody else runs, never less than one prefill is promised.
    """
    decodes, gap_us = len(worker.running) - len(worker.prefills), cell.config.batch_gap_us
    if gap_us is None or (fit := worker.cost.prompt_tokens_in(gap_us, decodes=decodes)) is None:
        return budget
    is_alone = len(worker.flex) == len(worker.running)
    return min(budget, max(fit, cell.config.prefill_tokens_min if is_alone else 0))


def share(draft: Draft) -> dict[SlotIndex, int]:
    """Tokens by slot, 0 of those who decode and sit the step out. Where nobody decodes, nobody is
    kept waiting by a larger step. Flex sequences have of it what others leave.
    """
    cell, worker = draft.cell, draft.worker
    if not worker.prefills:
        return {}
    prefills = sorted(worker.prefills.items(), key=lambda item: cell.waiting.key(item[1]))
    num_non_flex = sum(not sequence.is_flex for _, sequence in prefills)
    shares = _shares(cell, worker, [sequence.gap for _, sequence in prefills], num_non_flex)
    sharers = zip(prefills, shares.counts, strict=True)
    chunks = {slot: count for (slot, _), count in sharers if count}
    if shares.decodes_wait:
        chunks |= {slot: 0 for slot in worker.running if slot not in worker.prefills}
    return chunks


def _shares(cell: CellState, worker: Worker, gaps: list[int], num_non_flex: int) -> StepShares:
    """By the policy among those that are not flex, and then among flex sequences."""
    decodes = len(worker.running) - len(gaps)
    alone = worker.spec.step_tokens_max
    budget = prompt_budget(cell, worker) if decodes else alone
    if not num_non_flex:
        return _flex_shares(cell, worker, gaps, budget)
    shares = _mixed(cell, gaps[:num_non_flex], decodes, budget, alone)
    assert shares.counts[0] > 0, "the first in the order gets on with every step"
    left = max(0, flex_budget(cell, worker, budget) - sum(shares.counts))
    flex = _mixed(cell, gaps[num_non_flex:], 0, left, left).counts if gaps[num_non_flex:] else []
    return StepShares([*shares.counts, *flex], shares.decodes_wait)


def _flex_shares(cell: CellState, worker: Worker, gaps: list[int], budget: int) -> StepShares:
    """Nobody else's prompt is there. Others who decode do not sit out for a flex one."""
    budget, decodes = flex_budget(cell, worker, budget), len(worker.running) - len(gaps)
    if len(worker.flex) < len(worker.running):
        return _mixed(cell, gaps, 0, budget, budget)
    alone = flex_budget(cell, worker, worker.spec.step_tokens_max)
    shares = _mixed(cell, gaps, decodes, budget, alone)
    assert shares.counts[0] > 0, "the first in the order gets on with every step"
    return shares


def _mixed(
    cell: CellState, gaps: list[int], decodes: int, budget: int, budget_alone: int
) -> StepShares:
    return cell.policy.mix(
        MixView(
            gaps=tuple(gaps),
            decodes=decodes,
            budget=budget,
            budget_alone=budget_alone,
            # Less where a budget has shrunk since they were admitted.
            minimum=min(cell.config.prefill_tokens_min, budget // len(gaps)),
        )
    )
