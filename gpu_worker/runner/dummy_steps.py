"""Steps of nobody's rows, to be run before anybody's: small ones, the largest, the worst."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import (
    FloatArray,
    IntArray,
    LogitEdits,
    PromptLogprobTokens,
    RowEnds,
    SamplingColumns,
    StepInputs,
    StepTables,
)
from kernels.sampling.logprobs import K_MAX

_NOBODY: Final = -1


def largest_step(limits: RowLimits, *, context: int | None = None) -> StepInputs:
    """As many rows as there are slots, as many tokens as a step may have, all with one logit row.

    The first row has all tokens that the others leave. `context`: how long rows are at least.
    """
    rows = min(limits.slots, limits.step_tokens)
    first = min(limits.step_tokens - (rows - 1), limits.context_tokens)
    return step_of([first, *[1] * (rows - 1)], limits, context=context)


def worst_step(limits: RowLimits) -> StepInputs:
    """The largest, at full length, of rows that want whatever can be wanted."""
    k = min(K_MAX, limits.vocab_size)
    step = largest_step(limits, context=limits.context_tokens)
    rows, first = step.row_count, int(step.counts[0])
    wanted = replace(
        step.sampling,
        logprobs=np.full(rows, k, np.int64),
        edits=partial(every_edit, rows, limits.vocab_size),
    )
    prompt_logprobs = None
    if first > 1:
        none = np.zeros(first - 1, np.int64)
        prompt_logprobs = PromptLogprobTokens(
            rows=none,
            positions=np.arange(1, first),
            computed=np.arange(first - 1),
            token_ids=none,
            tops=np.full(first - 1, k, np.int64),
        )
    return replace(step, sampling=wanted, prompt_logprobs=prompt_logprobs)


def step_of(
    counts: Sequence[int],
    limits: RowLimits,
    *,
    logprobs: int = -1,
    edits: LogitEdits | None = None,
    context: int | None = None,
) -> StepInputs:
    """Rows that all read block 0 and write nowhere; half of them sample with noise.

    `context`: how long each row is, if longer than its own tokens.
    """
    rows, per_row = len(counts), np.array(counts, np.int64)
    starts = np.concatenate([[0], np.cumsum(per_row)])
    width = -(-(context or max(counts)) // limits.block_size)
    contexts = np.maximum(per_row, context or 0)
    return StepInputs(
        slots=np.full(rows, _NOBODY, np.int64),
        sequence_ids=np.zeros(rows, np.uint64),
        counts=per_row,
        query_starts=starts.astype(np.int32),
        context_lengths=contexts.astype(np.int32),
        token_ids=np.zeros(starts[-1], np.int64),
        positions=np.concatenate([np.arange(count) for count in counts]),
        tables=lambda: StepTables(
            block_tables=np.zeros((limits.groups, rows, width), np.int32),
            slot_mapping=np.full((limits.groups, starts[-1]), -1, np.int64),
        ),
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
            edits=lambda: edits,
        ),
        ends=_ends(per_row),
    )


def every_edit(rows: int, vocab_size: int) -> LogitEdits:
    """One of each kind in every row: each kind has a kernel of its own."""
    each, first = np.arange(rows), np.zeros(rows, np.int64)
    return LogitEdits(
        bias_rows=each,
        bias_ids=first,
        biases=_all(rows, 0.5),
        seen_rows=each,
        seen_ids=first,
        seen_counts=_all(rows, 1.0),
        repetition=_all(rows, 1.1),
        presence=_all(rows, 0.1),
        frequency=_all(rows, 0.1),
        forbidden_rows=each,
        forbidden_ids=np.full(rows, vocab_size - 1),
        allowed_rows=each,
        allowed_ids=first,
    )


def _all(rows: int, value: float) -> FloatArray:
    return np.full(rows, value, np.float32)


def _ends(counts: IntArray) -> RowEnds:
    rows = len(counts)
    return RowEnds(
        joined=np.zeros(rows, np.int64),
        num_tokens=counts,
        limit=counts,
        masked_until=np.zeros(rows, np.int64),
        stops=np.zeros((rows, 0), np.int64),
    )
