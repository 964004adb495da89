"""silu_mul: the gated activation of a Llama feed-forward block.

formula  y = gate / (1 + exp(-gate)) * up
shapes   gate_up  [tokens, 2 * inner]   float32 | bfloat16: gate is [:, :inner], up is [:, inner:]
returns  [tokens, inner], same dtype
math     float32, one rounding at the end
cost     reads 2 and writes 1 element per output element; memory bound
"""

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_float


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The definition of correct."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _silu_mul_native(gate_up: Tensor) -> Tensor:
    y: Tensor = native.compiled().silu_mul(gate_up)
    return y


_PATHS = {"native": _silu_mul_native, "torch": silu_mul_reference}


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half, [tokens, inner]."""
    require_float(gate_up, "gate_up", dim=2)
    require(gate_up.size(1) % 2 == 0, "gate_up", "last dimension must be even")
    return _PATHS[native.path_for(gate_up)](gate_up)
