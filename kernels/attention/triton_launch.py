"""triton_launch: the kernels of `triton_kernels` launched for a step: two launches, or four.

shapes   as in paged_attention
cost     a launch for short rows and one for long ones, and after each one that adds up parts, if
         any context is longer than a split; on CUDA those of long rows are beside those of short
         ones, on a stream of their own: the ones wait for memory, the others multiply
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import jit, variants
from kernels.attention.parts import Kept, Parts, dim_tile
from kernels.attention.plan import (
    LONG_ALIKE,
    LONG_SPLIT,
    PARTS_MAX,
    SPLIT,
    TASK,
    AttentionPlan,
    Tasks,
    parts_size,
    plan_attention,
)
from kernels.attention.triton_kernels import attend_kernel, combine_kernel
from kernels.checks import refuse
from kernels.kv import fp8


class Tiling(NamedTuple):
    """How a launch uses a processor."""

    # Per step of the loop.
    positions: int
    warps: int
    # The load of a block id, the load of what it points to, and its use. One more has the next tile
    # of keys and values on its way while one is used.
    stages: int
    # Persistent programs per processor: as many as fit beside each other, by registers and shared
    # memory; one more would run alone at the end.
    programs: int
    # A thread's at most, where compilers differ.
    registers: int | None = None


def short_tiling(q: Tensor, *, is_fp8: bool) -> Tiling:
    """Of short rows, whose time is that of reading their keys and values; of the same positions in
    steps that only decode and in others, so that a row's bits are the same in both.

    Timed on an H200 (docs/benchmarks.md): one warp has all 16 lines of a tile, of which a second
    repeats the work, and small programs fill each other's pauses; beside long rows fewer of them
    have a place, and each has more on its way.
    """
    width = max(64, jit.power_of_two(q.size(2)))
    if q.dtype == torch.float32:
        return Tiling(32, 4, 3, 4) if width <= 128 else Tiling(16, 4, 3, 2)
    if is_fp8:
        return Tiling(max(16, 4096 // width), 1, 5, 8)
    if width > 128:
        return Tiling(16, 1, 3, 8) if jit.is_sm_90(q.device) else Tiling(16, 2, 3, 6, 168)
    return Tiling(2048 // width, 1, 5 if jit.is_sm_90(q.device) else 3, 8)


def long_tiling(q: Tensor, group: int, block_size: int, *, is_fp8: bool) -> Tiling:
    """Of long rows: the most with which no listed processor spills, timed on an H200."""
    width = jit.power_of_two(q.size(2))
    if q.dtype == torch.float32:
        return Tiling(32, 4, 3, 4) if width <= 128 else Tiling(16, 4, 3, 2)
    if width > 128:
        return Tiling(32, 8, 3, 1)
    # So it does with twice the positions, and with these where codes are read, on sm_100 also from
    # pages as large as a tile: too many registers beside 64 long rows.
    is_dear = is_fp8 or group != jit.power_of_two(group) or block_size >= 64
    return Tiling(32 if is_dear and width > 64 else 64, 4, 3, 2)


def reads_whole_tiles(q: Tensor) -> bool:
    """Whether long rows read without masks what all queries see: elsewhere two walks spill."""
    return q.dtype != torch.float32 and q.size(2) <= 128 and jit.is_sm_90(q.device)


# Parts that a program adds up at once, and programs that share the tokens of a long row.
PARTS_AT_ONCE = 32
_TOKENS_APART = 16
# And the long rows of a step. A recorded step launches for all that it may hold, which is as many
# rows as there are slots: 256 of 8 KV heads were 32,768 programs in each layer, mostly for nothing.
_ROWS_APART = 16


def _combine(
    out: Tensor,
    parts: Kept,
    row_tensors: tuple[Tensor, Tensor, Tensor],
    tile_tokens: int,
    window: int,
    sizes: dict[str, int],
    *,
    is_long: bool,
) -> None:
    """Add up the parts of a launch."""
    group, rows = sizes["GROUP"], len(row_tensors[1])
    heads_tile, is_full = (
        jit.power_of_two(group),
        sizes["HEAD_DIM"] == sizes["DIM_TILE"] or not is_long,
    )
    grid = (min(rows, _ROWS_APART), sizes["KV_HEADS"], _TOKENS_APART)
    combine_kernel[grid if is_long else (rows, sizes["KV_HEADS"], 1)](
        out, parts.sums, parts.tops, parts.totals, *row_tensors, rows, tile_tokens, window,
        **sizes, LINES=heads_tile, SPLITS=max(1, PARTS_AT_ONCE // heads_tile), IS_LONG=is_long,
        SPLIT=LONG_SPLIT if is_long else SPLIT, PARTS_MAX=PARTS_MAX, ALIKE=LONG_ALIKE,
        # With four, what dividing by the group takes spills on sm_80, and so do heads of 256, and
        # on sm_90 long rows of heads that leave a part of their tile empty.
        num_warps=4 if heads_tile == group and sizes["DIM_TILE"] <= 128 and is_full else 8,
    )  # fmt: skip


def parts_for(plan: AttentionPlan, q: Tensor, *, rows: int, kv_heads: int) -> Parts:
    """The plan's own room, or some of this call alone. ValueError if it is too small."""
    tokens, heads, head_dim = q.shape
    size = parts_size(
        plan, rows=rows, tokens=tokens, kv_heads=kv_heads, group=heads // kv_heads,
        head_dim=head_dim,
    )  # fmt: skip
    parts = Parts.of(size, q.device) if plan.parts is None else plan.parts
    parts.require_room(size)
    return parts


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all launches on the device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _beside(
    plan: AttentionPlan, parts: Parts, device: torch.device
) -> Iterator[AbstractContextManager[object]]:
    """Long rows are launched inside of what it gives, and short ones outside of that.

    Where they do not take turns that is a stream beside the current one, which is behind all that
    the current one was given before, and is joined again in the end. The join suffices for all
    that both use: neither writes what the other reads or writes, as tokens of the result and room
    for parts are the one's or the other's; and whatever comes later on the current stream, be it
    the next layer or somebody who was given memory that is free again, is behind the join. So
    tensors that were allocated on the current stream before, and are let go of afterwards, need no
    `record_stream`; nothing may be allocated inside. A graph that records the current stream
    takes fork and join as edges between its kernels.
    """
    is_wanted = variants.is_on("chunks-beside-decodes") and parts.are_apart
    if not (is_wanted and plan.has_long and plan.has_short and _has_streams(device)):
        yield nullcontext()
        return
    here, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(here)
    try:
        yield torch.cuda.stream(side)
    finally:
        here.wait_stream(side)


