"""decode_kernel: of rows with one token each, all that lies between two projections, in a launch.

formula  q, k := norm of each head, if the model has that; rope; k and v to their slot; attention,
         as decode_attention. A task is a KV head of some splits of a row's positions (`plan`): it
         turns its heads' queries itself, and who has the last split writes the row's key and value
         before it reads them. Of several splits each keeps a part; who arrives last adds them up in
         the order of splits, so that the bits depend neither on who that is nor on how many splits
         a task has
shapes   arrived [rows * KV_HEADS] int32, zeros before and after; else as triton_kernels
cost     as decode_attention. Queries are read and turned once per task, 2 KiB beside the 128 KiB
         of its keys and values (group of 4, heads of 128, bf16); in return a layer is two launches
         less. Parts come back from the cache, 2 KiB each (group of 4), 8 at once: 64k of context,
         128 splits, are 16 reads of the cache one after the other. Reckoned, not timed: 10 us for
         those, at the end of a step that takes longer to read as many positions
"""

from __future__ import annotations

from kernels import jit
from kernels.attention.plan import short_level_of, short_splits_of
from kernels.attention.triton_kernels import combined, item_of, keep_part, turns_end
from kernels.attention.walks import (
    attend_codes,
    attend_tile,
    halves,
    in_pairs,
    places,
    scaled,
    whole,
)
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.kv import fp8


@jit.compiled
def _turned(
    heads: pointer, norm: pointer, table: pointer, is_head: pointer, is_known: scalar,
    eps: scalar, HEAD_DIM: constexpr, HALF: constexpr, DIM_TILE: constexpr, NORMS: constexpr,
) -> pointer:  # fmt: skip
    """Heads at `heads` [lines, 1], normed and rotated, each time rounded to their type."""
    dim = tl.arange(0, DIM_TILE)[None, :]
    is_first, is_turned = dim < HALF, dim < 2 * HALF
    # What is turned with an element; one that is not turned, with itself.
    pair = tl.where(is_first, dim + HALF, tl.where(is_turned, dim - HALF, dim))
    is_in = is_head & (dim < HEAD_DIM)
    kind = heads.dtype.element_ty
    own = tl.load(heads + dim, mask=is_in, other=0.0).to(tl.float32)
    other = tl.load(heads + pair, mask=is_in, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm + dim, mask=is_in, other=0.0).to(tl.float32)
        own = (own * scale * weight).to(kind).to(tl.float32)
        weight = tl.load(norm + pair, mask=is_in, other=0.0).to(tl.float32)
        other = (other * scale * weight).to(kind).to(tl.float32)
    angle = tl.where(is_first, dim, dim - HALF)
    cos = tl.load(table + angle, mask=is_turned & is_known, other=1.0)
    sin = tl.load(table + HALF + angle, mask=is_turned & is_known, other=0.0)
    return (own * cos + other * tl.where(is_first, -sin, sin)).to(kind)


@jit.compiled
def _write(
    key: pointer, is_key: pointer, value: pointer, k_pages: pointer, v_pages: pointer,
    slot: scalar, slots_max: scalar, scales: pointer, kv_head: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, DIM_TILE: constexpr,
    IS_FP8: constexpr,
) -> None:  # fmt: skip
    """A line of `key`, and `value`, to a slot of the pages."""
    dim = tl.arange(0, DIM_TILE)[None, :]
    is_kept = (slot >= 0) & (slot < slots_max) & (dim < HEAD_DIM)
    # int64 from the slot on: block * elements of a block passes 2^31 in a large pool.
    place = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    to = place * HEAD_DIM + dim
    row = tl.load(value + dim, mask=is_kept, other=0.0)
    if IS_FP8:
        key = fp8.encoded(key.to(tl.float32), tl.load(scales + kv_head))
        row = fp8.encoded(row.to(tl.float32), tl.load(scales + KV_HEADS + kv_head))
    tl.store(k_pages + to + is_key.to(tl.int32) * 0, key, mask=is_kept & is_key)
    tl.store(v_pages + to, row, mask=is_kept)


@jit.compiled
def _queries(
    q: pointer, k: pointer, v: pointer, q_norm: pointer, k_norm: pointer, cos_sin: pointer,
    context: scalar, positions_max: scalar, eps: scalar, k_pages: pointer, v_pages: pointer,
    slot: scalar, slots_max: scalar, scales: pointer, kv_head: scalar, is_last: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, HALF: constexpr,
    BLOCK_SIZE: constexpr, DIM_TILE: constexpr, QUERY_TILE: constexpr, NORMS: constexpr,
    IS_FP8: constexpr,
) -> pointer:  # fmt: skip
    """Of the token's heads of a KV head, as they attend; its key and value, if `is_last`, to its
    slot, where all threads of this program read them afterwards.
    """
    line = tl.arange(0, QUERY_TILE)
    # Beside the queries of its heads, in the line after them, the KV head's key.
    is_key = (line == GROUP)[:, None]
    heads = tl.where(
        is_key, k + kv_head * HEAD_DIM, q + ((kv_head * GROUP + line) * HEAD_DIM)[:, None]
    )
    table = cos_sin + (context - 1).to(tl.int64) * (2 * HALF)
    queries = _turned(
        heads, tl.where(is_key, k_norm, q_norm), table, (line <= GROUP)[:, None],
        context <= positions_max, eps, HEAD_DIM, HALF, DIM_TILE, NORMS,
    )  # fmt: skip
    # Dividing by a scale takes as long as a tile of positions: no other split need do it.
    if is_last:
        _write(
            queries, is_key, v + kv_head * HEAD_DIM, k_pages, v_pages, slot, slots_max, scales,
            kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_TILE, IS_FP8,
        )  # fmt: skip
        tl.debug_barrier()
    return queries


