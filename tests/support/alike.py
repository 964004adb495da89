"""Is a text the same alone, in a crowd, and computed again by somebody who never decoded it?"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.runner.stepping import Stepper
from tests.support.ahead import play
from tests.support.mini_scheduler import MiniScheduler, sampling

# Longer and shorter than blocks, chunks and tiles of attention; every other one is sampled.
LENGTHS: Final = (75, 1, 41)
MAX_TOKENS: Final = 5
CHUNK_TOKENS: Final = 30
_WHOLE: Final = 1 << 30

# Tokens, and of each its log-probability and those of the likeliest.
Said = tuple[list[int], list[tuple[float, tuple[float, ...]]]]


def said(
    limits: RowLimits, stepper: Stepper, known: Mapping[int, Sequence[int]], chunk_tokens: int
) -> list[Said]:
    """By each of some prompts, of which some tokens are known already."""
    scheduler = MiniScheduler(limits, chunk_tokens=chunk_tokens)
    for row, tokens in known.items():
        prompt = [5 + (7 * row + 3 * at) % 90 for at in range(LENGTHS[row])]
        wanted = sampling(max_tokens=MAX_TOKENS, logprobs=2, temperature=0.7 * (row % 2), seed=row)
        scheduler.submit(prompt, wanted, committed=tokens)
    play(stepper, scheduler, lambda: _WHOLE)
    return [
        (
            scheduler.outputs[row],
            [(each.logprob, each.top_logprobs) for each in scheduler.logprobs[row]],
        )
        for row in range(len(known))
    ]


def check(limits: RowLimits, new_stepper: Callable[[], Stepper]) -> None:
    """To the last bit; each time through a stepper of no rows."""
    together = said(limits, new_stepper(), dict.fromkeys(range(len(LENGTHS)), ()), _WHOLE)
    for row, (tokens, logprobs) in enumerate(together):
        assert len(tokens) == len(logprobs) == MAX_TOKENS
        assert said(limits, new_stepper(), {row: ()}, CHUNK_TOKENS) == [(tokens, logprobs)]
        # After a death.
        rest = [(tokens[3:], logprobs[3:])]
        assert said(limits, new_stepper(), {row: tokens[:3]}, _WHOLE) == rest
