"""decode_attention: of rows with one token each, from their projection to attention's result.

formula  q, k := norm of each head, if the model has that; rope; k and v to their slots; then
         paged_attention: rope_write_kv and paged_attention, one after the other
shapes   q                [rows, heads, head_dim]      floats (float32, bfloat16 or float16),
         k, v             [rows, kv_heads, head_dim]   last two dimensions dense, views are welcome
         query_starts     [rows + 1] int32: a row has one token, or none and no context; the tokens
                          of those that have one stand side by side
         else as in rope_write_kv and paged_attention; a token is at position context - 1
returns  [rows, heads, head_dim]; of rows without a token anything
writes   k_pages and v_pages; q and k: anything
triton   `decode_kernel`: one launch, where the parts are two, or three where contexts may be longer
         than a split. A row's bits do not depend on its batch-mates or timing; those of
         the norm of heads may differ from rope_write_kv's in their last one, as sums have another
         order
cost     as paged_attention: reads 2 * context * kv_heads * head_dim elements per row
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.attention.decode_kernel import decode_kernel
from kernels.attention.paged_attention import (
    HEAD_DIM_MAX,
    check_attention,
    paged_attention,
    paged_attention_reference,
)
from kernels.attention.parts import dim_tile
from kernels.attention.plan import PARTS_MAX, SHORT_TILE, SPLIT, TASK, AttentionPlan
from kernels.attention.triton_launch import PARTS_AT_ONCE, Tiling, parts_for, short_tiling
from kernels.checks import require
from kernels.kv import fp8
from kernels.kv.rope_write_kv import check_rope_write_kv, rope_write_kv, rope_write_kv_reference


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    query_starts: Tensor, context_lengths: Tensor, scale: float,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    plan: AttentionPlan | None = None, scales: Tensor | None = None,
    *, window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The definition of correct: one after the other."""
    pages = k_pages, v_pages
    q = rope_write_kv_reference(
        q, k, v, positions, cos_sin, *pages, slot_mapping, q_norm, k_norm, eps, scales
    )
    rows = block_tables, query_starts, context_lengths
    return paged_attention_reference(
        q, *pages, *rows, scale, plan, scales, window=window, softcap=softcap
    )


IN_ONE_GROUP_MAX: Final = 16
# So many rows leave programs to spare, and a program alone waits for what it reads: more of it is
# on its way, where more programs would fill each other's pauses. Of 16 rows of 1k a step of qwen3
# 0.6b takes 6 % less so, too, but attention of 16 rows of 2k, which are more tasks than programs
# then, a seventh more.
FEW_ROWS: Final = 8


def decode_tiling(q: Tensor, *, is_fp8: bool) -> Tiling:
    """As short rows of other steps, of which a row's bits are those; float32, without tensor cores,
    spills with fewer warps. Timed on an H200 (docs/benchmarks.md).
    """
    tiling = short_tiling(q, is_fp8=is_fp8)
    if q.dtype == torch.float32:
        return tiling._replace(warps=8, programs=2, registers=128)
    if is_fp8:
        return tiling
    if q.size(2) > 128:
        # What a part is written by takes as much memory as a tile.
        return tiling._replace(programs=6 if jit.is_sm_90(q.device) else 4)
    is_few = len(q) <= FEW_ROWS and jit.is_sm_90(q.device)
    return tiling._replace(stages=5, programs=6) if is_few else tiling._replace(stages=3)


