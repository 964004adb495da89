"""paged_attention: one varlen causal pass over paged keys and values, decode and prefill alike.

formula  softmax(scale * q k^T over positions [0, p]) v    for a query token at position p
         row r owns query tokens [query_starts[r], query_starts[r+1]); its query i is at position
         p = context_lengths[r] - (query_starts[r+1] - query_starts[r]) + i
                 0 ............ done | ........ this step ........
                 [------------ all in the pages (write_kv) --------]   context_lengths[r] = the end
shapes   q                [tokens, heads, head_dim]   floats (float32, bfloat16 or float16),
                          last two dimensions dense
         k_pages, v_pages [blocks, kv_heads, block_size, head_dim]   same dtype, contiguous;
                          heads is a multiple of kv_heads
                          or fp8 (kernels.fp8), then with scales [2, kv_heads] float32
         block_tables     [rows, blocks_max] int32; entries beyond a row's context are not read
         query_starts     [rows + 1] int32, ascending from 0 to tokens
         context_lengths  [rows] int32, this step's tokens included
returns  [tokens, heads, head_dim], same dtype
math     scores, softmax and sums in float32; the compiled path rounds the softmax's weights to
         bfloat16 where keys and values are, and sums what it rounded
triton   tasks of `attention_plan` over persistent programs: all heads of a KV head in one tile, so
         that keys and values are read once; short rows leave partial sums per split, which a second
         kernel adds in the order of splits. A token's bits do not depend on batch-mates or timing.
cost     reads 2 * context * kv_heads * head_dim elements per row (memory bound in decode);
         4 * heads * head_dim multiply-adds per (query, position) pair (compute bound in prefill)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import dispatch, fp8, jit, native
from kernels.attention_plan import SPLIT, AttentionPlan, plan_attention
from kernels.checks import require, require_float, require_ids, require_like
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.write_kv import require_pages


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The definition of correct; row by row, so no row can see or disturb another."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_tables[row, : -(-context // k_pages.size(2))]
        k_scale, v_scale = (None, None) if scales is None else scales
        keys = _gather(k_pages, blocks, context, k_scale)
        values = _gather(v_pages, blocks, context, v_scale)
        out[start:end] = _attend(q[start:end], keys, values, scale).to(q.dtype)
    return out


def _gather(pages: Tensor, blocks: Tensor, context: int, scale: Tensor | None) -> Tensor:
    """[kv_heads, context, head_dim] float32 of one row."""
    tiles = fp8.as_bytes(pages).index_select(0, blocks).transpose(0, 1)
    tiles = tiles.reshape(pages.size(1), -1, pages.size(3))[:, :context].view(pages.dtype)
    return tiles.float() if scale is None else fp8.decode(tiles, scale)


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row: q [count, heads, head_dim] against its own context -> same shape, float32."""
    count, heads, head_dim = q.shape
    kv_heads, context, _ = keys.shape
    grouped = q.float().reshape(count, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
    if count > 1:
        last_seen = torch.arange(context - count, context, device=q.device).unsqueeze(1)
        is_future = torch.arange(context, device=q.device) > last_seen
        scores.view(kv_heads, -1, count, context).masked_fill_(is_future, float("-inf"))
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(kv_heads, -1, count, head_dim).permute(2, 0, 1, 3).reshape_as(q)


def _paged_attention_native(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    if scales is not None:
        return _native_over_fp8(
            q, k_pages, v_pages, block_tables, query_starts, context_lengths, scale, scales
        )
    out: Tensor = native.compiled().paged_attention(
        q, k_pages, v_pages, block_tables, query_starts, context_lengths, scale
    )
    return out


def _native_over_fp8(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    scales: Tensor,
) -> Tensor:
    """Row by row over its pages read into float32, which takes no more than the longest row's."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for row, context in enumerate(context_lengths.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_tables[row, : -(-context // k_pages.size(2))]
        out[start:end] = native.compiled().paged_attention(
            q[start:end].float().contiguous(),
            _widened(k_pages, blocks, scales[0]),
            _widened(v_pages, blocks, scales[1]),
            torch.arange(len(blocks), dtype=torch.int32).unsqueeze(0),
            torch.tensor([0, end - start], dtype=torch.int32),
            context_lengths[row : row + 1],
            scale,
        )
    return out


def _widened(pages: Tensor, blocks: Tensor, scale: Tensor) -> Tensor:
    """Some blocks of fp8 pages, as pages in float32."""
    tiles = fp8.as_bytes(pages).index_select(0, blocks).view(pages.dtype)
    return tiles.float().mul_(scale.view(-1, 1, 1))


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
def _span(
    count: scalar, context: scalar, index: scalar, TOKENS: constexpr, SPLIT: constexpr
) -> scalar:
    """(first query token, first position, end of positions) of a row's task."""
    if SPLIT:
        first, start = 0, index * SPLIT
        stop = tl.minimum(context, start + SPLIT)
    else:
        # Last tiles first: they see the most, and the shortest even out the end.
        first, start = ((count + TOKENS - 1) // TOKENS - 1 - index) * TOKENS, 0
        stop = context - count + tl.minimum(count, first + TOKENS)
    return first, start, stop


@jit.compiled
def _walk(
    queries: pointer, k_pages: pointer, v_pages: pointer, table: pointer, kv_head: scalar,
    start: scalar, stop: scalar, last_seen: scalar, scale_log2: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITION_TILE: constexpr,
    WIDENS: constexpr, IS_FP8: constexpr,
) -> pointer:  # fmt: skip
    """Attend to positions [start, stop): (highest score, sum of weights, weighted values)."""
    dim = tl.arange(0, queries.shape[1])
    is_dim = dim < HEAD_DIM
    top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    sums = tl.zeros(queries.shape, tl.float32)
    for at in range(start, stop, POSITION_TILE):
        position = at + tl.arange(0, POSITION_TILE)
        is_there = position < stop
        block = tl.load(table + position // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        # int64 from the block on: a pool may have more than 2^31 elements.
        tile = block * KV_HEADS + kv_head
        place = (tile * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        is_key, is_value = is_there[None, :] & is_dim[:, None], is_there[:, None] & is_dim[None, :]
        keys = tl.load(k_pages + place[None, :] + dim[:, None], mask=is_key, other=0.0)
        values = tl.load(v_pages + place[:, None] + dim[None, :], mask=is_value, other=0.0)
        if IS_FP8:
            keys, values = fp8.decoded(keys), fp8.decoded(values)
        if WIDENS:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale_log2
        is_seen = is_there[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        top = higher
    return top, total, sums


@jit.compiled
def _attend_kernel(
    q: pointer, k_pages: pointer, v_pages: pointer, out: pointer,
    sums_out: pointer, tops_out: pointer, totals_out: pointer, scales: pointer,
    block_tables: pointer, query_starts: pointer, context_lengths: pointer, ends: pointer,
    rows: scalar, lines: scalar, table_stride: scalar, scale_log2: scalar, q_stride: stride,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr,
    DIM_TILE: constexpr, QUERY_TILE: constexpr, POSITION_TILE: constexpr, SPLIT: constexpr,
    WIDENS: constexpr, IS_FP8: constexpr,
) -> None:  # fmt: skip
    """Tasks of short rows (SPLIT > 0) or of long ones (SPLIT = 0), of every KV head."""
    TOKENS = QUERY_TILE // GROUP
    dim, line = tl.arange(0, DIM_TILE), tl.arange(0, QUERY_TILE)
    items = tl.load(ends + rows) * KV_HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        task, kv_head = item // KV_HEADS, item % KV_HEADS
        row = _row_of(ends, rows, task)
        begin = tl.load(query_starts + row)
        count = tl.load(query_starts + row + 1) - begin
        context = tl.load(context_lengths + row)
        #  0 ........ start ...... stop ...... context        positions
        #                     first, first + 1 ...            query tokens of the row's step
        index = task - tl.load(ends + row)
        first, start, stop = _span(count, context, index, TOKENS, SPLIT)
        token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
        is_query = (line < TOKENS * GROUP) & (token < count)
        is_in = is_query[:, None] & (dim < HEAD_DIM)[None, :]
        query = (begin + token).to(tl.int64)[:, None]
        at = query * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
        queries = tl.load(q + at, mask=is_in, other=0.0)
        if WIDENS:
            queries = queries.to(tl.float32)
        by = scale_log2
        if IS_FP8:
            # Codes are read as float16 of a 256th; float32 stays what it is.
            queries = queries if WIDENS else queries.to(tl.float16)
            by = scale_log2 * (256.0 * tl.load(scales + kv_head))
        top, total, sums = _walk(
            queries, k_pages, v_pages, block_tables + row.to(tl.int64) * table_stride, kv_head,
            start, stop, context - count + token, by,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITION_TILE, WIDENS, IS_FP8,
        )  # fmt: skip
        if IS_FP8:
            sums *= 256.0 * tl.load(scales + KV_HEADS + kv_head)
        if SPLIT and context > SPLIT:
            kept = item * lines + line.to(tl.int64)
            tl.store(tops_out + kept, top, mask=is_query)
            tl.store(totals_out + kept, total, mask=is_query)
            tl.store(sums_out + kept[:, None] * DIM_TILE + dim[None, :], sums, mask=is_in)
        else:
            at = (query * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + dim[None, :]
            tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_in)


@jit.compiled
def _combine_kernel(
    out: pointer, sums_in: pointer, tops_in: pointer, totals_in: pointer,
    query_starts: pointer, ends: pointer, lines: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    DIM_TILE: constexpr, SPLITS_TILE: constexpr,
) -> None:  # fmt: skip
    """One head of one short row that has several splits: their sums, in the order of splits."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    task = tl.load(ends + row)
    splits = tl.load(ends + row + 1) - task
    dim = tl.arange(0, DIM_TILE)
    # A row without several splits has no tokens here: it is long, idle, or already written.
    for token in range(0, tl.where(splits > 1, count, 0)):
        line = token * GROUP + head % GROUP
        # Line of split 0; the next split's is KV_HEADS tiles on.
        start = (task.to(tl.int64) * KV_HEADS + head // GROUP) * lines + line
        top = tl.full((), float("-inf"), tl.float32)
        for at in range(0, splits, SPLITS_TILE):
            split = at + tl.arange(0, SPLITS_TILE)
            kept = start + split * (KV_HEADS * lines)
            tops = tl.load(tops_in + kept, mask=split < splits, other=float("-inf"))
            top = tl.maximum(top, tl.max(tops, 0))
        total = tl.zeros((), tl.float32)
        sums = tl.zeros([DIM_TILE], tl.float32)
        for at in range(0, splits, SPLITS_TILE):
            split = at + tl.arange(0, SPLITS_TILE)
            is_in = split < splits
            kept = start + split * (KV_HEADS * lines)
            weight = tl.exp2(tl.load(tops_in + kept, mask=is_in, other=float("-inf")) - top)
            total += tl.sum(weight * tl.load(totals_in + kept, mask=is_in, other=0.0), 0)
            parts = sums_in + kept[:, None] * DIM_TILE + dim[None, :]
            parts = tl.load(parts, mask=is_in[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            sums += tl.sum(weight[:, None] * parts, 0)
        to = out + ((begin + token).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM + dim
        tl.store(to, (sums / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


# 32 splits, 4 warps: no listed processor spills; 8 and 16 do, by a few bytes.
_SPLITS_TILE = 32


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


def _tiling(q: Tensor, group: int, *, is_long: bool, is_fp8: bool) -> _Tiling:
    """The most with which no listed processor spills, for sm_90 and sm_100 (sm_80 holds one less).

    Chosen 2026-11-20 from benchmarks/results/kernels_aot.json; not yet timed on a GPU.
    """
    dim_tile = jit.power_of_two(q.size(2))
    if q.dtype == torch.float32:
        return _Tiling(32, 4, 3, 4) if dim_tile <= 128 else _Tiling(16, 4, 3, 2)
    if not is_long:
        sizes = {64: (64, 4), 128: (64, 3), 256: (32, 2)}
        positions, programs = sizes[min(256, max(64, dim_tile))]
        return _Tiling(positions, 4, 5, programs)
    if dim_tile > 128:
        return _Tiling(32, 8, 3, 1)
    # Dividing by a group that is no power of two costs registers, and so does reading codes: too
    # many beside 64 long rows.
    is_dear = is_fp8 or group != jit.power_of_two(group)
    return _Tiling(32 if is_dear and dim_tile > 64 else 64, 4, 3, 2)


def _paged_attention_triton(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    (tokens, heads, head_dim), rows = q.shape, len(context_lengths)
    _, kv_heads, block_size, _ = k_pages.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    group = heads // kv_heads
    if plan is None:
        plan = plan_attention(
            query_starts, context_lengths, group=group, dtype=q.dtype, queries_max=tokens
        )
    # With fp8 pages 16-bit queries are float16 in the kernel.
    widens = jit.is_widened(q) if scales is None else q.dtype == torch.float32
    dim_tile = max(16, jit.power_of_two(head_dim))
    splits_max = -(-(plan.context_max or block_tables.size(1) * block_size) // SPLIT)
    kept = rows * splits_max * kv_heads * plan.short_lines if splits_max > 1 else 0
    sums = torch.empty((kept, dim_tile), dtype=torch.float32, device=q.device)
    # Both begin at a multiple of 16 bytes, or a kernel would be compiled anew.
    tops, totals = torch.empty((2, -(-kept // 4) * 4), dtype=torch.float32, device=q.device)
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "DIM_TILE": dim_tile}

    def attend(ends: Tensor, query_tile: int, split: int) -> None:
        tiling = _tiling(q, group, is_long=split == 0, is_fp8=scales is not None)
        _attend_kernel[(jit.programs(q.device, tiling.programs),)](
            q, fp8.as_bytes(k_pages), fp8.as_bytes(v_pages), out,
            sums, tops, totals, tops if scales is None else scales,
            block_tables, query_starts, context_lengths, ends,
            rows, plan.short_lines, block_tables.stride(0), scale * math.log2(math.e), q.stride(0),
            **sizes, BLOCK_SIZE=block_size,
            QUERY_TILE=query_tile, POSITION_TILE=tiling.positions, SPLIT=split,
            WIDENS=widens, IS_FP8=scales is not None,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip

    attend(plan.short_ends, plan.short_tile, SPLIT)
    if plan.has_long:
        attend(plan.long_ends, plan.long_tile, 0)
    if kept:
        _combine_kernel[(rows, heads)](
            out, sums, tops, totals, query_starts, plan.short_ends, plan.short_lines,
            **sizes, SPLITS_TILE=_SPLITS_TILE,
        )  # fmt: skip
    return out


HEAD_DIM_MAX = 256
_PATHS = {
    "triton": _paged_attention_triton,
    "native": _paged_attention_native,
    "torch": paged_attention_reference,
}


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention of this step's query tokens over their rows' pages.

    `plan`, of these very rows, spares the Triton path one launch per layer; no other reads it.
    """
    _check(q, k_pages, v_pages, block_tables, query_starts, context_lengths)
    fp8.require_scales(scales, k_pages)
    # Both compiled paths hold a whole head close by; wider ones are rare enough for torch.
    path = dispatch.path_for(q) if q.size(2) <= HEAD_DIM_MAX else "torch"
    return _PATHS[path](
        q, k_pages, v_pages, block_tables, query_starts, context_lengths, scale, plan, scales
    )


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> None:
    require_pages(k_pages, v_pages)
    require_float(q, "q", dim=3)
    if k_pages.dtype != fp8.DTYPE:
        require_like(q, k_pages, "q", "k_pages")
    require(q.size(2) == k_pages.size(3), "q", "must have the head_dim of k_pages")
    require(q.size(1) % k_pages.size(1) == 0, "q", "heads must be a multiple of kv_heads")
    require(q.stride(1) == q.size(2), "q", "heads must be dense (stride(1) == head_dim)")
    rows = context_lengths.size(0)
    require_ids(context_lengths, "context_lengths", dtype=torch.int32, shape=(rows,))
    require_ids(query_starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    require(block_tables.dim() == 2, "block_tables", "must have 2 dimensions")
    require(block_tables.dtype == torch.int32, "block_tables", "must be int32")
    require(block_tables.size(0) == rows, "block_tables", "must have a row for each context length")
    is_dense = block_tables.size(1) <= 1 or block_tables.stride(1) == 1
    require(is_dense, "block_tables", "rows must be dense")
