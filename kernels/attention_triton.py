"""attention_triton: paged attention on a GPU; formula, shapes and arguments as in paged_attention.

formula  A task is a tile of queries against a split of positions (`attention_plan`): with
         top = max of its scores, weights = 2^(score - top), total = sum of weights,
         sums = weights v, the tile of one split writes sums / total; parts of several are added up
         in the order of splits: out = sum of sums * 2^(top - highest)
         over sum of total * 2^(top - highest)
shapes   of parts = splits * tokens * heads (`attention_plan.Parts`):
         sums [parts, dim_tile], tops and totals [parts] float32
cost     as paged_attention; a launch for short rows and one for long ones, and after each one more
         if a row may be split. (That the last program to arrive adds up, without a launch, was
         compiled and dropped: it takes 168 registers to 200 and more, and with them a program of
         each processor.)
after    FlashAttention-2 (Dao 2023: queries outermost, the diagonal apart, one division at the end,
         the scale inside the power), Flash-Decoding (Dao et al. 2023: splits), FlashInfer (Ye et
         al. 2025: the heads of a KV head in a tile, tasks planned once per step) and Triton's
         fused-attention tutorial (tiles)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import fp8, jit
from kernels.attention_plan import (
    LONG_SPLIT,
    SPLIT,
    WIDE_TILE,
    AttentionPlan,
    Parts,
    PartsSize,
    dim_tile,
    plan_attention,
)
from kernels.jit import constexpr, pointer, scalar, stride, tl


@jit.compiled
def _row_of(ends: pointer, rows: scalar, task: scalar) -> scalar:
    """The row with ends[row] <= task < ends[row + 1], by bisection."""
    low = tl.zeros((), tl.int32)
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        is_beyond = tl.load(ends + middle) <= task
        low = tl.where(is_beyond, middle, low)
        high = tl.where(is_beyond, high, middle)
    return low


@jit.compiled
def _places(
    table: pointer, at: scalar, stop: scalar, kv_head: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
) -> pointer:  # fmt: skip
    """First elements of positions at, at + 1, ... in the pages; `at` is a multiple of POSITIONS.

    int64 from the block on: a pool may have more than 2^31 elements.
    """
    if BLOCK_SIZE % POSITIONS == 0:
        # One page holds them all, one after the other.
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        first = (block * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
        place = first * HEAD_DIM + tl.arange(0, POSITIONS) * HEAD_DIM
    else:
        position = at + tl.arange(0, POSITIONS)
        block = tl.load(table + position // BLOCK_SIZE, mask=position < stop, other=0).to(tl.int64)
        row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        place = row * HEAD_DIM
    return place


@jit.compiled
def _fetched(
    at: pointer, is_there: pointer, is_dim: pointer,
    MASKED: constexpr, PADDED: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
) -> pointer:  # fmt: skip
    """A tile of keys or values, as they are multiplied."""
    if MASKED:
        tile = tl.load(at, mask=is_there & is_dim, other=0.0)
    elif PADDED:
        tile = tl.load(at, mask=is_dim, other=0.0)
    else:
        tile = tl.load(at)
    if IS_FP8:
        tile = fp8.decoded(tile)
    if WIDENS:
        tile = tile.to(tl.float32)
    return tile


@jit.compiled
def _walk(
    queries: pointer, by: scalar, k: pointer, v: pointer, table: pointer,
    k_stride: stride, v_stride: stride, kv_head: scalar,
    start: scalar, stop: scalar, last_seen: pointer,
    top: pointer, total: pointer, sums: pointer,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    PAGED: constexpr, MASKED: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
) -> pointer:  # fmt: skip
    """Attend to positions [start, stop) too; without MASKED, to whole tiles that all queries see.

    PAGED: k and v are pages, found by `table`. Otherwise position p lies at k + p * k_stride.
    """
    PADDED: tl.constexpr = queries.shape[1] > HEAD_DIM
    dim = tl.arange(0, queries.shape[1])
    is_dim = dim < HEAD_DIM
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        is_there = position < stop
        if PAGED:
            k_at = _places(table, at, stop, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS)
            v_at = k_at
        else:
            lane, first = tl.arange(0, POSITIONS), tl.zeros((), tl.int64) + at
            k_at, v_at = first * k_stride + lane * k_stride, first * v_stride + lane * v_stride
        if IS_FP8:
            # Decoded in registers, which cannot be turned for nothing.
            keys = _fetched(
                k + k_at[None, :] + dim[:, None], is_there[None, :], is_dim[:, None],
                MASKED, PADDED, WIDENS, IS_FP8,
            )  # fmt: skip
        else:
            keys = tl.trans(_fetched(
                k + k_at[:, None] + dim[None, :], is_there[:, None], is_dim[None, :],
                MASKED, PADDED, WIDENS, IS_FP8,
            ))  # fmt: skip
        scores = tl.dot(queries, keys, input_precision="ieee")
        if MASKED:
            is_seen = is_there[None, :] & (position[None, :] <= last_seen[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * by)
        base = higher
        if MASKED:
            # A query that has seen nothing yet: -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        # One fused multiply-add per score, and none of a query's bits lost to the scale.
        weights = tl.exp2(scores * by - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        values = _fetched(
            v + v_at[:, None] + dim[None, :], is_there[:, None], is_dim[None, :],
            MASKED, PADDED, WIDENS, IS_FP8,
        )  # fmt: skip
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        top = higher
    return top, total, sums


@jit.compiled
def _put(
    out: pointer, sums_out: pointer, tops_out: pointer, totals_out: pointer,
    first_out: scalar, first_kept: scalar, hop: scalar, lines: scalar, split: scalar,
    splits: scalar, top: pointer, total: pointer, sums: pointer,
    GROUP: constexpr, HEADS: constexpr, HEAD_DIM: constexpr,
) -> None:  # fmt: skip
    """Write the tile's result, or of several splits this one's part; parts lie `hop` apart."""
    DIM_TILE: tl.constexpr = sums.shape[1]
    line, dim = tl.arange(0, sums.shape[0]), tl.arange(0, DIM_TILE)[None, :]
    is_line = line < lines
    is_in = is_line[:, None] & (dim < HEAD_DIM)
    place = (line // GROUP * HEADS + line % GROUP).to(tl.int64)
    if splits == 1:
        # A line that is no query may have no total.
        mixed = sums / tl.where(is_line, total, 1.0)[:, None]
        to = out + (first_out + place)[:, None] * HEAD_DIM + dim
        tl.store(to, mixed.to(out.dtype.element_ty), mask=is_in)
    else:
        at = first_kept + place + split * hop
        tl.store(tops_out + at, top, mask=is_line)
        tl.store(totals_out + at, total, mask=is_line)
        tl.store(sums_out + at[:, None] * DIM_TILE + dim, sums, mask=is_in)


@jit.compiled
def _attended(
    queries: pointer, by: scalar, k_pages: pointer, v_pages: pointer, k: pointer, v: pointer,
    table: pointer, begin: scalar, kv_head: scalar, seen: scalar, first: scalar, token: pointer,
    start: scalar, stop: scalar, has_own: scalar, k_stride: stride, v_stride: stride,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    IS_WIDE: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
) -> pointer:  # fmt: skip
    """(highest score, sum of weights, weighted values) of a tile over positions [start, stop)."""
    top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    sums = tl.zeros(queries.shape, tl.float32)
    if IS_WIDE:
        # start ... own_stop ... middle ... stop: of the step's own tensors, of pages, masked.
        seen_by_all = tl.maximum(tl.minimum(stop, seen + first + 1) - start, 0)
        middle = start + seen_by_all // POSITIONS * POSITIONS
        if not IS_FP8:
            is_own = (seen == 0) & (has_own > 0)
            own, own_stop = begin.to(tl.int64), tl.where(is_own, middle, start)
            top, total, sums = _walk(
                queries, by, k + own * k_stride + kv_head * HEAD_DIM,
                v + own * v_stride + kv_head * HEAD_DIM, table, k_stride, v_stride, kv_head,
                start, own_stop, token, top, total, sums,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, False, False, WIDENS, IS_FP8,
            )  # fmt: skip
            start = own_stop
        top, total, sums = _walk(
            queries, by, k_pages, v_pages, table, k_stride, v_stride, kv_head,
            start, middle, token, top, total, sums,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, True, False, WIDENS, IS_FP8,
        )  # fmt: skip
        start = middle
    return _walk(
        queries, by, k_pages, v_pages, table, k_stride, v_stride, kv_head,
        start, stop, seen + token, top, total, sums,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, True, True, WIDENS, IS_FP8,
    )  # fmt: skip


@jit.compiled
def _attend_kernel(
    q: pointer, k_pages: pointer, v_pages: pointer, k: pointer, v: pointer, out: pointer,
    sums_out: pointer, tops_out: pointer, totals_out: pointer, scales: pointer,
    block_tables: pointer, query_starts: pointer, context_lengths: pointer,
    ends: pointer, kept_starts: pointer,
    rows: scalar, kept_tokens: scalar, has_own: scalar, table_stride: scalar, scale_log2: scalar,
    q_stride: stride, k_stride: stride, v_stride: stride,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr,
    DIM_TILE: constexpr, QUERY_TILE: constexpr, POSITIONS: constexpr, SPLIT: constexpr,
    IS_WIDE: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
) -> None:  # fmt: skip
    """Tasks of the short rows or of the long ones, as `ends` counts them, of every KV head."""
    TOKENS: tl.constexpr = QUERY_TILE // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    dim, line = tl.arange(0, DIM_TILE)[None, :], tl.arange(0, QUERY_TILE)
    items = tl.load(ends + rows) * KV_HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        task, kv_head = item // KV_HEADS, item % KV_HEADS
        row = _row_of(ends, rows, task)
        begin = tl.load(query_starts + row)
        count = tl.load(query_starts + row + 1) - begin
        context = tl.load(context_lengths + row)
        row_splits = (context + SPLIT - 1) // SPLIT
        index = task - tl.load(ends + row)
        # Last tiles first: they see the most, and the shortest even out the end.
        first = ((count + TOKENS - 1) // TOKENS - 1 - index // row_splits) * TOKENS
        #  0 ... seen        first ... first + TOKENS ... context      positions, from seen on
        #  | start ... stop                                            this step's query tokens
        seen, split = context - count, index % row_splits
        tile_stop = seen + tl.minimum(count, first + TOKENS)
        start = split * SPLIT
        stop = tl.minimum(tile_stop, start + SPLIT)
        if start < stop:
            token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
            is_query = (line < TOKENS * GROUP) & (token < count)
            query = (begin + token).to(tl.int64)
            at = (query * q_stride + head * HEAD_DIM)[:, None] + dim
            queries = tl.load(q + at, mask=is_query[:, None] & (dim < HEAD_DIM), other=0.0)
            by = scale_log2
            if WIDENS:
                queries = queries.to(tl.float32)
            if IS_FP8:
                # Codes are read as float16 of a 256th; float32 stays what it is.
                queries = queries if WIDENS else queries.to(tl.float16)
                by = scale_log2 * (256.0 * tl.load(scales + kv_head))
            top, total, sums = _attended(
                queries, by, k_pages, v_pages, k, v, block_tables + row.to(tl.int64) * table_stride,
                begin, kv_head, seen, first, token, start, stop, has_own, k_stride, v_stride,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, IS_WIDE, WIDENS, IS_FP8,
            )  # fmt: skip
            if IS_FP8:
                sums *= 256.0 * tl.load(scales + KV_HEADS + kv_head)
            kept_start = tl.load(kept_starts + row) + first
            _put(
                out, sums_out, tops_out, totals_out,
                (begin + first).to(tl.int64) * HEADS + kv_head * GROUP,
                kept_start.to(tl.int64) * HEADS + kv_head * GROUP, kept_tokens.to(tl.int64) * HEADS,
                tl.minimum(TOKENS, count - first) * GROUP, split, (tile_stop + SPLIT - 1) // SPLIT,
                top, total, sums, GROUP, HEADS, HEAD_DIM,
            )  # fmt: skip


@jit.compiled
def _combined(
    out: pointer, sums: pointer, tops: pointer, totals: pointer,
    first_out: scalar, first_kept: scalar, hop: scalar, splits: scalar,
    GROUP: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr,
    LINES: constexpr, SPLITS: constexpr,
) -> None:  # fmt: skip
    """One token's heads of a KV head, from their parts in the order of splits."""
    dim, line = tl.arange(0, DIM_TILE), tl.arange(0, LINES)
    is_head = line < GROUP
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DIM_TILE], tl.float32)
    for at in range(0, splits, SPLITS):
        split = at + tl.arange(0, SPLITS)
        part = (first_kept + line)[None, :] + (split * hop)[:, None]
        is_in = (split < splits)[:, None] & is_head[None, :]
        its_top = tl.load(tops + part, mask=is_in, other=float("-inf"))
        its_total = tl.load(totals + part, mask=is_in, other=0.0)
        its_sums = tl.load(
            sums + part[:, :, None] * DIM_TILE + dim[None, None, :],
            mask=is_in[:, :, None] & (dim < HEAD_DIM)[None, None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(its_top, 0))
        # Nothing of the first splits may be seen: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(top - base), tl.exp2(its_top - base[None, :])
        total = total * shrink + tl.sum(its_total * weight, 0)
        mixed = mixed * shrink[:, None] + tl.sum(its_sums * weight[:, :, None], 0)
        top = higher
    mixed /= tl.where(is_head, total, 1.0)[:, None]
    is_in = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    to = out + (first_out + line)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=is_in)


