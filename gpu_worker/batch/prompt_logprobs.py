"""Prompt logprobs: which positions of a step's chunks are wanted, and what came of them.

The logits of a token are about the position after it, so a chunk of the tokens [done, done + count)
brings the positions [done + 1, done + count], as far as they are still the prompt's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_worker.batch.plans import RowPromptLogprobs
from gpu_worker.batch.step_types import IntArray, PromptLogprobTokens, StepInputs, StepSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsRequest:
    """What a row wants of its prompt: `prompt` holds all of it."""

    prompt: IntArray
    # Positions before this one were answered in an earlier stay.
    prompt_logprobs_from: int
    # Likeliest tokens of each position.
    top: int

    def span(self, done: int, count: int) -> range:
        """Positions that the next `count` tokens are about."""
        end = min(done + count, len(self.prompt) - 1) + 1
        return range(max(done + 1, self.prompt_logprobs_from), end)


def prompt_logprob_tokens(
    requests: Sequence[tuple[int, PromptLogprobsRequest]],
    done: IntArray,
    counts: IntArray,
    starts: IntArray,
) -> PromptLogprobTokens | None:
    """`requests` name rows of the R; done, counts [R] and starts [R + 1] are the step's."""
    rows, positions, computed, token_ids, tops = [], [], [], [], []
    for row, request in requests:
        span = request.span(int(done[row]), int(counts[row]))
        if not span:
            continue
        rows.append(np.full(len(span), row, np.int64))
        positions.append(np.array(span, np.int64))
        computed.append(positions[-1] - 1 - done[row] + starts[row])
        token_ids.append(request.prompt[span.start : span.stop])
        tops.append(np.full(len(span), request.top, np.int64))
    if not rows:
        return None
    return PromptLogprobTokens(
        rows=np.concatenate(rows),
        positions=np.concatenate(positions),
        computed=np.concatenate(computed),
        token_ids=np.concatenate(token_ids),
        tops=np.concatenate(tops),
    )


def row_prompt_logprobs(
    step: StepInputs, samples: StepSamples, broken: IntArray
) -> tuple[RowPromptLogprobs, ...]:
    """One per row that wants some, with consecutive positions; none of `broken` slots."""
    wanted, found = step.prompt_logprobs, samples.prompt_logprobs
    if wanted is None:
        return ()
    assert found is not None, "the runner answers what it is asked"
    told = []
    for row in np.unique(wanted.rows).tolist():
        index = np.flatnonzero(wanted.rows == row)
        if step.slots[row] in broken:
            continue
        top = int(wanted.tops[index[0]])
        told.append(
            RowPromptLogprobs(
                slot=int(step.slots[row]),
                position=int(wanted.positions[index[0]]),
                logprobs=tuple(found.logprob[index].tolist()),
                top_token_ids=tuple(found.top_token_ids[index, :top].ravel().tolist()),
                top_logprobs=tuple(found.top_logprobs[index, :top].ravel().tolist()),
            )
        )
    return tuple(told)
