"""triton_kernels: paged attention on a GPU; formula and shapes as in paged_attention.

formula  A task is a tile of queries against a split of positions (`plan`): with
         top = max of its scores, weights = 2^(score - top), total = sum of weights,
         sums = weights v, the tile of one split writes sums / total; parts of several are added up
         in the order of splits: out = sum of sums * 2^(top - highest)
         over sum of total * 2^(top - highest)
shapes   of parts = splits * tokens * heads (`parts.Kept`):
         sums [parts, dim_tile], tops and totals [parts] float32
cost     as paged_attention; a launch for short rows and one for long ones, and after each one more
         if a row may be split; `triton_launch` has the two beside each other. Steps that only
         decode take `decode_kernel` instead
after    FlashAttention-2 (Dao 2023: queries outermost, the diagonal apart, one division at the end,
         the scale inside the power), Flash-Decoding (Dao et al. 2023: splits), FlashInfer (Ye et
         al. 2025: the heads of a KV head in a tile, tasks planned once per step) and Triton's
         fused-attention tutorial (tiles)
"""

from __future__ import annotations

from kernels import jit
from kernels.attention.plan import long_split_of, short_level_of, short_splits_of
from kernels.attention.walks import attended, scaled
from kernels.jit import constexpr, pointer, scalar, stride, tl