def tasks_wanted(weight: Tensor, *, heads: int, kv_heads: int, head_dim: int) -> int | None:
    """Of a plan for decode_attention with such heads, of the dtype and on the device of `weight`:
    two for each program; None where it is no launch of its own.
    """
    if not _is_in_one(heads, kv_heads, head_dim):
        return None
    q = weight.new_empty((FEW_ROWS + 1, heads, head_dim))
    programs = decode_tiling(q, is_fp8=False).programs
    return max(1, 2 * jit.programs(weight.device, programs) // kv_heads)


def _is_in_one(heads: int, kv_heads: int, head_dim: int) -> bool:
    # Of more heads to a key, tiles of twice the lines for that key's spill.
    return head_dim <= HEAD_DIM_MAX and heads // kv_heads <= IN_ONE_GROUP_MAX


def _decode_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    query_starts: Tensor, context_lengths: Tensor, scale: float,
    norms: tuple[Tensor, Tensor] | None, eps: float,
    plan: AttentionPlan, scales: Tensor | None, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    (tokens, heads, head_dim), (_, kv_heads, block_size, _) = q.shape, k_pages.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    group, is_fp8 = heads // kv_heads, scales is not None
    rows = len(context_lengths)
    parts = parts_for(plan, q, rows=rows, kv_heads=kv_heads)
    tiling = decode_tiling(q, is_fp8=is_fp8)
    group_tile = jit.power_of_two(group)
    # A line for the key, beside those for the heads.
    query_tile = max(SHORT_TILE, jit.power_of_two(group + 1))
    q_norm, k_norm = norms or (q, k)
    decode_kernel[(jit.programs(q.device, tiling.programs),)](
        q, k, v, q_norm, k_norm, cos_sin, slot_mapping,
        fp8.as_bytes(k_pages), fp8.as_bytes(v_pages), out,
        parts.short.sums, parts.short.tops, parts.short.totals, parts.arrived,
        parts.short.tops if scales is None else scales,
        block_tables, plan.short.table, plan.short.total, plan.short.kept_starts,
        block_tables.stride(0), cos_sin.size(0), k_pages.size(0) * block_size, eps,
        scale * math.log2(math.e), window or 0, softcap or 0.0,
        q.stride(0), k.stride(0), v.stride(0),
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, HALF=cos_sin.size(2),
        BLOCK_SIZE=block_size, DIM_TILE=dim_tile(head_dim), QUERY_TILE=query_tile,
        POSITIONS=tiling.positions, SPLIT=SPLIT, PARTS_MAX=PARTS_MAX, TASK=TASK,
        GROUP_TILE=group_tile, PARTS_AT_ONCE=max(1, PARTS_AT_ONCE // group_tile),
        NORMS=norms is not None,
        WIDENS=q.dtype == torch.float32 if is_fp8 else jit.is_widened(q), IS_FP8=is_fp8,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        **jit.neighbourly(q.device),
        num_warps=tiling.warps, num_stages=tiling.stages, maxnreg=tiling.registers,
    )  # fmt: skip
    return out


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    query_starts: Tensor, context_lengths: Tensor, scale: float,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
    plan: AttentionPlan | None = None, scales: Tensor | None = None,
    *, window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one token a row; its key and value are in their pages afterwards.

    With a `plan`, of these very rows and made for queries_max = 1, and IN_ONE_GROUP_MAX heads to a
    key at most, the Triton path is one launch; else it is the parts.
    """
    check_rope_write_kv(
        q, k, v, positions, cos_sin, k_pages, v_pages, slot_mapping, q_norm, k_norm, scales
    )
    check_attention(q, k_pages, v_pages, block_tables, query_starts, context_lengths)
    require(window is None or window >= 1, "window", "must be at least 1")
    require(softcap is None or softcap > 0, "softcap", "must be above 0")
    rows = block_tables, query_starts, context_lengths
    is_in_one = _is_in_one(q.shape[1], k.shape[1], q.shape[2])
    if plan is not None and is_in_one and dispatch.path_for(q) == "triton":
        require(plan.is_decode, "plan", "must be of one token a row")
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        return _decode_attention_triton(
            q, k, v, cos_sin, k_pages, v_pages, slot_mapping, *rows, scale,
            norms, eps, plan, scales, window, softcap,
        )  # fmt: skip
    pages = k_pages, v_pages
    q = rope_write_kv(
        q, k, v, positions, cos_sin, *pages, slot_mapping, q_norm, k_norm, eps, scales
    )
    return paged_attention(q, *pages, *rows, scale, plan, scales, window=window, softcap=softcap)
