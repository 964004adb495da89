"""rope: rotate queries and keys by their positions, in place (Hugging Face's "rotate half").

formula  with half = rotary_dim / 2, angle a = position * inv_freq[i], for i in [0, half):
         x[i]        := x[i] * cos(a) - x[i + half] * sin(a)
         x[i + half] := x[i + half] * cos(a) + x[i] * sin(a)
shapes   q          [tokens, heads, head_dim]      float32 | bfloat16, last two dimensions dense
         k          [tokens, kv_heads, head_dim]   same dtype
         positions  [tokens]                       int64, each in [0, positions_max)
         cos_sin    [positions_max, 2, half]       float32, times the attention scaling of yarn;
                    half <= head_dim / 2, dimensions beyond 2 * half stay as they are
writes   q and k in place; views of one fused qkv tensor are welcome
cost     reads and writes every rotated element once; memory bound
"""

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_float, require_ids, require_like


def rope_table(positions_max: int, inv_freq: Tensor, scale: float = 1.0) -> Tensor:
    """cos_sin [positions_max, 2, half] float32 of inverse frequencies [half], times `scale`."""
    require(positions_max >= 1, "positions_max", "must be at least 1")
    require(inv_freq.dim() == 1, "inv_freq", "must have 1 dimension")
    positions = torch.arange(positions_max, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.float())
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1).contiguous()


def rope_reference(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """The definition of correct."""
    table = cos_sin[positions].unsqueeze(2)
    cos, sin = table[:, 0], table[:, 1]
    half = cos_sin.size(2)
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        # Both before either is written: in float32 `first` and `second` are views of x.
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        x[..., : 2 * half] = rotated.to(x.dtype)


def _rope_native(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    native.compiled().rope(q, k, positions, cos_sin)


_PATHS = {"native": _rope_native, "torch": rope_reference}


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate `q`, `k` in place; a position outside the table is an IndexError before any write."""
    _check(q, k, positions, cos_sin)
    _PATHS[native.path_for(q)](q, k, positions, cos_sin)


def _check(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    require_float(q, "q", dim=3)
    require_float(k, "k", dim=3)
    require_like(k, q, "k", "q")
    require(k.size(0) == q.size(0), "k", "must have as many tokens as q")
    require(k.size(2) == q.size(2), "k", "must have the head_dim of q")
    require(q.stride(1) == q.size(2), "q", "heads must be dense (stride(1) == head_dim)")
    require(k.stride(1) == k.size(2), "k", "heads must be dense (stride(1) == head_dim)")
    require_ids(positions, "positions", dtype=torch.int64, shape=(q.size(0),))
    require(cos_sin.dtype == torch.float32, "cos_sin", "must be float32")
    require(cos_sin.dim() == 3 and cos_sin.size(1) == 2, "cos_sin", "must be [positions, 2, half]")
    require(cos_sin.is_contiguous(), "cos_sin", "must be contiguous")
    require(2 * cos_sin.size(2) <= q.size(2), "cos_sin", "half must be at most head_dim / 2")