@jit.compiled
def _combine_kernel(
    out: pointer, sums: pointer, tops: pointer, totals: pointer,
    query_starts: pointer, context_lengths: pointer, ends: pointer, kept_starts: pointer,
    kept_tokens: scalar, tile_tokens: scalar, split_positions: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr,
    LINES: constexpr, SPLITS: constexpr,
) -> None:  # fmt: skip
    """Some tokens of a row, of one KV head, if `ends` has the row and it was split."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    begin = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    context = tl.load(context_lengths + row)
    is_here = (tl.load(ends + row + 1) > tl.load(ends + row)) & (context > split_positions)
    kept_start = tl.load(kept_starts + row)
    for token in range(tl.program_id(2), tl.where(is_here, count, 0), tl.num_programs(2)):
        # As the token's tile saw it.
        seen = context - count + tl.minimum(count, (token // tile_tokens + 1) * tile_tokens)
        splits = (seen + split_positions - 1) // split_positions
        if splits > 1:
            _combined(
                out, sums, tops, totals,
                (begin + token).to(tl.int64) * HEADS + kv_head * GROUP,
                (kept_start + token).to(tl.int64) * HEADS + kv_head * GROUP,
                kept_tokens.to(tl.int64) * HEADS, splits,
                GROUP, HEAD_DIM, DIM_TILE, LINES, SPLITS,
            )  # fmt: skip


class _Tiling(NamedTuple):
    """How a launch uses a processor."""

    # Per step of the loop.
    positions: int
    warps: int
    # The load of a block id, the load of what it points to, and its use. 5 leave two tiles of keys
    # and values on their way while a third is used, which memory-bound short rows need.
    stages: int
    # Persistent programs per processor: as many as fit beside each other, by registers and shared
    # memory; one more would run alone at the end.
    programs: int
    # A thread's at most, where compilers differ: for short rows of heads of 128 Triton 3.6 takes
    # 216 and 3.7 on sm_100 202, where 168 do, and let three programs fit.
    registers: int | None = None


def _tiling(
    q: Tensor, group: int, query_tile: int, block_size: int, *, is_long: bool, is_fp8: bool
) -> _Tiling:
    """The most with which no listed processor spills, for sm_90 and sm_100 (sm_80 holds one less).

    Chosen 2026-11-20 from benchmarks/results/kernels_aot.json; not yet timed on a GPU.
    """
    width = jit.power_of_two(q.size(2))
    if q.dtype == torch.float32:
        return _Tiling(32, 4, 3, 4) if width <= 128 else _Tiling(16, 4, 3, 2)
    if not is_long:
        sizes = {64: (64, 4), 128: (64, 3), 256: (32, 2)}
        positions, programs = sizes[min(256, max(64, width))]
        # Dividing by a group that is no power of two costs registers, a program's worth.
        is_odd = group != jit.power_of_two(group)
        programs = min(programs, 2) if is_odd and width == 128 else programs
        # Told so, reading codes or pages as large as a tile spills; it takes 168 untold.
        is_told = programs == 3 and not is_fp8 and block_size < 64
        return _Tiling(positions, 4, 5, programs, 168 if is_told else None)
    if query_tile == WIDE_TILE:
        # Two groups of four warps, the least that the matrix units of sm_90 take. 128 positions
        # spill.
        return _Tiling(64, 8, 3, 1)
    if width > 128:
        return _Tiling(32, 8, 3, 1)
    # So it does here, and so do reading codes and, on sm_100, pages as large as a tile: too many
    # beside 64 long rows.
    is_dear = is_fp8 or group != jit.power_of_two(group) or block_size >= 64
    return _Tiling(32 if is_dear and width > 64 else 64, 4, 3, 2)


# Parts that a program adds up at once, and programs that share the tokens of a long row.
_PARTS_AT_ONCE = 32
_TOKENS_APART = 16


def _combine(
    out: Tensor,
    parts: Parts,
    row_tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    kept_tokens: int,
    tile_tokens: int,
    split: int,
    sizes: dict[str, int],
    share: int,
) -> None:
    """Add up the parts of a launch; `share` programs go through a row's tokens."""
    group, rows = sizes["GROUP"], len(row_tensors[1])
    heads_tile = jit.power_of_two(group)
    _combine_kernel[(rows, sizes["KV_HEADS"], share)](
        out, parts.sums, parts.tops, parts.totals, *row_tensors, kept_tokens, tile_tokens, split,
        **sizes, LINES=heads_tile, SPLITS=max(1, _PARTS_AT_ONCE // heads_tile),
        # With four, what dividing by the group takes spills on sm_80.
        num_warps=4 if heads_tile == group else 8,
    )  # fmt: skip


def paged_attention_triton(
    q: Tensor, k_pages: Tensor, v_pages: Tensor,
    block_tables: Tensor, query_starts: Tensor, context_lengths: Tensor, scale: float,
    plan: AttentionPlan | None = None, scales: Tensor | None = None,
    own: tuple[Tensor, Tensor] | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `paged_attention.paged_attention`, of arguments that it has checked."""
    (tokens, heads, head_dim), rows = q.shape, len(context_lengths)
    _, kv_heads, block_size, _ = k_pages.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    group = heads // kv_heads
    if plan is None:
        plan = plan_attention(
            query_starts, context_lengths, group=group, dtype=q.dtype, head_dim=head_dim,
            queries_max=tokens, context_max=block_tables.size(1) * block_size,
        )  # fmt: skip
    size = PartsSize.of(
        plan, rows=rows, tokens=tokens, kv_heads=kv_heads, group=group, head_dim=head_dim,
        positions=block_tables.size(1) * block_size,
    )  # fmt: skip
    parts = Parts.of(size, q.device) if plan.parts is None else plan.parts
    parts.require_room(size)
    # With fp8 pages 16-bit queries are float16 in the kernel.
    is_fp8 = scales is not None
    widens = q.dtype == torch.float32 if is_fp8 else jit.is_widened(q)
    k, v = (q, q) if own is None or is_fp8 else own

    sizes = {
        "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "DIM_TILE": dim_tile(head_dim)
    }  # fmt: skip

    def attend(
        ends: Tensor, kept_starts: Tensor, kept_tokens: int, query_tile: int, *, is_long: bool
    ) -> None:
        split = LONG_SPLIT if is_long else SPLIT
        tiling = _tiling(q, group, query_tile, block_size, is_long=is_long, is_fp8=is_fp8)
        _attend_kernel[(jit.programs(q.device, tiling.programs),)](
            q, fp8.as_bytes(k_pages), fp8.as_bytes(v_pages), k, v, out,
            parts.sums, parts.tops, parts.totals, parts.tops if scales is None else scales,
            block_tables, query_starts, context_lengths, ends, kept_starts,
            rows, kept_tokens, int(k is not q), block_tables.stride(0), scale * math.log2(math.e),
            q.stride(0), k.stride(0), v.stride(0),
            **sizes, BLOCK_SIZE=block_size,
            QUERY_TILE=query_tile, POSITIONS=tiling.positions, SPLIT=split,
            IS_WIDE=query_tile == WIDE_TILE, WIDENS=widens, IS_FP8=is_fp8,
            num_warps=tiling.warps, num_stages=tiling.stages, maxnreg=tiling.registers,
        )  # fmt: skip
        if size.positions > split:
            share = _TOKENS_APART if is_long else 1
            row_tensors = query_starts, context_lengths, ends, kept_starts
            _combine(out, parts, row_tensors, kept_tokens, query_tile // group, split, sizes, share)

    attend(plan.short_ends, plan.short_starts, size.short_tokens, plan.short_tile, is_long=False)
    if plan.has_long:
        attend(plan.long_ends, query_starts, tokens, plan.long_tile, is_long=True)
    return out
