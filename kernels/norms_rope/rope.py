"""rope: rotate queries and keys by their positions, in place (Hugging Face's "rotate half").

formula  with half = rotary_dim / 2, angle a = position * inv_freq[i], for i in [0, half):
         x[i]        := x[i] * cos(a) - x[i + half] * sin(a)
         x[i + half] := x[i + half] * cos(a) + x[i] * sin(a)
shapes   q          [tokens, heads, head_dim]      floats (float32, bfloat16 or float16),
                                                   last two dimensions dense
         k          [tokens, kv_heads, head_dim]   same dtype
         positions  [tokens]                       int64, each in [0, positions_max)
         cos_sin    [positions_max, 2, half]       float32, times the attention scaling of yarn;
                    half <= head_dim / 2, dimensions beyond 2 * half stay as they are
writes   q and k in place; views of one fused qkv tensor are welcome
         a position outside the table is an IndexError on a CPU; a GPU, which cannot stop for it,
         leaves that token as it is
cost     reads and writes every rotated element once; memory bound
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch, jit, native
from kernels.checks import require, require_float, require_ids, require_like
from kernels.jit import constexpr, pointer, scalar, stride, tl


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


@jit.compiled
def _rope_kernel(
    q: pointer,
    k: pointer,
    positions: pointer,
    cos_sin: pointer,
    positions_max: scalar,
    q_stride: stride,
    k_stride: stride,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    HEAD_DIM: constexpr,
    HALF: constexpr,
    HEADS_TILE: constexpr,
    HALF_TILE: constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    # Tiles of q's heads come first, then those of k's.
    q_tiles = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    tile = tl.program_id(1)
    is_q = tile < q_tiles
    start = tl.where(is_q, q + token * q_stride, k + token * k_stride)
    first_head = tl.where(is_q, tile, tile - q_tiles) * HEADS_TILE
    head = (first_head + tl.arange(0, HEADS_TILE))[:, None]
    dim = tl.arange(0, HALF_TILE)[None, :]
    position = tl.load(positions + token)
    is_known = (position >= 0) & (position < positions_max)
    is_in = (head < tl.where(is_q, HEADS, KV_HEADS)) & (dim < HALF) & is_known
    table = cos_sin + position * (2 * HALF) + dim
    cos = tl.load(table, mask=(dim < HALF) & is_known, other=0.0)
    sin = tl.load(table + HALF, mask=(dim < HALF) & is_known, other=0.0)
    at = start + head * HEAD_DIM + dim
    first = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_in, other=0.0).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(q.dtype.element_ty), mask=is_in)
    tl.store(at + HALF, (second * cos + first * sin).to(q.dtype.element_ty), mask=is_in)


_HEADS_TILE = 8


def _rope_triton(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    (tokens, heads, head_dim), kv_heads, half = q.shape, k.size(1), cos_sin.size(2)
    if tokens == 0 or half == 0:
        return
    tiles = -(-heads // _HEADS_TILE) + -(-kv_heads // _HEADS_TILE)
    _rope_kernel[(tokens, tiles)](
        q,
        k,
        positions,
        cos_sin,
        cos_sin.size(0),
        q.stride(0),
        k.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS_TILE=_HEADS_TILE,
        HALF_TILE=jit.power_of_two(half),
    )


_PATHS = {"triton": _rope_triton, "native": _rope_native, "torch": rope_reference}


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate `q`, `k` in place; outside the table: IndexError before any write, or as they are."""
    check_rope(q, k, positions, cos_sin)
    _PATHS[dispatch.path_for(q)](q, k, positions, cos_sin)


def check_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Shared with the fused kernel."""
    require_float(q, "q", dim=3)
    require_float(k, "k", dim=3)
    require_like(k, q, "k", "q")
    tokens, _, head_dim = q.shape
    k_tokens, _, k_head_dim = k.shape
    require(k_tokens == tokens, "k", "must have as many tokens as q")
    require(k_head_dim == head_dim, "k", "must have the head_dim of q")
    require(q.stride()[1] == head_dim, "q", "heads must be dense (stride(1) == head_dim)")
    require(k.stride()[1] == head_dim, "k", "heads must be dense (stride(1) == head_dim)")
    require_ids(positions, "positions", dtype=torch.int64, shape=(tokens,))
    require(cos_sin.dtype == torch.float32, "cos_sin", "must be float32")
    require(cos_sin.dim() == 3 and cos_sin.shape[1] == 2, "cos_sin", "must be [positions, 2, half]")
    require(cos_sin.is_contiguous(), "cos_sin", "must be contiguous")
    require(2 * cos_sin.shape[2] <= head_dim, "cos_sin", "half must be at most head_dim / 2")
