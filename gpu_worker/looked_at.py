"""Which tokens of a step anybody looks at: the last layer computes no others.

Of a row that samples its last token, of a row whose prompt is explained all from the first one
explained on: so of each row its last few, and how many follows from the row alone.

    tokens of the step    |0 1 2 3|4|5 6 7|          three rows, of which the first is in mid-prompt
    looked at                      4     7           K = 2, starts 0 0 1 2
"""

from dataclasses import dataclass

import numpy as np

from gpu_worker.device import IndexArray, IntArray, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """K of the step's T tokens, row after row."""

    rows: IntArray  # [K] index into the R rows
    # [K] 1: the row's last token.
    before_end: IntArray
    starts: IndexArray  # [R + 1]
    # The most of any row.
    row_max: int
    # Where among the K are the tokens of `sampled_tokens` and of `explained.computed`.
    sampled: IntArray  # [Q]
    explained: IntArray  # [E]


def looked_at(step: StepInputs) -> LookedAt:
    counts = np.zeros(step.row_count, np.int64)
    counts[step.sampled_rows] = 1
    explained, ends = np.zeros(0, np.int64), step.query_starts[1:].astype(np.int64)
    if (wanted := step.explained) is not None:
        explained = ends[wanted.rows] - wanted.computed
        np.maximum.at(counts, wanted.rows, explained)
        explained = counts.cumsum()[wanted.rows] - explained
    starts = np.zeros(step.row_count + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    rows = np.repeat(np.arange(step.row_count), counts)
    return LookedAt(
        rows=rows,
        before_end=starts[rows + 1] - np.arange(len(rows)),
        starts=starts.astype(np.int32),
        row_max=int(counts.max(initial=0)),
        sampled=starts[step.sampled_rows + 1] - 1,
        explained=explained,
    )
