"""Edits of logits cut into parts that can be sent: penalties of many long rows are megabytes.

Rows do not see each other's edits, so a part is all edits of some rows.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BAD_WORDS_MAX, BIASES_MAX, STOP_TOKENS_MAX
from gpu_worker.batch.step_types import AnyArray, LogitEdits
from gpu_worker.runner.staging import ALIGN_BYTES, packed_bytes

# 64 penalties of 8k tokens each.
_AS_A_RULE_BYTES = 10 << 20
# Entries name their rows in the first of these; all are parallel.
_KINDS = {
    "bias_rows": ("bias_ids", "biases"),
    "seen_rows": ("seen_ids", "seen_counts"),
    "forbidden_rows": ("forbidden_ids",),
    "allowed_rows": ("allowed_ids",),
}


def in_parts(edits: LogitEdits, size_bytes: int) -> Iterator[LogitEdits]:
    """The same edits; each part takes no more than `size_bytes`, if any single row's do."""
    if packed_bytes(edits.arrays) <= size_bytes:
        yield edits
        return
    costs = _row_bytes(edits)
    room = size_bytes - _fixed_bytes(len(costs))
    start, total = 0, 0
    for row, cost in enumerate(costs.tolist()):
        if total + cost > room and total:
            yield _of_rows(edits, start, row)
            start, total = row, 0
        total += cost
    yield _of_rows(edits, start, len(costs))


def edits_bytes(limits: RowLimits) -> int:
    """Room for any row's, and as a rule for those of all."""
    return max(row_edits_bytes(limits), _AS_A_RULE_BYTES)


def row_edits_bytes(limits: RowLimits) -> int:
    """The most that the edits of one row take, in a batch of any size."""
    vocab = limits.vocab_size
    seen = min(vocab, limits.context_tokens)
    forbidden = STOP_TOKENS_MAX + BAD_WORDS_MAX
    entries = 20 * (BIASES_MAX + seen) + 16 * (forbidden + vocab)
    return entries + _fixed_bytes(limits.slots)


def _row_bytes(edits: LogitEdits) -> AnyArray:
    rows = len(edits.repetition)
    costs = np.zeros(rows, np.int64)
    for name, others in _KINDS.items():
        arrays = [getattr(edits, each) for each in (name, *others)]
        each = sum(array.itemsize for array in arrays)
        costs += each * np.bincount(arrays[0], minlength=rows)
    return costs


def _fixed_bytes(rows: int) -> int:
    """The penalties of all rows, and what lies between the arrays."""
    return 3 * 4 * rows + ALIGN_BYTES * len(fields(LogitEdits))


def _of_rows(edits: LogitEdits, start: int, end: int) -> LogitEdits:
    """The entries of rows [start, end)."""
    taken: dict[str, Any] = {}
    for name, others in _KINDS.items():
        rows = getattr(edits, name)
        is_in = (rows >= start) & (rows < end)
        taken |= {each: getattr(edits, each)[is_in] for each in (name, *others)}
    return replace(edits, **taken)
