"""Mix: how prefill and decode share the token budget of a step."""

from dataclasses import dataclass
from typing import NamedTuple


class MixView(NamedTuple):
    """What a mix rule may look at: a step in which somebody has more than one token to go."""

    # Tokens to go of those who have more than one, in the queue's order.
    gaps: tuple[int, ...]
    # How many decode, tokens left beside them, and tokens there are if they sit the step out.
    decodes: int
    budget: int
    budget_alone: int
    # What each is promised of every step, at most `budget // len(gaps)`.
    minimum: int


@dataclass(frozen=True, slots=True)
class StepShares:
    """Tokens of each in the order of `gaps`, 0: none of this step, and whether decodes sit out."""

    counts: list[int]
    decodes_wait: bool = False


def chunked(view: MixView) -> StepShares:
    """Chunked prefill beside decode: none takes more than half of what is left while another waits
    behind it (Sarathi-Serve, Agrawal et al., OSDI 2024; vLLM V1).

    So a short prompt is never serialised behind long ones, each gets its minimum, and nobody who
    decodes waits for more than the budget of a mixed step.
    """
    budget = view.budget
    counts = []
    for index, gap in enumerate(view.gaps):
        behind = len(view.gaps) - index - 1
        share = min(budget // 2, budget - behind * view.minimum) if behind else budget
        # One at least while there is any: the first always gets on.
        counts.append(min(gap, max(share, 1), budget))
        budget -= counts[-1]
    return StepShares(counts)


def merged_prefill(view: MixView) -> StepShares:
    """Whole prompts beside decodes (Orca, Yu et al., OSDI 2022; vLLM's first versions).

    A prompt is cut only if it exceeds the budget of a whole step. One that does not fit beside the
    decodes has the step for itself: the first in the order is never passed over.
    """
    first = view.gaps[0]
    decodes_wait = view.budget < first <= view.budget_alone and view.decodes > 0
    budget = view.budget_alone if decodes_wait else view.budget
    counts = [min(first, budget)]
    for gap in view.gaps[1:]:
        budget -= counts[-1]
        counts.append(gap if gap <= budget else 0)
    return StepShares(counts, decodes_wait)


def prefill_first(view: MixView) -> StepShares:
    """While somebody's prompt is not computed, steps are prefill only (TGI, LMDeploy, vLLM 0.x).

    First tokens come soonest; whoever decodes waits until no prompt is left, for as many prompts at
    most as there are slots.
    """
    budget = view.budget_alone
    counts = []
    for gap in view.gaps:
        counts.append(min(gap, budget))
        budget -= counts[-1]
    return StepShares(counts, decodes_wait=view.decodes > 0)
