"""gate_mul: the gated activation of a feed-forward block (elsewhere silu_and_mul, gelu_and_mul).

formula  y = a(gate) * up, of most families a = silu, of Gemma's a = gelu by its tanh approximation:
         silu(g) = g / (1 + exp(-g))
         gelu(g) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) * (g + 0.044715 g^3)
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


def gate_mul_reference(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """The definition of correct."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    functional = torch.nn.functional
    active = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
    return (active * up).to(gate_up.dtype)


def _gate_mul_native(gate_up: Tensor, is_gelu: bool) -> Tensor:
    return native.compiled().gate_mul(gate_up, is_gelu)


@jit.compiled
def _gate_mul_kernel(
    gate_up: pointer, y: pointer, inner: stride, gate_up_stride: stride,
    IS_GELU: constexpr, BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    jit.wait_for_neighbour(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < inner
    start = gate_up + token * gate_up_stride
    gate = tl.load(start + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(start + inner + column, mask=is_in, other=0.0).to(tl.float32)
    exponent = gate
    if IS_GELU:
        # 2 * sqrt(2 / pi), and that times 0.044715.
        exponent = gate * (1.5957691216057308 + 0.07135481282553484 * gate * gate)
    value = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(y + token * inner + column, value.to(y.dtype.element_ty), mask=is_in)


_BLOCK_MAX = 2048


def _gate_mul_triton(gate_up: Tensor, is_gelu: bool) -> Tensor:
    tokens, inner = gate_up.size(0), gate_up.size(1) // 2
    y = gate_up.new_empty((tokens, inner))
    if y.numel():
        block = min(_BLOCK_MAX, jit.power_of_two(inner))
        grid = (tokens, -(-inner // block))
        _gate_mul_kernel[grid](
            gate_up, y, inner, gate_up.stride(0), IS_GELU=is_gelu, BLOCK=block,
            **jit.neighbourly(gate_up.device),
        )  # fmt: skip
    return y


_PATHS = {
    "triton": _gate_mul_triton,
    "native": _gate_mul_native,
    "torch": gate_mul_reference,
}


def gate_mul(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """silu, or gelu, of the first half times the second half: [tokens, inner]."""
    require_float(gate_up, "gate_up", dim=2)
    require(gate_up.shape[1] % 2 == 0, "gate_up", "last dimension must be even")
    return _PATHS[dispatch.path_for(gate_up)](gate_up, is_gelu)
