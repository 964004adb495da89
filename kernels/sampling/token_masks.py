"""token_masks: rows of logits may sample only what their masks have a bit for, in place.

formula  logits[rows[g], t] = -inf  where bit t % 32 of masks[g, t / 32] is 0
shapes   logits [R, vocab] float32, contiguous; rows [G] int64, in range, each once;
         masks [G, ceil(vocab / 32)] int32
triton   none: rows that live on a device have a mask there (`kernels.rows.edit_rows`, ALLOWED)
cost     a bit per logit read and, where it is 0, four bytes written: words of ones cost nothing
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_ids

BITS = 32


def mask_logits_reference(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """The definition of correct."""
    bit = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    # Row after row: a bit takes four bytes here.
    for row, mask in zip(rows.tolist(), masks, strict=True):
        is_allowed = ((mask.unsqueeze(1) >> bit) & 1).view(-1)[: logits.size(1)]
        logits[row].masked_fill_(is_allowed == 0, -math.inf)


def _mask_native(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    native.compiled().mask_logits(logits, rows, masks)


_PATHS = {"native": _mask_native, "torch": mask_logits_reference}


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid these rows what their masks have no bit for."""
    require(logits.dtype == torch.float32, "logits", "must be float32")
    require(logits.dim() == 2 and logits.is_contiguous(), "logits", "must be [rows, vocab]")
    count = rows.numel()
    require_ids(rows, "rows", dtype=torch.int64, shape=(count,))
    require_ids(masks, "masks", dtype=torch.int32, shape=(count, -(-logits.size(1) // BITS)))
    _PATHS[native.path_for(logits)](logits, rows, masks)
