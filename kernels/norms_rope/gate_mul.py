"""silu_mul: the gated activation of a Llama feed-forward block.

formula  y = gate / (1 + exp(-gate)) * up
shapes   gate_up  [tokens, 2 * inner]   float32 | bfloat16 | float16:
                  gate is [:, :inner], up is [:, inner:]
returns  [tokens, inner], same dtype
math     float32, one rounding at the end
cost     reads 2 and writes 1 element per output element; memory bound
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch, jit, native
from kernels.checks import require, require_float
from kernels.jit import constexpr, pointer, stride, tl


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The definition of correct."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _silu_mul_native(gate_up: Tensor) -> Tensor:
    y: Tensor = native.compiled().silu_mul(gate_up)
    return y


@jit.compiled
def _silu_mul_kernel(
    gate_up: pointer, y: pointer, inner: stride, gate_up_stride: stride, BLOCK: constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < inner
    start = gate_up + token * gate_up_stride
    gate = tl.load(start + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(start + inner + column, mask=is_in, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + token * inner + column, value.to(y.dtype.element_ty), mask=is_in)


_BLOCK_MAX = 2048


def _silu_mul_triton(gate_up: Tensor) -> Tensor:
    tokens, inner = gate_up.size(0), gate_up.size(1) // 2
    y = gate_up.new_empty((tokens, inner))
    if y.numel():
        block = min(_BLOCK_MAX, jit.power_of_two(inner))
        grid = (tokens, -(-inner // block))
        _silu_mul_kernel[grid](gate_up, y, inner, gate_up.stride(0), BLOCK=block)
    return y


_PATHS = {
    "triton": _silu_mul_triton,
    "native": _silu_mul_native,
    "torch": silu_mul_reference,
}


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half, [tokens, inner]."""
    require_float(gate_up, "gate_up", dim=2)
    require(gate_up.size(1) % 2 == 0, "gate_up", "last dimension must be even")
    return _PATHS[dispatch.path_for(gate_up)](gate_up)
