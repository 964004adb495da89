"""triton_kernels: paged attention on a GPU; formula and shapes as in paged_attention.

formula  A task is a tile of queries against a split of positions (`plan`): with
         top = max of its scores, weights = 2^(score - top), total = sum of weights,
         sums = weights v, the tile of one split writes sums / total; parts of several are added up
         in the order of splits: out = sum of sums * 2^(top - highest)
         over sum of total * 2^(top - highest)
shapes   of parts = splits * tokens * heads (`plan.Parts`):
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

from kernels import jit
from kernels.attention.plan import long_split_of, short_level_of
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.kv import fp8


@jit.compiled
def _places(
    table: pointer, at: scalar, is_there: pointer, kv_head: scalar,
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
        block = tl.load(table + position // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
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
def _scored(
    scores: pointer, by: scalar, position: pointer, is_there: pointer, last_seen: pointer,
    window: scalar, softcap: scalar,
    MASKED: constexpr, HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """[queries, positions]: capped, and -inf ahead of the query and behind its window."""
    if HAS_SOFTCAP:
        # tanh x = 1 - 2 / (e^2x + 1), of x = score / softcap; `by` makes powers of two of e's.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (by * 2.0 / softcap)) + 1.0)
    if MASKED:
        if HAS_WINDOW:
            # What is not there is ahead of every query or behind its window: of two masks, one.
            back = last_seen[:, None] - position[None, :]
            is_seen = (back >= 0) & (back < window)
        else:
            is_seen = is_there[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    return scores


@jit.compiled
def _walk(
    queries: pointer, by: scalar, k: pointer, v: pointer, table: pointer,
    k_stride: stride, v_stride: stride, kv_head: scalar,
    start: scalar, behind: scalar, stop: scalar, last_seen: pointer,
    top: pointer, total: pointer, sums: pointer, window: scalar, softcap: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    PAGED: constexpr, MASKED: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """Attend to positions [start, stop) too; without MASKED, to whole tiles that all queries see.
    Nobody sees those before `behind` of a window, which needs MASKED.
    PAGED: k and v are pages, found by `table`. Otherwise position p lies at k + p * k_stride.
    """
    PADDED: tl.constexpr = queries.shape[1] > HEAD_DIM
    dim = tl.arange(0, queries.shape[1])
    is_dim = dim < HEAD_DIM
    unit = softcap * 1.44269504 if HAS_SOFTCAP else by
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        is_there = (position < stop) & (position >= behind) if HAS_WINDOW else position < stop
        if PAGED:
            k_at = _places(table, at, is_there, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS)
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
        scores = _scored(
            scores, by, position, is_there, last_seen, window, softcap,
            MASKED, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1) * unit)
        base = higher
        if MASKED:
            # A query that has seen nothing yet: -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        # One fused multiply-add per score, and none of a query's bits lost to the scale.
        weights = tl.exp2(scores * unit - base[:, None])
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
    tasks: pointer, item: scalar, query_starts: pointer, context_lengths: pointer,
    kept_starts: pointer, top: pointer, total: pointer, sums: pointer,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, TOKENS: constexpr,
    SPLIT: constexpr, TASK: constexpr, IS_LONG: constexpr,
) -> None:  # fmt: skip
    """Write the tile's result, or of several splits this one's part: [split, token, head] by row.

    What the task is about is read once more: registers are dear while it is computed.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head, task = item % KV_HEADS, tasks + item // KV_HEADS * TASK
    row, first = tl.load(task), tl.load(task + 1) if IS_LONG else 0
    split, begin = tl.load(task + 2), tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    seen = tl.load(context_lengths + row) - count
    DIM_TILE: tl.constexpr = sums.shape[1]
    line, dim = tl.arange(0, sums.shape[0]), tl.arange(0, DIM_TILE)[None, :]
    is_line = line < tl.minimum(TOKENS, count - first) * GROUP
    is_in = is_line[:, None] & (dim < HEAD_DIM)
    place = (line // GROUP * HEADS + line % GROUP).to(tl.int64) + kv_head * GROUP
    if seen + tl.minimum(count, first + TOKENS) <= SPLIT:
        # A line that is no query may have no total.
        mixed = sums / tl.where(is_line, total, 1.0)[:, None]
        to = out + ((begin + first).to(tl.int64) * HEADS + place)[:, None] * HEAD_DIM + dim
        tl.store(to, mixed.to(out.dtype.element_ty), mask=is_in)
    else:
        kept = (tl.load(kept_starts + row) + first).to(tl.int64) + split * count.to(tl.int64)
        at = kept * HEADS + place
        tl.store(tops_out + at, top, mask=is_line)
        tl.store(totals_out + at, total, mask=is_line)
        tl.store(sums_out + at[:, None] * DIM_TILE + dim, sums, mask=is_in)


@jit.compiled
def _attended(
    queries: pointer, by: scalar, k_pages: pointer, v_pages: pointer, k: pointer, v: pointer,
    table: pointer, begin: scalar, kv_head: scalar, seen: scalar, first: scalar, token: pointer,
    start: scalar, behind: scalar, stop: scalar, has_own: scalar,
    k_stride: stride, v_stride: stride, window: scalar, softcap: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    IS_WIDE: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """(highest score, sum of weights, weighted values) of a tile over positions [start, stop)."""
    top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    sums = tl.zeros(queries.shape, tl.float32)
    if IS_WIDE and not HAS_WINDOW:
        # start ... own_stop ... middle ... stop: of the step's own tensors, of pages, masked.
        seen_by_all = tl.maximum(tl.minimum(stop, seen + first + 1) - start, 0)
        middle = start + seen_by_all // POSITIONS * POSITIONS
        if not IS_FP8:
            is_own = (seen == 0) & (has_own > 0)
            own, own_stop = begin.to(tl.int64), tl.where(is_own, middle, start)
            top, total, sums = _walk(
                queries, by, k + own * k_stride + kv_head * HEAD_DIM,
                v + own * v_stride + kv_head * HEAD_DIM, table, k_stride, v_stride, kv_head,
                start, behind, own_stop, token, top, total, sums, window, softcap,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, False, False, WIDENS, IS_FP8,
                HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            start = own_stop
        top, total, sums = _walk(
            queries, by, k_pages, v_pages, table, k_stride, v_stride, kv_head,
            start, behind, middle, token, top, total, sums, window, softcap,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, True, False, WIDENS, IS_FP8,
            HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        start = middle
    return _walk(
        queries, by, k_pages, v_pages, table, k_stride, v_stride, kv_head,
        start, behind, stop, seen + token, top, total, sums, window, softcap,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, True, True, WIDENS, IS_FP8,
        HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip


@jit.compiled
def _scaled(
    queries: pointer, scale_log2: scalar, k_scale: pointer, WIDENS: constexpr, IS_FP8: constexpr
) -> pointer:
    """Queries as they are multiplied, and what makes their products exponents of two."""
    by = scale_log2
    if WIDENS:
        queries = queries.to(tl.float32)
    if IS_FP8:
        # Codes are read as float16 of a 256th; float32 stays what it is.
        queries = queries if WIDENS else queries.to(tl.float16)
        by = scale_log2 * (256.0 * tl.load(k_scale))
    return queries, by


@jit.compiled
def attend_kernel(
    q: pointer, k_pages: pointer, v_pages: pointer, k: pointer, v: pointer, out: pointer,
    sums_out: pointer, tops_out: pointer, totals_out: pointer, scales: pointer,
    block_tables: pointer, query_starts: pointer, context_lengths: pointer,
    tasks: pointer, total_tasks: pointer, kept_starts: pointer,
    has_own: scalar, table_stride: scalar, scale_log2: scalar,
    window: scalar, softcap: scalar,
    q_stride: stride, k_stride: stride, v_stride: stride,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr,
    DIM_TILE: constexpr, QUERY_TILE: constexpr, POSITIONS: constexpr, SPLIT: constexpr,
    TASK: constexpr, IS_LONG: constexpr, IS_WIDE: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> None:  # fmt: skip
    """`tasks` of the short rows or of the long ones (`plan`), of every KV head."""
    TOKENS: tl.constexpr = QUERY_TILE // GROUP
    dim, line = tl.arange(0, DIM_TILE)[None, :], tl.arange(0, QUERY_TILE)
    items = tl.load(total_tasks) * KV_HEADS
    # From the last, the longest, on.
    for item in range(items - 1 - tl.program_id(0), -1, -tl.num_programs(0)):
        kv_head = item % KV_HEADS
        task = tasks + item // KV_HEADS * TASK
        row, first = tl.load(task), tl.load(task + 1) if IS_LONG else 0
        start, size = tl.load(task + 3) * SPLIT, tl.load(task + 4) * SPLIT
        begin = tl.load(query_starts + row)
        count = tl.load(query_starts + row + 1) - begin
        context = tl.load(context_lengths + row)
        #  0 ... seen        first ... first + TOKENS ... context      positions, from seen on
        #  | start ... stop                                            this step's query tokens
        seen = context - count
        tile_stop = seen + tl.minimum(count, first + TOKENS)
        stop = tl.minimum(tile_stop, start + size)
        # Before it nobody of the tile sees anything, nor need it be there.
        behind = tl.maximum(seen + first + 1 - window, 0) if HAS_WINDOW else 0
        if HAS_WINDOW:
            start = tl.maximum(start, behind // POSITIONS * POSITIONS)
        if start < stop:
            token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
            is_query = (line < TOKENS * GROUP) & (token < count)
            query = (begin + token).to(tl.int64)
            at = (query * q_stride + head * HEAD_DIM)[:, None] + dim
            queries = tl.load(q + at, mask=is_query[:, None] & (dim < HEAD_DIM), other=0.0)
            queries, by = _scaled(queries, scale_log2, scales + kv_head, WIDENS, IS_FP8)
            top, total, sums = _attended(
                queries, by, k_pages, v_pages, k, v, block_tables + row.to(tl.int64) * table_stride,
                begin, kv_head, seen, first, token, start, behind, stop, has_own, k_stride,
                v_stride, window, softcap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, IS_WIDE,
                WIDENS, IS_FP8, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            if IS_FP8:
                sums *= 256.0 * tl.load(scales + KV_HEADS + kv_head)
            _put(
                out, sums_out, tops_out, totals_out, tasks, item, query_starts, context_lengths,
                kept_starts, top, total, sums, KV_HEADS, GROUP, HEAD_DIM, TOKENS, SPLIT, TASK,
                IS_LONG,
            )  # fmt: skip


@jit.compiled
def _combined(
    out: pointer, sums: pointer, tops: pointer, totals: pointer,
    first_out: scalar, first_kept: scalar, hop: scalar, first_split: scalar, splits: scalar,
    GROUP: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr,
    LINES: constexpr, SPLITS: constexpr,
) -> None:  # fmt: skip
    """One token's heads of a KV head, from their parts in the order of splits."""
    dim, line = tl.arange(0, DIM_TILE), tl.arange(0, LINES)
    is_head = line < GROUP
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    mixed = tl.zeros([LINES, DIM_TILE], tl.float32)
    for at in range(first_split, splits, SPLITS):
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
def combine_kernel(
    out: pointer, sums: pointer, tops: pointer, totals: pointer,
    query_starts: pointer, context_lengths: pointer, kept_starts: pointer,
    tile_tokens: scalar, window: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr,
    LINES: constexpr, SPLITS: constexpr, IS_LONG: constexpr, SPLIT: constexpr,
    PARTS_MAX: constexpr, ALIKE: constexpr,
) -> None:  # fmt: skip
    """Some tokens of a row, of one KV head, if parts of it were kept."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    begin = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    context = tl.load(context_lengths + row)
    kept_start = tl.load(kept_starts + row)
    is_here = tl.load(kept_starts + row + 1) > kept_start
    # Tiles before it saw no more than the first split, and are done.
    first = tl.maximum(SPLIT - (context - count), 0) // tile_tokens * tile_tokens
    for token in range(
        first + tl.program_id(2), tl.where(is_here, count, 0), tl.num_programs(2)
    ):  # fmt: skip
        # As the token's tile saw it.
        seen = context - count + tl.minimum(count, (token // tile_tokens + 1) * tile_tokens)
        # Parts wholly behind its window were never written.
        behind = tl.where(window > 0, tl.maximum(context - count + token + 1 - window, 0), 0)
        if IS_LONG:
            last_split = long_split_of(seen - 1, SPLIT, ALIKE)
            first_split = long_split_of(behind, SPLIT, ALIKE)
        else:
            size = SPLIT << short_level_of(context, SPLIT, PARTS_MAX)
            last_split, first_split = (seen - 1) // size, behind // size
        _combined(
            out, sums, tops, totals,
            (begin + token).to(tl.int64) * HEADS + kv_head * GROUP,
            (kept_start + token).to(tl.int64) * HEADS + kv_head * GROUP,
            count.to(tl.int64) * HEADS, first_split, last_split + 1,
            GROUP, HEAD_DIM, DIM_TILE, LINES, SPLITS,
        )  # fmt: skip