@jit.compiled
def _first_of(
    tasks: pointer, item: scalar, size: scalar, KV_HEADS: constexpr, SPLIT: constexpr,
    TASK: constexpr,
) -> scalar:  # fmt: skip
    """The first split of a task."""
    return tl.load(tasks + item // KV_HEADS * TASK + 6) * SPLIT // size


@jit.compiled
def _splits_of(
    tasks: pointer, item: scalar, window: scalar, KV_HEADS: constexpr, SPLIT: constexpr,
    PARTS_MAX: constexpr, TASK: constexpr, HAS_WINDOW: constexpr,
) -> scalar:  # fmt: skip
    """(size, splits) of a task's row, and which of them are the task's: [from, to).

    Those wholly behind the window are nobody's.
    """
    task = tasks + item // KV_HEADS * TASK
    context = tl.load(task + 3)
    size = SPLIT << short_level_of(context, SPLIT, PARTS_MAX)
    splits = short_splits_of(context, size)
    first = _first_of(tasks, item, size, KV_HEADS, SPLIT, TASK)
    until = tl.minimum(first + tl.load(task + 7) * SPLIT // size, splits)
    if HAS_WINDOW:
        behind = tl.maximum(context - window, 0) // size
        first = tl.maximum(first, tl.minimum(behind, splits - 1))
    return size, splits, first, until


@jit.compiled
def _end_of_split(begin: scalar, size: scalar, stop: scalar) -> scalar:
    """Of the split from `begin` on: a row's last has less than one and a half of the others, and
    at least half.
    """
    return tl.where(stop - begin < size + size // 2, stop, begin + size)


@jit.compiled
def _walk_splits(
    queries: pointer, by: scalar, k: pointer, v: pointer, scales: pointer, table: pointer,
    kv_head: scalar, start: scalar, behind: scalar, stop: scalar, size: scalar, end: scalar,
    window: scalar, softcap: scalar,
    out: pointer, sums_out: pointer, tops_out: pointer, totals_out: pointer,
    tasks: pointer, item: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr,
    POSITIONS: constexpr, SPLIT: constexpr, TASK: constexpr, WIDENS: constexpr, IS_FP8: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> None:  # fmt: skip
    """Attend to positions [start, stop), and keep the part of each of their splits, of `size`, the
    first of which ends at `end`.

    One loop over all of them: the next tile is on its way while a part is written.
    """
    LINES: tl.constexpr = queries.shape[0]
    if IS_FP8:
        k, v = in_pairs(k), in_pairs(v)
        evens, odds = halves(queries)
        odd = tl.zeros(odds.shape, tl.float32)
        sums = odd
    else:
        sums = tl.zeros(queries.shape, tl.float32)
    # Of one token, the last: it sees all that is there.
    seen = tl.arange(0, LINES)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        is_there = (position < stop) & (position >= behind) if HAS_WINDOW else position < stop
        if IS_FP8:
            place = places(
                table, at, is_there, kv_head, KV_HEADS, HEAD_DIM // 2, BLOCK_SIZE, POSITIONS
            )
            top, total, sums, odd = attend_codes(
                evens, odds, by, k, v, place, position, is_there, seen, top, total, sums, odd,
                window, softcap, HEAD_DIM, True, True, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        else:
            place = places(table, at, is_there, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS)
            top, total, sums = attend_tile(
                queries, by, k, v, place, place, position, is_there, seen, top, total, sums,
                window, softcap, HEAD_DIM, True, True, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        if at + POSITIONS >= end:
            mixed = sums
            if IS_FP8:
                mixed = whole(sums, odd) * (256.0 * tl.load(scales + KV_HEADS + kv_head))
                odd = tl.zeros(odd.shape, tl.float32)
            split = short_splits_of(end, size) - 1
            split -= _first_of(tasks, item, size, KV_HEADS, SPLIT, TASK)
            keep_part(
                out, sums_out, tops_out, totals_out, tasks, item, split, top, total, mixed,
                KV_HEADS, GROUP, HEAD_DIM, 1, SPLIT, TASK, False,
            )  # fmt: skip
            sums = tl.zeros(sums.shape, tl.float32)
            top = tl.full([LINES], float("-inf"), tl.float32)
            total = tl.zeros([LINES], tl.float32)
            end = _end_of_split(end, size, stop)


@jit.compiled
def decode_kernel(
    q: pointer, k: pointer, v: pointer, q_norm: pointer, k_norm: pointer, cos_sin: pointer,
    slot_mapping: pointer, k_pages: pointer, v_pages: pointer, out: pointer,
    sums_out: pointer, tops_out: pointer, totals_out: pointer, arrived: pointer, scales: pointer,
    block_tables: pointer, tasks: pointer, total_tasks: pointer, kept_starts: pointer,
    table_stride: scalar, positions_max: scalar, slots_max: scalar, eps: scalar,
    scale_log2: scalar, window: scalar, softcap: scalar,
    q_stride: stride, k_stride: stride, v_stride: stride,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, HALF: constexpr,
    BLOCK_SIZE: constexpr, DIM_TILE: constexpr, QUERY_TILE: constexpr, POSITIONS: constexpr,
    SPLIT: constexpr, PARTS_MAX: constexpr, TASK: constexpr,
    GROUP_TILE: constexpr, PARTS_AT_ONCE: constexpr, NORMS: constexpr,
    WIDENS: constexpr, IS_FP8: constexpr, HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    """`tasks` of rows of one token, of every KV head."""
    jit.wait_for_neighbour(PDL)
    items = tl.load(total_tasks) * KV_HEADS
    for turn in tl.range(tl.program_id(0), turns_end(items), tl.num_programs(0), disable_licm=True):
        item = item_of(turn, items)
        kv_head = item % KV_HEADS
        task = tasks + item // KV_HEADS * TASK
        row, token = tl.load(task), tl.load(task + 1).to(tl.int64)
        context = tl.load(task + 3)
        size, splits, first, until = _splits_of(
            tasks, item, window, KV_HEADS, SPLIT, PARTS_MAX, TASK, HAS_WINDOW
        )
        behind = tl.maximum(context - window, 0) if HAS_WINDOW else 0
        if first < until:
            queries = _queries(
                q + token * q_stride, k + token * k_stride, v + token * v_stride, q_norm, k_norm,
                cos_sin, context, positions_max, eps, k_pages, v_pages,
                tl.load(slot_mapping + token), slots_max, scales, kv_head, until == splits,
                KV_HEADS, GROUP, HEAD_DIM, HALF, BLOCK_SIZE, DIM_TILE, QUERY_TILE, NORMS, IS_FP8,
            )  # fmt: skip
            queries, by = scaled(queries, scale_log2, scales + kv_head, WIDENS, IS_FP8)
            start = first * size
            stop = tl.where(until == splits, context, until * size)
            end = _end_of_split(start, size, stop)
            if HAS_WINDOW:
                start = tl.maximum(start, behind // POSITIONS * POSITIONS)
            _walk_splits(
                queries, by, k_pages, v_pages, scales,
                block_tables + row.to(tl.int64) * table_stride, kv_head, start, behind,
                stop, size, end, window, softcap,
                out, sums_out, tops_out, totals_out, tasks, item,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, POSITIONS, SPLIT, TASK, WIDENS, IS_FP8,
                HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            _arrive(
                out, sums_out, tops_out, totals_out, arrived, tasks, item, kept_starts, window,
                KV_HEADS, GROUP, HEAD_DIM, DIM_TILE, SPLIT, PARTS_MAX, TASK, GROUP_TILE,
                PARTS_AT_ONCE, HAS_WINDOW,
            )  # fmt: skip


@jit.compiled
def _arrive(
    out: pointer, sums: pointer, tops: pointer, totals: pointer, arrived: pointer,
    tasks: pointer, item: scalar, kept_starts: pointer, window: scalar,
    KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, DIM_TILE: constexpr,
    SPLIT: constexpr, PARTS_MAX: constexpr, TASK: constexpr,
    GROUP_TILE: constexpr, PARTS_AT_ONCE: constexpr, HAS_WINDOW: constexpr,
) -> None:  # fmt: skip
    """The task's parts are there; if all others of the row's KV head are: their sum."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = item % KV_HEADS
    task = tasks + item // KV_HEADS * TASK
    row, begin, context = tl.load(task), tl.load(task + 1), tl.load(task + 3)
    size, splits, own, until = _splits_of(
        tasks, item, window, KV_HEADS, SPLIT, PARTS_MAX, TASK, HAS_WINDOW
    )
    if splits > 1:
        # Parts wholly behind the window are never written.
        behind = tl.maximum(context - window, 0) // size if HAS_WINDOW else 0
        first = tl.minimum(behind, splits - 1)
        counter = arrived + row * KV_HEADS + kv_head
        # All threads' stores before the one that counts, and its count before anybody's loads.
        tl.debug_barrier()
        before = tl.atomic_add(counter, until - own, sem="acq_rel", scope="gpu")
        if before + until - own == splits - first:
            tl.store(counter, 0)
            head = kv_head * GROUP
            combined(
                out, sums, tops, totals,
                begin.to(tl.int64) * HEADS + head,
                tl.load(kept_starts + row).to(tl.int64) * HEADS + head,
                tl.zeros((), tl.int64) + HEADS, first, splits,
                GROUP, HEAD_DIM, DIM_TILE, GROUP_TILE, PARTS_AT_ONCE,
            )  # fmt: skip
