"""Steps that a worker runs before it is ready, so that no request pays for being the first.

They read and write nobody's blocks, and no row: on a device that holds the rows, theirs are
padding.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from gpu_worker.device import FloatArray, IntArray, RowEnds, SamplingColumns, StepInputs
from gpu_worker.draft import RowLimits
from gpu_worker.row_rules import edits_of

_TOKENS: Final = 32
_ROWS: Final = 4
_TOP_LOGPROBS: Final = 5
_NOBODY: Final = -1


def warm_up(compute: Callable[[StepInputs], object], limits: RowLimits) -> None:
    """Run a prefill, a mixed step, and decode steps: plain, with log-probabilities, with edits.

    Small ones: threads, scratch memory, compiled kernels and the library's plans come with the
    first step of a kind, whatever its size.
    """
    longest = min(_TOKENS, limits.step_tokens, limits.context_tokens)
    decode = [1] * min(_ROWS, limits.slots)
    compute(step_of([longest], limits))
    compute(step_of([min(2, longest), 1][: limits.slots], limits))
    compute(step_of(decode, limits))
    compute(step_of(decode, limits, logprobs=min(_TOP_LOGPROBS, limits.vocab_size)))
    compute(step_of(decode, limits, forbidden=(0,)))


def largest_step(limits: RowLimits) -> StepInputs:
    """As many rows as there are slots, as many tokens as a step may have, all with one logit row.

    The first row has all tokens that the others leave; contexts are as long as any can be.
    """
    rows = min(limits.slots, limits.step_tokens)
    first = min(limits.step_tokens - (rows - 1), limits.context_tokens)
    width = limits.blocks_per_row
    return step_of([first, *[1] * (rows - 1)], limits, table_width=width)


def step_of(
    counts: Sequence[int],
    limits: RowLimits,
    *,
    logprobs: int = -1,
    forbidden: tuple[int, ...] = (),
    table_width: int | None = None,
) -> StepInputs:
    """Rows that all read block 0 and write nowhere; half of them sample with noise."""
    rows, per_row = len(counts), np.array(counts, np.int64)
    starts = np.concatenate([[0], np.cumsum(per_row)])
    width = table_width or -(-max(counts) // limits.block_size)
    masks = [(row, np.array(forbidden, np.int64)) for row in range(rows)] if forbidden else []
    return StepInputs(
        slots=np.full(rows, _NOBODY, np.int64),
        serials=np.zeros(rows, np.uint64),
        counts=per_row,
        query_starts=starts.astype(np.int32),
        context_lengths=per_row.astype(np.int32),
        block_tables=np.zeros((rows, width), np.int32),
        token_ids=np.zeros(starts[-1], np.int64),
        positions=np.concatenate([np.arange(count) for count in counts]),
        kv_slots=np.full(starts[-1], -1, np.int64),
        sampled_rows=np.arange(rows),
        sampled_tokens=starts[1:] - 1,
        sampling=SamplingColumns(
            temperature=(np.arange(rows) % 2).astype(np.float32),
            top_k=np.full(rows, min(8, limits.vocab_size), np.int64),
            top_p=_all(rows, 0.9),
            min_p=_all(rows, 0.0),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int64),
            position=np.zeros(rows, np.int64),
            logprobs=np.full(rows, logprobs, np.int64),
            edits=edits_of([], masks, rows),
        ),
        ends=_ends(per_row),
    )


def _all(rows: int, value: float) -> FloatArray:
    return np.full(rows, value, np.float32)


def _ends(counts: IntArray) -> RowEnds:
    rows = len(counts)
    return RowEnds(
        joined=np.zeros(rows, np.int64),
        known=counts,
        limit=counts,
        masked_until=np.zeros(rows, np.int64),
        stops=np.zeros((rows, 0), np.int64),
    )
