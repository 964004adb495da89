"""edited_rows: the logits that are sampled, read as float32 from where they lie.

A head gives bfloat16 or float16, of which float32 is exact: what reads them widens them in
registers, and the whole matrix is never converted. What rules have changed is float32 and no
narrower number, so rows that have any lie apart.

formula  x[r] = edited.logits[r] if edited.is_edited[r] else float32(logits[r])
shapes   logits [rows, vocab] float32 | bfloat16 | float16; EditedRows as below -> float32
cost     the bytes of the one that is read; 4 bytes per row besides
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import jit
from kernels.checks import require_ids
from kernels.jit import constexpr, pointer, scalar, tl


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedRows:
    """Rows of logits that rules have changed; of the others anything."""

    logits: Tensor  # [rows, vocab] float32
    is_edited: Tensor  # [rows] int32, 0 or 1

    def __post_init__(self) -> None:
        rows, vocab = self.logits.shape
        require_ids(self.logits, "edited.logits", dtype=torch.float32, shape=(rows, vocab))
        require_ids(self.is_edited, "edited.is_edited", dtype=torch.int32, shape=(rows,))

    @classmethod
    def of(cls, rows: int, vocab: int, device: torch.device) -> EditedRows:
        """None of them is."""
        return cls(
            logits=torch.zeros((rows, vocab), device=device),
            is_edited=torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> EditedRows:
        """The same memory."""
        return EditedRows(logits=self.logits[:rows], is_edited=self.is_edited[:rows])


def sampled_logits(logits: Tensor, edited: EditedRows | None) -> Tensor:
    """The definition of correct: [rows, vocab] float32."""
    wide = logits.float()
    if edited is None:
        return wide
    return torch.where(edited.is_edited.unsqueeze(1) > 0, edited.logits, wide)


@jit.compiled
def widened(
    logits: pointer, row: scalar, vocab: scalar, first: scalar, limit: scalar, other: constexpr,
    TILE: constexpr,
) -> pointer:  # fmt: skip
    """[TILE] float32 of a row, from token `first` on; `other` from `limit` on.

    A thread takes four in a row, as it would of float32: what is summed is summed in one order,
    whatever the logits are.
    """
    token = first + 4 * tl.arange(0, TILE // 4)[:, None] + tl.arange(0, 4)[None, :]
    found = tl.load(logits + row * vocab + token, mask=token < limit, other=other)
    return tl.reshape(found.to(tl.float32), [TILE])


@jit.compiled
def logits_at(
    logits: pointer, edited: pointer, is_edited: pointer, row: scalar, vocab: scalar,
    first: scalar, limit: scalar, other: constexpr, TILE: constexpr,
) -> pointer:  # fmt: skip
    """The same of what is sampled."""
    is_own = tl.load(is_edited + row) > 0
    raw = widened(logits, row, vocab, first, tl.where(is_own, 0, limit), other, TILE)
    own = widened(edited, row, vocab, first, tl.where(is_own, limit, 0), other, TILE)
    return tl.where(is_own, own, raw)
