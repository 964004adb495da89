"""Edits of logits in parts: no part is too large, and together they are the whole."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BAD_WORDS_MAX, BIASES_MAX, STOP_TOKENS_MAX
from gpu_worker.batch.step_types import LogitEdits
from gpu_worker.runner.eager_runner import edit_tensors
from gpu_worker.runner.logits_processors import in_parts, row_edits_bytes
from gpu_worker.runner.staging import packed_bytes
from kernels.sampling.logit_edits import edit_logits

VOCAB = 23
IDS = st.lists(st.integers(0, VOCAB - 1), unique=True, max_size=VOCAB)
ROWS = st.lists(st.tuples(IDS, IDS, IDS, IDS), min_size=1, max_size=6)


def edits_of(rows: Sequence[Sequence[Sequence[int]]]) -> LogitEdits:
    """(biases, seen, forbidden, allowed) of each row; all forbidden ones of the last row first."""
    count = len(rows)

    def entries(kind: int, order: Sequence[int]) -> tuple[Any, Any]:
        pairs = [(row, token) for row in order for token in rows[row][kind]]
        array = np.array(pairs, np.int64).reshape(-1, 2)
        return np.ascontiguousarray(array[:, 0]), np.ascontiguousarray(array[:, 1])

    order = range(count)
    (bias_rows, bias_ids), (seen_rows, seen_ids) = entries(0, order), entries(1, order)
    (forbidden_rows, forbidden_ids), (allowed_rows, allowed_ids) = (
        entries(2, [count - 1, *range(count - 1)]), entries(3, order)
    )  # fmt: skip
    return LogitEdits(
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        biases=(bias_ids / 4 - 1).astype(np.float32),
        seen_rows=seen_rows,
        seen_ids=seen_ids,
        seen_counts=(seen_ids % 3).astype(np.float32),
        repetition=np.linspace(1.1, 1.5, count, dtype=np.float32),
        presence=np.linspace(0.0, 0.5, count, dtype=np.float32),
        frequency=np.linspace(-0.2, 0.2, count, dtype=np.float32),
        forbidden_rows=forbidden_rows,
        forbidden_ids=forbidden_ids,
        allowed_rows=allowed_rows,
        allowed_ids=allowed_ids,
    )


def edited(logits: torch.Tensor, parts: Sequence[LogitEdits]) -> torch.Tensor:
    logits = logits.clone()
    for part in parts:
        edit_logits(logits, edit_tensors(torch.from_numpy(array) for array in part.arrays))
    return logits


@given(rows=ROWS, spare=st.integers(0, 2000))
@settings(max_examples=60, deadline=None)
def test_parts_are_small_enough_and_do_what_the_whole_does(
    rows: list[tuple[list[int], ...]], spare: int
) -> None:
    whole = edits_of(rows)
    single = [edits_of([row]) for row in rows]
    # As much as the largest row takes in this batch, and something.
    fixed = 12 * len(rows) + 13 * 16
    size_bytes = spare + fixed + max(sum(each.nbytes for each in one.arrays) for one in single)
    parts = list(in_parts(whole, size_bytes))
    assert all(packed_bytes(part.arrays) <= size_bytes for part in parts)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    assert torch.equal(edited(logits, parts), edited(logits, [whole]))


def test_what_fits_is_one_part() -> None:
    whole = edits_of([([1], [2], [3], [4]), ([5], [], [], [])])
    assert list(in_parts(whole, packed_bytes(whole.arrays))) == [whole]
    assert len(list(in_parts(whole, packed_bytes(whole.arrays) - 1))) == 2


def test_the_room_is_for_the_most_that_a_row_may_ask_for() -> None:
    vocab = 40_000
    limits = RowLimits(
        slots=3, context_tokens=1000, step_tokens=8, block_size=4, block_count=4, vocab_size=vocab
    )
    most = (
        range(BIASES_MAX), range(limits.context_tokens),
        range(STOP_TOKENS_MAX + BAD_WORDS_MAX), range(vocab),
    )  # fmt: skip
    whole = edits_of([most] * 3)
    parts = list(in_parts(whole, row_edits_bytes(limits)))
    assert len(parts) == 3
    assert all(packed_bytes(part.arrays) <= row_edits_bytes(limits) for part in parts)
