"""batch_invariant_linear: y = x W^T + bias on a GPU, of which a row's bits are its own.

formula  y = ((0 + p_0) + p_1) + ... + bias, p_i = the sum over PART inputs from i * PART on, in
         order; all in float32, rounded once. Neither tile nor order depends on the number of rows,
         by which matrix libraries choose both
shapes   x       [rows, in_features]             floats (float32, bfloat16 or float16), contiguous
         weight  [out_features, in_features]     same dtype, contiguous
         bias    [out_features] or None          same dtype
returns  [rows, out_features], same dtype
triton   a tile is ROWS rows x OUTPUTS outputs. Where there are fewer tiles than processors each
         part of one is a program of its own and kept, and a second launch adds them up; else a
         program goes through the parts of its tile. Both in the same order, so with the same bits
cost     reads out * in weights once per ROWS rows, from memory once per call; multiplies as if
         rows were a multiple of ROWS. What is kept is less than processors * ROWS * OUTPUTS * 4
         bytes for each PART inputs. Compiled for sm_80, sm_90 and sm_100, and not timed
after    Thinking Machines' batch-invariant kernels (He et al., Defeating Nondeterminism in LLM
         Inference, 2025), which have one tile and no parts
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels import jit
from kernels.jit import constexpr, pointer, scalar, stride, tl


class Tile(NamedTuple):
    """What a program multiplies, by the dtype alone."""

    # Inputs per step of the loop.
    inputs: int
    warps: int
    stages: int


# The least that a warpgroup's product takes; a row more or less changes nothing.
ROWS: Final = 64
OUTPUTS: Final = 64
# Inputs that are added up before they meet others. Linears of an 8B model have 4 to 14 parts, and
# so enough programs for a step of few rows; those of a 0.6B model 1 to 3.
PART: Final = 1024


def tile_for(dtype: torch.dtype) -> Tile:
    """Float32 has no tensor cores, and takes twice the memory. Nothing spills."""
    return Tile(16, 8, 2) if dtype == torch.float32 else Tile(32, 4, 4)


@jit.compiled
def _linear_kernel(
    x: pointer, weight: pointer, bias: pointer, y: pointer, kept: pointer,
    rows: scalar, outputs: stride, inputs: stride,
    ROWS: constexpr, OUTPUTS: constexpr, INPUTS: constexpr, PART: constexpr,
    IS_APART: constexpr, HAS_BIAS: constexpr, WIDENS: constexpr,
) -> None:  # fmt: skip
    """A tile, or with IS_APART one part of it. Tiles of the same weights are side by side."""
    row_tiles = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = (row < rows)[:, None], (output < outputs)[None, :]
    x_at = x + row.to(tl.int64)[:, None] * inputs
    weight_at = weight + output.to(tl.int64)[None, :] * inputs
    first, end = 0, inputs
    if IS_APART:
        first = tl.program_id(1) * PART
        end = tl.minimum(first + PART, inputs)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(first, end, PART):
        part = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for at in range(start, tl.minimum(start + PART, inputs), INPUTS):
            each = at + tl.arange(0, INPUTS)
            is_in = each < inputs
            left = tl.load(x_at + each[None, :], mask=is_row & is_in[None, :], other=0.0)
            right = tl.load(weight_at + each[:, None], mask=is_output & is_in[:, None], other=0.0)
            if WIDENS:
                left, right = left.to(tl.float32), right.to(tl.float32)
            part = tl.dot(left, right, part, input_precision="ieee")
        total += part
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if IS_APART:
        to = kept + tl.program_id(1).to(tl.int64) * rows * outputs + at
        tl.store(to, total, mask=is_row & is_output)
    else:
        if HAS_BIAS:
            added = tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
            total += added[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=is_row & is_output)


@jit.compiled
def _add_up_kernel(
    kept: pointer, bias: pointer, y: pointer, count: scalar, outputs: stride, parts: scalar,
    HAS_BIAS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """`count` results, rows * outputs, from their parts in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < count
    total = tl.zeros([BLOCK], tl.float32)
    part = kept + at
    for _ in range(parts):
        total += tl.load(part, mask=is_in, other=0.0)
        part += count
    if HAS_BIAS:
        total += tl.load(bias + at % outputs, mask=is_in, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=is_in)


_BLOCK: Final = 1024


def batch_invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Of arguments that `packed_linear.PackedLinear` has checked, with one row at least; the result
    is in `out` if given, [rows, out_features] contiguous.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    y = x.new_empty((rows, outputs)) if out is None else out
    tiles = -(-rows // ROWS) * -(-outputs // OUTPUTS)
    parts = -(-inputs // PART)
    is_apart = parts > 1 and tiles < jit.programs(x.device, 1)
    # Fewer numbers than 2^31: tiles are fewer than processors.
    kept = x.new_empty((parts, rows, outputs), dtype=torch.float32) if is_apart else y
    given = weight if bias is None else bias
    tile = tile_for(x.dtype)
    _linear_kernel[(tiles, parts if is_apart else 1)](
        x, weight, given, y, kept, rows, outputs, inputs,
        ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=tile.inputs, PART=PART,
        IS_APART=is_apart, HAS_BIAS=bias is not None, WIDENS=jit.is_widened(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if is_apart:
        _add_up_kernel[(-(-rows * outputs // _BLOCK),)](
            kept, given, y, rows * outputs, outputs, parts,
            HAS_BIAS=bias is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return y
