"""Mix: how prefill and decode share the token budget of a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MixView:
    """What a mix rule may look at: a step to be, after one token for everyone who decodes."""

    # Tokens to go of those with more than one, in the queue's order.
    gaps: tuple[int, ...]
    # Tokens left for them, and what each is promised: at most `budget // len(gaps)`.
    budget: int
    minimum: int


def half_of_the_rest(view: MixView) -> list[int]:
    """Chunked prefill beside decode: none takes more than half of what is left while another waits
    behind it.

    So a short prompt is never serialised behind long ones, and each gets its minimum.
    """
    budget = view.budget
    counts = []
    for index, gap in enumerate(view.gaps):
        behind = len(view.gaps) - index - 1
        share = min(budget // 2, budget - behind * view.minimum) if behind else budget
        counts.append(min(gap, share))
        budget -= counts[-1]
    return counts
