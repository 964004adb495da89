"""Which tokens of a step have logits that anybody wants: the last layer computes no others.

Of a row that samples its last token and those drafted behind it, of a row that wants prompt
logprobs all from the first wanted one on: so of each row its last few, and how many follows from
the row alone.

    tokens of the step    |0 1 2 3|4|5 6 7|          three rows, of which the first is in mid-prompt
    logits of                      4     7           K = 2, starts 0 0 1 2
"""

from dataclasses import dataclass

import numpy as np

from gpu_worker.batch.step_types import IndexArray, IntArray, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsIndices:
    """K of the step's T tokens, row after row."""

    rows: IntArray  # [K] index into the R rows
    # [K] 1: the row's last token.
    before_end: IntArray
    starts: IndexArray  # [R + 1]
    # The most of any row.
    row_max: int
    # Where among the K are the tokens of `sampled_tokens` and of `prompt_logprobs.computed`.
    sampled: IntArray  # [Q]
    prompt: IntArray  # [E]


def logits_indices(step: StepInputs) -> LogitsIndices:
    counts = np.bincount(step.sampled_rows, minlength=step.row_count)
    prompt, ends = np.zeros(0, np.int64), step.query_starts[1:].astype(np.int64)
    if (wanted := step.prompt_logprobs) is not None:
        prompt = ends[wanted.rows] - wanted.computed
        np.maximum.at(counts, wanted.rows, prompt)
        prompt = counts.cumsum()[wanted.rows] - prompt
    starts = np.zeros(step.row_count + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    rows = np.repeat(np.arange(step.row_count), counts)
    return LogitsIndices(
        rows=rows,
        before_end=starts[rows + 1] - np.arange(len(rows)),
        starts=starts.astype(np.int32),
        row_max=int(counts.max(initial=0)),
        sampled=starts[step.sampled_rows + 1] - ends[step.sampled_rows] + step.sampled_tokens,
        prompt=prompt,
    )