@jit.compiled
def turns_end(items: scalar) -> scalar:
    """Where this program's turns end, which begin at its number and skip as many as there are."""
    programs = tl.num_programs(0)
    rounds, rest = items // programs, items % programs
    place = tl.where(rounds % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
    return (rounds + (place < rest).to(tl.int32)) * programs


@jit.compiled
def item_of(turn: scalar, items: scalar) -> scalar:
    """What a program takes in its `turn`, from the last item, the longest, on.

    Every other round goes back from the last program to the first: who had the longest of one has
    the shortest of the next.
    """
    programs = tl.num_programs(0)
    rounds = turn // programs
    place = tl.where(rounds % 2 == 0, turn, (2 * rounds + 1) * programs - 1 - turn)
    return items - 1 - place


@jit.compiled
def keep_part(
    out: pointer, sums_out: pointer, tops_out: pointer, totals_out: pointer,
    tasks: pointer, item: scalar, split: scalar, top: pointer, total: pointer, sums: pointer,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, TOKENS: constexpr,
    SPLIT: constexpr, TASK: constexpr, IS_LONG: constexpr,
) -> None:  # fmt: skip
    """Write the tile's result, or of several splits this one's part: [split, token, head] by row.
    Of a task of several, all of rows of one token, it is the one at `split`.

    What the task is about is read once more: registers are dear while it is computed.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head, task = item % KV_HEADS, tasks + item // KV_HEADS * TASK
    begin = tl.load(task + 1)
    count = tl.load(task + 2) if IS_LONG or TOKENS > 1 else 1
    first, kept = tl.load(task + 4) if IS_LONG else 0, tl.load(task + 5) + split
    seen = tl.load(task + 3) - count
    # A short row's last split may have half as much again.
    ALONE: tl.constexpr = SPLIT if IS_LONG else SPLIT + SPLIT // 2 - 1
    DIM_TILE: tl.constexpr = sums.shape[1]
    line, dim = tl.arange(0, sums.shape[0]), tl.arange(0, DIM_TILE)[None, :]
    is_line = line < tl.minimum(TOKENS, count - first) * GROUP
    is_in = is_line[:, None] & (dim < HEAD_DIM)
    place = (line // GROUP * HEADS + line % GROUP).to(tl.int64) + kv_head * GROUP
    if seen + tl.minimum(count, first + TOKENS) <= ALONE:
        # A line that is no query may have no total.
        mixed = sums / tl.where(is_line, total, 1.0)[:, None]
        to = out + ((begin + first).to(tl.int64) * HEADS + place)[:, None] * HEAD_DIM + dim
        tl.store(to, mixed.to(out.dtype.element_ty), mask=is_in)
    else:
        at = (kept + first).to(tl.int64) * HEADS + place
        tl.store(tops_out + at, top, mask=is_line)
        tl.store(totals_out + at, total, mask=is_line)
        tl.store(sums_out + at[:, None] * DIM_TILE + dim, sums, mask=is_in)


@jit.compiled
def attend_kernel(
    q: pointer, k_pages: pointer, v_pages: pointer, k: pointer, v: pointer, out: pointer,
    sums_out: pointer, tops_out: pointer, totals_out: pointer, scales: pointer,
    block_tables: pointer, tasks: pointer, total_tasks: pointer,
    has_own: scalar, table_stride: scalar, scale_log2: scalar,
    window: scalar, softcap: scalar,
    q_stride: stride, k_stride: stride, v_stride: stride,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr,
    DIM_TILE: constexpr, QUERY_TILE: constexpr, POSITIONS: constexpr, SPLIT: constexpr,
    TASK: constexpr, IS_LONG: constexpr, HAS_WHOLE: constexpr,
    WIDENS: constexpr, IS_FP8: constexpr, HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> None:  # fmt: skip
    """`tasks` of the short rows or of the long ones (`plan`), of every KV head."""
    TOKENS: tl.constexpr = QUERY_TILE // GROUP
    dim, line = tl.arange(0, DIM_TILE)[None, :], tl.arange(0, QUERY_TILE)
    items = tl.load(total_tasks) * KV_HEADS
    # Counted upwards: Triton compiles a step that is negative, and no constant, into a loop that
    # never runs where it should, and never ends where it should not.
    for turn in tl.range(tl.program_id(0), turns_end(items), tl.num_programs(0), disable_licm=True):
        item = item_of(turn, items)
        kv_head = item % KV_HEADS
        task = tasks + item // KV_HEADS * TASK
        row, begin, count = tl.load(task), tl.load(task + 1), tl.load(task + 2)
        context, first = tl.load(task + 3), tl.load(task + 4) if IS_LONG else 0
        start, size = tl.load(task + 6) * SPLIT, tl.load(task + 7) * SPLIT
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
            queries, by = scaled(queries, scale_log2, scales + kv_head, WIDENS, IS_FP8)
            top, total, sums = attended(
                queries, by, k_pages, v_pages, k, v, block_tables + row.to(tl.int64) * table_stride,
                begin, kv_head, seen, first, token, start, behind, stop, has_own, k_stride,
                v_stride, window, softcap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, HAS_WHOLE,
                WIDENS, IS_FP8, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            if IS_FP8:
                sums *= 256.0 * tl.load(scales + KV_HEADS + kv_head)
            keep_part(
                out, sums_out, tops_out, totals_out, tasks, item, 0, top, total, sums,
                KV_HEADS, GROUP, HEAD_DIM, TOKENS, SPLIT, TASK, IS_LONG,
            )  # fmt: skip


@jit.compiled
def combined(
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
    rows: scalar, tile_tokens: scalar, window: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr,
    LINES: constexpr, SPLITS: constexpr, IS_LONG: constexpr, SPLIT: constexpr,
    PARTS_MAX: constexpr, ALIKE: constexpr,
) -> None:  # fmt: skip
    """Some tokens of some rows, of one KV head, if parts of them were kept."""
    kv_head = tl.program_id(1)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    # Where no row has any, rows are not gone through.
    rows = tl.where(tl.load(kept_starts + rows) > 0, rows, 0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
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
                last_split = short_splits_of(context, size) - 1
                first_split = tl.minimum(behind // size, last_split)
            combined(
                out, sums, tops, totals,
                (begin + token).to(tl.int64) * HEADS + kv_head * GROUP,
                (kept_start + token).to(tl.int64) * HEADS + kv_head * GROUP,
                count.to(tl.int64) * HEADS, first_split, last_split + 1,
                GROUP, HEAD_DIM, DIM_TILE, LINES, SPLITS,
            )  # fmt: skip