def paged_attention_triton(
    q: Tensor, k_pages: Tensor, v_pages: Tensor,
    block_tables: Tensor, query_starts: Tensor, context_lengths: Tensor, scale: float,
    plan: AttentionPlan | None = None, scales: Tensor | None = None,
    own: tuple[Tensor, Tensor] | None = None, out: Tensor | None = None,
    *, window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """As `paged_attention.paged_attention`, of arguments that it has checked."""
    (tokens, heads, head_dim), rows = q.shape, len(context_lengths)
    _, kv_heads, block_size, _ = k_pages.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if tokens == 0:
        return out
    group = heads // kv_heads
    if plan is None:
        plan = plan_attention(
            query_starts, context_lengths, tokens=tokens, group=group, dtype=q.dtype,
            context_max=block_tables.size(1) * block_size,
        )  # fmt: skip
    elif plan.has_wide_tasks:
        refuse("plan", "must have tasks of one split")
    parts = parts_for(plan, q, rows=rows, kv_heads=kv_heads)
    # With fp8 pages 16-bit queries are float16 in the kernel.
    is_fp8 = scales is not None
    widens = q.dtype == torch.float32 if is_fp8 else jit.is_widened(q)
    k, v = (q, q) if own is None or is_fp8 else own
    sizes = {
        "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "DIM_TILE": dim_tile(head_dim)
    }  # fmt: skip

    def attend(tasks: Tasks, kept: Kept, query_tile: int, *, is_long: bool) -> None:
        split, tiling = SPLIT, short_tiling(q, is_fp8=is_fp8)
        if is_long:
            split, tiling = LONG_SPLIT, long_tiling(q, group, block_size, is_fp8=is_fp8)
        attend_kernel[(jit.programs(q.device, tiling.programs),)](
            q, fp8.as_bytes(k_pages), fp8.as_bytes(v_pages), k, v, out,
            kept.sums, kept.tops, kept.totals, kept.tops if scales is None else scales,
            block_tables, tasks.table, tasks.total,
            int(k is not q), block_tables.stride(0), scale * math.log2(math.e),
            window or 0, softcap or 0.0, q.stride(0), k.stride(0), v.stride(0),
            **sizes, BLOCK_SIZE=block_size,
            QUERY_TILE=query_tile, POSITIONS=tiling.positions, SPLIT=split, TASK=TASK,
            IS_LONG=is_long, HAS_WHOLE=is_long and reads_whole_tiles(q),
            WIDENS=widens, IS_FP8=is_fp8,
            HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
            num_warps=tiling.warps, num_stages=tiling.stages, maxnreg=tiling.registers,
        )  # fmt: skip
        if plan.context_max > (split if is_long else split + split // 2 - 1):
            row_tensors = query_starts, context_lengths, tasks.kept_starts
            _combine(
                out, kept, row_tensors, query_tile // group, window or 0, sizes, is_long=is_long
            )

    with _beside(plan, parts, q.device) as on_its_stream:
        if plan.has_long:
            with on_its_stream:
                attend(plan.long, parts.long, plan.long_tile, is_long=True)
        if plan.has_short:
            attend(plan.short, parts.short, plan.short_tile, is_long=False)
    return out
