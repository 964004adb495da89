"""Share: the token budget of the plan's first step among those with more than one token to go, and
which flex sequences sit it out.
"""

from bisect import bisect_right

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.planner.plan_builder import PlanBuilder
from scheduler_svc.core.policy.mix import MixView, StepShares
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import SlotIndex
from scheduler_svc.core.workers import SPARE_EVERY, Worker

Prefills = list[tuple[SlotIndex, Sequence]]


def num_decodes(worker: Worker) -> tuple[int, int]:
    """Rows that decode: those that are not flex, and flex ones."""
    flex = len(worker.flex) - sum(one.is_flex for one in worker.prefills.values())
    return len(worker.running) - len(worker.prefills) - flex, flex


def prompt_budget(cell: CellState, worker: Worker) -> int:
    """Prompt tokens of a step in which others decode: as many as the worker allows, and as by its
    steps so far fit the target; but never less than one prefill is promised. Where flex sequences
    have a gap to keep they take nothing of it: they would sit the step out.
    """
    live, flex = num_decodes(worker)
    decodes = live + (flex if cell.config.batch_gap_us is None else 0)
    room = worker.spec.mixed_budget - decodes * worker.spec.slot_tokens_max
    if (target_us := cell.config.itl_target_us) is None:
        return room
    fit = worker.cost.prompt_tokens_in(target_us, decodes=decodes)
    return room if fit is None else min(room, max(fit, cell.config.prefill_tokens_min))


def flex_budget(cell: CellState, worker: Worker, decodes: int, prompt_tokens: int = 0) -> int:
    """Prompt tokens of flex sequences in a step of so many rows that decode and prompt tokens of
    others: as many as the worker allows, and as fit the gap that flex sequences may make and the
    target of others. Where nobody else runs, never less than one prefill is promised.
    """
    spec, config = worker.spec, cell.config
    is_alone, gap_us = len(worker.flex) == len(worker.running), config.batch_gap_us
    room = spec.mixed_budget - decodes * spec.slot_tokens_max if decodes else spec.step_tokens_max
    least = config.prefill_tokens_min if is_alone or gap_us is None else 0
    target_us = config.itl_target_us if decodes and (gap_us is None or not is_alone) else None
    for bound_us in (gap_us, target_us):
        if bound_us is not None:
            fit = worker.cost.prompt_tokens_in(bound_us, decodes=decodes)
            room = room if fit is None else min(room, max(fit, least))
    return max(0, room - prompt_tokens)


def share(builder: PlanBuilder) -> dict[SlotIndex, int]:
    """Tokens by slot, 0 of those who decode and sit the step out. Where nobody decodes, nobody is
    kept waiting by a larger step. Flex sequences have of it what others leave.
    """
    cell, worker = builder.cell, builder.worker
    if not worker.prefills:
        return {}
    prefills = sorted(worker.prefills.items(), key=lambda item: cell.waiting.key(item[1]))
    live = [(slot, one) for slot, one in prefills if not one.is_flex]
    shares = _live_shares(cell, worker, live)
    chunks = _chunks(live, shares)
    if is_spared := _is_spared(cell, worker, live, shares):
        worker.spares -= SPARE_EVERY
    sit_out = _no_room(cell, worker, live, shares, is_spared=is_spared)
    if (flex := prefills[len(live) :]) and not is_spared:
        decodes = sum(num_decodes(worker)) - len(sit_out)
        flex_shares = _flex_shares(cell, worker, flex, decodes, sum(shares.counts))
        chunks |= _chunks(flex, flex_shares)
        shares = StepShares([], shares.decodes_wait or flex_shares.decodes_wait)
    if shares.decodes_wait:
        sit_out = [slot for slot in worker.running if slot not in worker.prefills]
    return chunks | dict.fromkeys(sit_out, 0)


def _chunks(prefills: Prefills, shares: StepShares) -> dict[SlotIndex, int]:
    sharers = zip(prefills, shares.counts, strict=True)
    return {slot: count for (slot, _), count in sharers if count}


def _live_shares(cell: CellState, worker: Worker, prefills: Prefills) -> StepShares:
    """By the policy, as if there were no flex sequences that could sit out."""
    if not prefills:
        return StepShares([])
    live, flex = num_decodes(worker)
    decodes = live + (flex if cell.config.batch_gap_us is None else 0)
    alone = worker.spec.step_tokens_max
    budget = prompt_budget(cell, worker) if decodes else alone
    shares = _mixed(cell, prefills, decodes, budget, alone)
    assert shares.counts[0] > 0, "the first in the order gets on with every step"
    return shares


def _is_spared(cell: CellState, worker: Worker, prefills: Prefills, shares: StepShares) -> bool:
    """Prompts of others are computed to their ends, and flex sequences leave the step to them: the
    first tokens come by one as short as they make it. A tenth of the steps goes for that.
    """
    if cell.config.batch_gap_us is None or shares.decodes_wait or worker.spares < SPARE_EVERY:
        return False
    prompt_tokens = sum(sequence.gap for _, sequence in prefills)
    return num_decodes(worker)[1] > 0 and 0 < prompt_tokens == sum(shares.counts)


def _no_room(
    cell: CellState, worker: Worker, prefills: Prefills, shares: StepShares, *, is_spared: bool
) -> list[SlotIndex]:
    """Flex sequences that decode and sit out a step with prompts of others, the newest first: all
    of them while those have more to go than a step holds, or the step is spared, and then who would
    make it longer than their gap. They stay in the batch, as the prompts are soon computed.
    """
    gap_us, spec, prompt_tokens = cell.config.batch_gap_us, worker.spec, sum(shares.counts)
    if gap_us is None or not prompt_tokens or shares.decodes_wait:
        return []
    decoding = [slot for slot in worker.flex if slot not in worker.prefills]
    if is_spared or prompt_tokens < sum(sequence.gap for _, sequence in prefills):
        return decoding
    live, flex = num_decodes(worker)
    rows = (spec.mixed_budget - prompt_tokens) // spec.slot_tokens_max - live
    left_us, counts = gap_us - worker.cost.prefill_us(prompt_tokens), range(1, min(flex, rows) + 1)
    fit = bisect_right(counts, left_us, key=lambda count: worker.cost.decode_us(live + count))
    return sorted(decoding, key=lambda slot: worker.flex[slot].sequence_id)[fit:]


def _flex_shares(
    cell: CellState, worker: Worker, prefills: Prefills, decodes: int, prompt_tokens: int
) -> StepShares:
    """Beside others one after the other, as far as the budget goes, and nobody who decodes sits out
    for them; by the policy where nobody else is there.
    """
    budget = flex_budget(cell, worker, decodes, prompt_tokens)
    if len(worker.flex) == len(worker.running):
        alone = flex_budget(cell, worker, 0)
        shares = _mixed(cell, prefills, decodes, budget, alone)
        assert shares.counts[0] > 0, "the first in the order gets on with every step"
        return shares
    counts = []
    for _, sequence in prefills:
        counts.append(min(sequence.gap, budget))
        budget -= counts[-1]
    return StepShares(counts)


def _mixed(
    cell: CellState, prefills: Prefills, decodes: int, budget: int, budget_alone: int
) -> StepShares:
    gaps = tuple(sequence.gap for _, sequence in prefills)
    # Less where a budget has shrunk since they were admitted.
    minimum = min(cell.config.prefill_tokens_min, budget // len(gaps))
    return cell.policy.mix(MixView(gaps, decodes, budget, budget_alone, minimum))
