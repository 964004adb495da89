"""attention_plan: share a step's attention out into tasks, once per step, for all its layers.

A row of few query tokens (decode) is short: its tokens are one tile. Any other row is long: cut
into tiles of query tokens. A tile holds tokens x the heads of a KV head. The positions that a tile
may see are cut into splits, at positions that follow from the row alone, and a tile's split, or
several of a row that decodes, is a task. Partial results of tiles with several splits (parts) are
kept, so splits grow with contexts:

formula  short row: splits of SPLIT << level positions; level 0 up to PARTS_MAX / 8 of them, then
         the least from 1 on with <= PARTS_MAX; the last has at least half of that, and less than
         one and a half
         long row:  split i begins at LONG_SPLIT * (((N + i % N) << i // N) - N), N = LONG_ALIKE:
         |-8192-|-8192-|-8192-|-8192-|--16384--|--16384--|--16384--|--16384--|---32768---| ...
         a row of 2 tokens or more whose parts would be beyond PARTS_MAX is long; with `are_long`
         every row: then a token's bits do not depend on how many of its row are computed with it
         of rows that decode a task is up to TASK_SPLITS splits, where there would be more than
         `tasks_wanted` tasks; those of a row are of one size but for the last
         programs take tasks from the last on, and every other round in the other direction: short
         ones lie shortest first, long ones by rows
shapes   query_starts     [rows + 1] int32, ascending from 0
         context_lengths  [rows] int32
returns  of short and of long rows: tasks [tasks, 8] int32 (row; where its query tokens begin, and
         how many; its context; the tile's first token; parts of the rows and splits before; where
         it starts, and its size, in units of SPLIT or LONG_SPLIT), how many there are, and
         kept_starts [rows + 1] int32, parts of the rows before; nothing is read back to the host
cost     a program per row, each of which reads 8 bytes of every row, twice where tasks may be of
         several splits, and writes 32 per task: a few microseconds at 256 rows
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels import jit
from kernels.attention.parts import Parts, PartsSize
from kernels.checks import refuse, require_ids
from kernels.jit import constexpr, pointer, scalar, tl

# Positions per split. With 512, on an H200, a step of 64 rows of 1k takes 4 % less, and one of one
# row a sixth more (qwen3 0.6b). The partial sums are 3 % of the bytes read (group of 4, bf16). How
# long programs wait for the last of them: benchmarks/results/attention_tasks.jsonl.
SPLIT: Final = 256
# Parts that a short row may keep: (token, split) pairs. 128 splits of 8 KV heads are 1024 tasks, so
# a single row still fills a GPU, and 256 rows of 32 heads of 128 keep 545 MB whatever they see.
PARTS_MAX: Final = 128
# A chunk of 64 tokens at 100k of context: 2 tiles x 8 KV heads are 16 tasks, in 9 splits 144. The
# partial sums of a tile are 128 KiB, written and read while it multiplies for about 130 us. 8192
# tokens of 32 heads of 128 keep 1.23 GB at 128k of context, besides what short rows keep.
LONG_SPLIT: Final = 8192
# Splits of a long row that are of one size, before those of twice the size. Sizes that grow keep
# few parts of long prompts, and stay where they are however a prompt is cut into chunks.
LONG_ALIKE: Final = 4
# Splits of a task at most: an H200 takes 1 % less of 256 rows of 1k than with two.
TASK_SPLITS: Final = 4
# Ints of a task: one read of 32 bytes tells all that a program must know of its row.
TASK: Final = 8
# Rows of a tile: the least that a tensor core takes, and what one program's registers hold.
SHORT_TILE: Final = 16
LONG_TILE: Final = 64
GROUP_MAX: Final = LONG_TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Of the short rows of a step, or of the long ones."""

    table: Tensor
    # [4] int32, the first of which counts.
    total: Tensor
    kept_starts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Of one step; a tile is counted in rows, tokens x heads of a KV head."""

    short: Tasks
    long: Tasks
    short_tile: int
    long_tile: int
    # Query tokens that a short row of this step may have.
    short_tokens: int
    # What the host knows without asking the device, so as not to launch for nothing.
    has_short: bool
    has_long: bool
    # No context is longer.
    context_max: int
    # Whether tasks may be of several splits: for `decode_kernel` alone.
    has_wide_tasks: bool = False
    # None: each call of attention takes its own.
    parts: Parts | None = None

    @property
    def is_decode(self) -> bool:
        """Whether no row has more than one token, and all are short."""
        return self.short_tokens <= 1 and not self.has_long


def parts_size(
    plan: AttentionPlan, *, rows: int, tokens: int, kv_heads: int, group: int, head_dim: int
) -> PartsSize:
    """What a step of so many rows and query tokens keeps at most."""
    heads, most = kv_heads * group, plan.context_max
    return PartsSize(
        short=short_parts(rows, tokens, plan.short_tokens, most) * heads,
        long=long_parts(tokens, most) * heads if plan.has_long else 0,
        head_dim=head_dim,
        counters=rows * kv_heads,
    )


def worst_parts_size(
    *, rows: int, tokens: int, positions: int, kv_heads: int, group: int, head_dim: int,
    dtype: torch.dtype, are_long: bool = False,
) -> PartsSize:  # fmt: skip
    """Of any step of no more rows, query tokens and positions; with `are_long`, all of long rows.

    Not by what the KV pool holds: rows that share a prefix share its blocks, and each keeps parts
    of its own.
    """
    heads, (short_tile, _) = kv_heads * group, tiles_for(group, dtype)
    return PartsSize(
        short=short_parts(rows, tokens, 0 if are_long else short_tile // group, positions) * heads,
        # Else a token alone is a short row.
        long=long_parts(tokens, positions) * heads if are_long or tokens > 1 else 0,
        head_dim=head_dim,
        counters=rows * kv_heads,
    )


def with_parts(
    plan: AttentionPlan, *, rows: int, tokens: int, kv_heads: int, group: int, head_dim: int,
    kept: Parts | None = None,
) -> AttentionPlan:  # fmt: skip
    """The plan with room for its parts: that which is `kept`, else an allocation of its own."""
    if kept is not None:
        return replace(plan, parts=kept)
    size = parts_size(
        plan, rows=rows, tokens=tokens, kv_heads=kv_heads, group=group, head_dim=head_dim
    )
    return replace(plan, parts=Parts.of(size, plan.short.table.device))


def short_parts(rows: int, tokens: int, short_tokens: int, positions: int) -> int:
    """What short rows of no more than `short_tokens` and `positions` keep at most, per head."""
    splits = _short_splits_max(positions)
    kept = min(rows * min(PARTS_MAX, short_tokens * splits), tokens * splits)
    return kept if splits > 1 else 0


def long_parts(tokens: int, positions: int) -> int:
    """What long rows of so many tokens together keep at most, per head."""
    splits = long_splits(positions)
    return tokens * splits if splits > 1 else 0


def _short_splits_max(positions: int) -> int:
    few, more = (max(1, (positions + size // 2) // size) for size in (SPLIT, 2 * SPLIT))
    # Of the least size a row may have 3 at least, as the next size makes one of 2.
    return max(min(max(3, PARTS_MAX // 8), few), min(PARTS_MAX, more))


def long_splits(positions: int) -> int:
    """Splits that cover so many positions of a long row."""
    if positions == 0:
        return 0
    unit = (positions - 1) // LONG_SPLIT + LONG_ALIKE
    level = (unit // LONG_ALIKE).bit_length() - 1
    return level * LONG_ALIKE + (unit >> level) - LONG_ALIKE + 1


def tiles_for(group: int, dtype: torch.dtype) -> tuple[int, int]:
    """(short, long) rows of a tile: at least one token with all its heads.

    Float32 multiplies without tensor cores, and its products must all fit into registers.
    """
    short = max(SHORT_TILE, jit.power_of_two(group))
    if dtype == torch.float32:
        return short, short
    return short, LONG_TILE


@jit.compiled
def short_level_of(context: scalar, SPLIT: constexpr, PARTS_MAX: constexpr) -> scalar:
    """As `short_level`, of rows too."""
    level = context * 0
    for doubled in tl.static_range(14):
        level += (context >= ((2 * PARTS_MAX + 1) * (SPLIT // 2) << doubled)).to(tl.int32)
    few = PARTS_MAX // 8 if PARTS_MAX >= 24 else 3
    is_long = context >= (2 * few + 1) * (SPLIT // 2)
    return tl.maximum(level, is_long.to(tl.int32))


@jit.compiled
def short_splits_of(context: scalar, size: scalar) -> scalar:
    """As `short_splits`, of SPLIT << level positions, of rows too."""
    return tl.maximum((context + size // 2) // size, 1)


@jit.compiled
def long_split_of(position: scalar, LONG_SPLIT: constexpr, ALIKE: constexpr) -> scalar:
    """The split of a long row that holds a position."""
    unit = position // LONG_SPLIT + ALIKE
    level = unit * 0
    for doubled in tl.static_range(1, 15):
        level += (unit >= (ALIKE << doubled)).to(tl.int32)
    return level * ALIKE + (unit >> level) - ALIKE


@jit.compiled
def _long_start(split: scalar, ALIKE: constexpr) -> scalar:
    return ((ALIKE + split % ALIKE) << (split // ALIKE)) - ALIKE


@jit.compiled
def _shares(
    count: scalar, context: scalar,
    SHORT_TOKENS: constexpr, LONG_TOKENS: constexpr, SPLIT: constexpr, LONG_SPLIT: constexpr,
    PARTS_MAX: constexpr, ALIKE: constexpr,
) -> scalar:  # fmt: skip
    """Of a row or of many: level; short splits; long tiles; long splits; parts kept of each. With
    SHORT_TOKENS 0 all are long."""
    is_live = (count > 0) & (context > 0)
    level = short_level_of(context, SPLIT, PARTS_MAX)
    splits = short_splits_of(context, SPLIT << level)
    is_few = (count <= SHORT_TOKENS) & ((count == 1) | (count * splits <= PARTS_MAX))
    # One that is not short has none.
    splits = tl.where(is_live & is_few, splits, 0)
    tiles = tl.where(is_live & (splits == 0), (count + LONG_TOKENS - 1) // LONG_TOKENS, 0)
    long_splits = long_split_of(tl.maximum(context, 1) - 1, LONG_SPLIT, ALIKE) + 1
    short_kept = tl.where(splits > 1, count * splits, 0)
    long_kept = tl.where((tiles > 0) & (long_splits > 1), count * long_splits, 0)
    return level, splits, tiles, long_splits, short_kept, long_kept


@jit.compiled
def _span(
    query_starts: pointer, context_lengths: pointer, rows: scalar, tasks_wanted: scalar,
    SPLIT: constexpr, PARTS_MAX: constexpr, TASK_SPLITS: constexpr, TILE: constexpr,
) -> scalar:  # fmt: skip
    """As `task_splits`, of rows of one token; none wanted: 1."""
    total = tl.zeros((), tl.int32)
    for start in range(0, tl.where(tasks_wanted > 0, rows, 0), TILE):
        row = start + tl.arange(0, TILE)
        is_in = row < rows
        count = tl.load(query_starts + row + 1, mask=is_in, other=0)
        count -= tl.load(query_starts + row, mask=is_in, other=0)
        context = tl.load(context_lengths + row, mask=is_in, other=0)
        level = short_level_of(context, SPLIT, PARTS_MAX)
        is_live = (count > 0) & (context > 0)
        total += tl.sum(tl.where(is_live, short_splits_of(context, SPLIT << level), 0), 0)
    wanted = tl.maximum(tasks_wanted, 1)
    return tl.maximum(tl.minimum((2 * total + wanted) // (2 * wanted), TASK_SPLITS), 1)


@jit.compiled
def _tasks_of(splits: scalar, span: scalar) -> scalar:
    """(tasks, splits of each but the last) of a row or of many, of `span` splits at most."""
    tasks = (splits + span - 1) // span
    each = tl.maximum((splits + tasks - 1) // tl.maximum(tasks, 1), 1)
    return (splits + each - 1) // each, each


@jit.compiled
def _put_task(
    table: pointer, at: scalar, is_in: scalar, row: scalar, begin: scalar, count: scalar,
    context: scalar, first: scalar, kept: scalar, start: scalar, size: scalar, TASK: constexpr,
) -> None:  # fmt: skip
    to = table + at * TASK
    tl.store(to, row + at * 0, mask=is_in)
    tl.store(to + 1, begin + at * 0, mask=is_in)
    tl.store(to + 2, count + at * 0, mask=is_in)
    tl.store(to + 3, context + at * 0, mask=is_in)
    tl.store(to + 4, first + at * 0, mask=is_in)
    tl.store(to + 5, kept, mask=is_in)
    tl.store(to + 6, start, mask=is_in)
    tl.store(to + 7, size, mask=is_in)


@jit.compiled
def _among(
    query_starts: pointer, context_lengths: pointer, rows: scalar,
    own: scalar, size: scalar, end: scalar, span: scalar,
    SHORT_TOKENS: constexpr, LONG_TOKENS: constexpr, SPLIT: constexpr, LONG_SPLIT: constexpr,
    PARTS_MAX: constexpr, ALIKE: constexpr, TILE: constexpr,
) -> scalar:  # fmt: skip
    """When a row's whole tasks of a size are taken, and its end of a length; then of the rows
    before it long tasks, and parts kept, short and long; then all tasks, short and long.
    """
    whole_at, end_at = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    long_at, shorts, longs = whole_at, whole_at, whole_at
    short_start, long_start = whole_at, whole_at
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        is_in, is_before = row < rows, row < own
        count = tl.load(query_starts + row + 1, mask=is_in, other=0)
        count -= tl.load(query_starts + row, mask=is_in, other=0)
        context = tl.load(context_lengths + row, mask=is_in, other=0)
        level, splits, tiles, long_splits, short_kept, long_kept = _shares(
            count, context, SHORT_TOKENS, LONG_TOKENS, SPLIT, LONG_SPLIT, PARTS_MAX, ALIKE
        )
        tasks, each = _tasks_of(splits, span)
        its_size, whole = each * SPLIT << level, tl.maximum(tasks - 1, 0)
        its_end = tl.where(splits > 0, context - whole * its_size, 0)
        is_whole_first = (its_size > size) | ((its_size == size) & is_before)
        is_end_first = (its_end > end) | ((its_end == end) & is_before)
        whole_at += tl.sum(tl.where(is_whole_first, whole, 0), 0)
        whole_at += tl.sum((its_end > size).to(tl.int32), 0)
        end_at += tl.sum(tl.where(its_size >= end, whole, 0), 0)
        end_at += tl.sum(((splits > 0) & is_end_first).to(tl.int32), 0)
        long_at += tl.sum(tl.where(is_before, tiles * long_splits, 0), 0)
        short_start += tl.sum(tl.where(is_before, short_kept, 0), 0)
        long_start += tl.sum(tl.where(is_before, long_kept, 0), 0)
        shorts += tl.sum(tasks, 0)
        longs += tl.sum(tiles * long_splits, 0)
    return whole_at, end_at, long_at, short_start, long_start, shorts, longs


@jit.compiled
def _plan_kernel(
    query_starts: pointer, context_lengths: pointer,
    short_table: pointer, long_table: pointer, totals: pointer, kept_starts: pointer,
    rows: scalar, short_room: scalar, long_room: scalar, kept_stride: scalar,
    tasks_wanted: scalar,
    SHORT_TOKENS: constexpr, LONG_TOKENS: constexpr, SPLIT: constexpr, LONG_SPLIT: constexpr,
    PARTS_MAX: constexpr, ALIKE: constexpr, TASK: constexpr, TASK_SPLITS: constexpr,
    TILE: constexpr,
) -> None:  # fmt: skip
    """The tasks of one row; where they lie follows from what all rows have."""
    own = tl.program_id(0)
    is_row = own < rows
    row_start = tl.load(query_starts + own, mask=is_row, other=0)
    count = tl.load(query_starts + own + 1, mask=is_row, other=0) - row_start
    context = tl.load(context_lengths + own, mask=is_row, other=0)
    level, splits, tiles, long_splits, short_kept, long_kept = _shares(
        count, context, SHORT_TOKENS, LONG_TOKENS, SPLIT, LONG_SPLIT, PARTS_MAX, ALIKE
    )
    span = _span(
        query_starts, context_lengths, rows, tasks_wanted, SPLIT, PARTS_MAX, TASK_SPLITS, TILE
    )
    tasks, each = _tasks_of(splits, span)
    size = each * SPLIT << level
    end = tl.where(splits > 0, context - (tasks - 1) * size, 0)
    whole_at, end_at, long_at, short_start, long_start, shorts, longs = _among(
        query_starts, context_lengths, rows, own, size, end, span,
        SHORT_TOKENS, LONG_TOKENS, SPLIT, LONG_SPLIT, PARTS_MAX, ALIKE, TILE,
    )  # fmt: skip
    if own == 0:
        # No more than there is room for, should the host have known too little.
        tl.store(totals, tl.minimum(shorts, short_room))
        tl.store(totals + 4, tl.minimum(longs, long_room))
        tl.store(kept_starts, 0)
        tl.store(kept_starts + kept_stride, 0)
    tl.store(kept_starts + own + 1, short_start + short_kept, mask=is_row)
    tl.store(kept_starts + kept_stride + own + 1, long_start + long_kept, mask=is_row)
    for start in range(0, tasks, TILE):
        task = start + tl.arange(0, TILE)
        at = shorts - 1 - tl.where(task + 1 < tasks, whole_at + task, end_at)
        is_in, split = (task < tasks) & (at < short_room), task * each
        units = tl.where(task + 1 < tasks, each, each + 1) << level
        _put_task(
            short_table, at, is_in, own, row_start, count, context, 0, short_start + split * count,
            split << level, units, TASK,
        )  # fmt: skip
    for start in range(0, tiles * long_splits, TILE):
        index = start + tl.arange(0, TILE)
        is_in = (index < tiles * long_splits) & (long_at + index < long_room)
        # Of a row the last tiles are taken first: they see the most, and the shortest even out
        # the end.
        first, split = index // long_splits * LONG_TOKENS, index % long_splits
        begin = _long_start(split, ALIKE)
        length = _long_start(split + 1, ALIKE) - begin
        _put_task(
            long_table, long_at + index, is_in, own, row_start, count, context, first,
            long_start + split * count, begin, length, TASK,
        )  # fmt: skip


_TILE = 256


def plan_attention(
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    tokens: int,
    group: int,
    dtype: torch.dtype,
    context_max: int,
    queries_max: int | None = None,
    tasks_wanted: int | None = None,
    are_long: bool = False,
) -> AttentionPlan:
    """The tasks of a step, for `group` heads per KV head.

    There are no more than `tokens` query tokens, of no row more than `queries_max`, and no row has
    more positions than `context_max`: what the host knows of it, and room is made for. Nothing
    notices a bound that is too low: tasks are left out.

    With `tasks_wanted`, of rows of one token alone, tasks of more than one split are made where
    there are more than so many of one: for `decode_kernel`, which keeps the part of each. With
    `are_long` every row is long.
    """
    rows = context_lengths.size(0)
    require_ids(context_lengths, "context_lengths", dtype=torch.int32, shape=(rows,))
    require_ids(query_starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    if not 1 <= group <= GROUP_MAX:
        refuse("group", f"must be between 1 and {GROUP_MAX}")
    if tasks_wanted is not None and (queries_max != 1 or tasks_wanted < 1 or are_long):
        refuse("tasks_wanted", "must be at least 1, of short rows of one token")
    short, long = tiles_for(group, dtype)
    short_tokens, long_tokens = 0 if are_long else short // group, long // group
    queries = tokens if queries_max is None else queries_max
    splits = _short_splits_max(context_max)
    is_beyond = queries > 1 and queries * splits > PARTS_MAX
    has_long = queries > short_tokens or is_beyond
    short_room = 1 if are_long else max(1, rows * splits)
    long_room = (tokens // long_tokens + rows) * long_splits(context_max) if has_long else 1
    # Each begins at a multiple of 16 bytes whatever the rows, or a kernel would be compiled anew.
    width = -(-(rows + 1) // 4) * 4
    empty = partial(torch.empty, dtype=torch.int32, device=query_starts.device)
    kept_starts, totals = empty((2, width)), empty((2, 4))
    short_table, long_table = empty((short_room, TASK)), empty((long_room, TASK))
    _plan_kernel[(max(1, rows),)](
        query_starts, context_lengths, short_table, long_table, totals, kept_starts,
        rows, short_room, long_room, width, tasks_wanted or 0,
        SHORT_TOKENS=short_tokens, LONG_TOKENS=long_tokens, SPLIT=SPLIT, LONG_SPLIT=LONG_SPLIT,
        PARTS_MAX=PARTS_MAX, ALIKE=LONG_ALIKE, TASK=TASK, TASK_SPLITS=TASK_SPLITS,
        TILE=_TILE,
    )  # fmt: skip
    return AttentionPlan(
        short=Tasks(table=short_table, total=totals[0], kept_starts=kept_starts[0, : rows + 1]),
        long=Tasks(table=long_table, total=totals[1], kept_starts=kept_starts[1, : rows + 1]),
        short_tile=short,
        long_tile=long,
        short_tokens=min(short_tokens, queries),
        has_short=not are_long,
        has_long=has_long,
        context_max=context_max,
        has_wide_tasks=tasks_wanted is not None,
    )
