"""attention_plan: share a step's attention out into tasks, once per step, for all its layers.

A row of few query tokens (decode) is short: its tokens are one tile. Any other row is long: cut
into tiles of query tokens. A tile holds tokens x the heads of a KV head. The positions that a tile
may see are cut into splits, at fixed positions whatever the chunk and the batch, and a tile's split
is a task: SPLIT positions of a short row, LONG_SPLIT of a long one.

formula  short_ends[r] = tasks of the short rows before r; long_ends likewise
         short_starts[r] = query tokens of the short rows before r
         row 0 |-- split 0 --|-- split 1 --|- 2 -|  row 1 |-- split 0 --|      short_ends 0, 3, 4
shapes   query_starts     [rows + 1] int32, ascending from 0
         context_lengths  [rows] int32
returns  three tensors [rows + 1] int32; nothing is read back to the host
cost     reads 8 bytes and writes 12 per row, in one program: a few microseconds at 1024 rows
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kernels import jit
from kernels.checks import require, require_ids
from kernels.jit import constexpr, pointer, scalar, tl

# Positions per split: fixed, because the order of sums follows from it. 512 positions of 8 KV heads
# are 64 tasks per 4096 tokens, and the partial sums are 1.6 % of the bytes read (group of 4, bf16).
SPLIT: Final = 512
# A chunk of 64 tokens at 100k of context: 2 tiles x 8 KV heads are 16 tasks, in 13 splits 208. The
# partial sums of a tile are 128 KiB, written and read while it multiplies for about 130 us.
LONG_SPLIT: Final = 8192
# Rows of a tile: the least that a tensor core takes, and what one program's registers hold.
SHORT_TILE: Final = 16
LONG_TILE: Final = 64
# On sm_90: two groups of warps, each with 64 of them, read keys and values together, so that half
# as many bytes feed the same multiplications. On sm_100 it spills, and sm_80 has not the memory.
WIDE_TILE: Final = 128
WIDE_HEAD_DIM_MAX: Final = 128
GROUP_MAX: Final = LONG_TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Of one step; a tile is counted in rows, tokens x heads of a KV head."""

    short_ends: Tensor
    long_ends: Tensor
    short_starts: Tensor
    short_tile: int
    long_tile: int
    # Query tokens that a short row of this step may have.
    short_tokens: int
    # What the host knows without asking the device, so as not to launch for nothing.
    has_long: bool
    context_max: int | None
    # None: each call of attention takes its own.
    parts: Parts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSize:
    """What a step keeps of tiles with several splits."""

    # Query tokens of its short rows, at most.
    short_tokens: int
    # (split, query token, head); 0 if no row can have several splits.
    parts: int
    # No context is longer.
    positions: int
    head_dim: int

    @classmethod
    def of(
        cls, plan: AttentionPlan, *, rows: int, tokens: int, kv_heads: int, group: int,
        head_dim: int, positions: int | None = None,
    ) -> PartsSize:  # fmt: skip
        """Of a step of so many rows and query tokens; no context is beyond `positions`."""
        most = positions if plan.context_max is None else plan.context_max
        assert most is not None, "a step without a bound of its contexts"
        short_tokens = min(tokens, rows * plan.short_tokens)
        parts = _parts(short_tokens, tokens if plan.has_long else 0, most) * kv_heads * group
        return cls(short_tokens=short_tokens, parts=parts, positions=most, head_dim=head_dim)

    @classmethod
    def worst(
        cls, *, rows: int, tokens: int, positions: int, kv_heads: int, group: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> PartsSize:  # fmt: skip
        """Of any step of no more rows, query tokens and positions."""
        short_tile, _ = tiles_for(group, dtype, head_dim, device)
        short_tokens = min(tokens, rows * (short_tile // group))
        parts = _parts(short_tokens, tokens, positions) * kv_heads * group
        return cls(short_tokens=short_tokens, parts=parts, positions=positions, head_dim=head_dim)


def with_parts(
    plan: AttentionPlan, *, rows: int, tokens: int, kv_heads: int, group: int, head_dim: int,
    kept: Parts | None = None,
) -> AttentionPlan:  # fmt: skip
    """The plan with room for its parts: that which is `kept`, else an allocation of its own."""
    if kept is not None:
        return replace(plan, parts=kept)
    size = PartsSize.of(
        plan, rows=rows, tokens=tokens, kv_heads=kv_heads, group=group, head_dim=head_dim
    )
    return replace(plan, parts=Parts.of(size, plan.short_ends.device))


def _parts(short_tokens: int, long_tokens: int, positions: int) -> int:
    """Per head: short rows and long ones use the same room, one after the other."""
    return max(
        short_tokens * _splits(positions, SPLIT), long_tokens * _splits(positions, LONG_SPLIT)
    )


def _splits(context_max: int, split: int) -> int:
    """Those of which parts are kept: none if there is but one."""
    splits = -(-context_max // split)
    return splits if splits > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Room for the parts of a step's results: one serves all its layers, and every later step."""

    sums: Tensor
    tops: Tensor
    totals: Tensor

    @classmethod
    def of(cls, size: PartsSize, device: torch.device) -> Parts:
        # Each begins at a multiple of 16 bytes, or a kernel would be compiled anew.
        kept = -(-size.parts // 4) * 4
        tops, totals = torch.empty((2, kept), dtype=torch.float32, device=device)
        sums = torch.empty((kept, dim_tile(size.head_dim)), dtype=torch.float32, device=device)
        return cls(sums=sums, tops=tops, totals=totals)

    def require_room(self, size: PartsSize) -> None:
        """ValueError unless a step of this size fits."""
        require(len(self.sums) >= size.parts, "parts", f"must hold {size.parts} parts")
        width = dim_tile(size.head_dim)
        require(self.sums.size(1) == width, "parts", f"must be for heads of {width}")


def dim_tile(head_dim: int) -> int:
    """Columns of a tile: the least that a tensor core takes, or all of a head's."""
    return max(16, jit.power_of_two(head_dim))


def tiles_for(
    group: int, dtype: torch.dtype, head_dim: int | None, device: torch.device
) -> tuple[int, int]:
    """(short, long) rows of a tile: at least one token with all its heads.

    Float32 multiplies without tensor cores, and its products must all fit into registers.
    """
    short = max(SHORT_TILE, jit.power_of_two(group))
    if dtype == torch.float32:
        return short, short
    is_wide = head_dim is not None and head_dim <= WIDE_HEAD_DIM_MAX and jit.is_sm_90(device)
    return short, WIDE_TILE if is_wide else LONG_TILE


def attention_plan_reference(
    query_starts: Tensor, context_lengths: Tensor, short_tokens: int, long_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of correct: short_ends, long_ends, short_starts for tokens of one tile."""
    counts = query_starts.diff()
    is_live = (counts > 0) & (context_lengths > 0)
    is_short = is_live & (counts <= short_tokens)
    splits = (context_lengths + SPLIT - 1) // SPLIT
    tiles = (counts + long_tokens - 1) // long_tokens
    tiles = tiles * ((context_lengths + LONG_SPLIT - 1) // LONG_SPLIT)
    ends = torch.zeros((3, len(counts) + 1), dtype=torch.int32, device=counts.device)
    ends[0, 1:] = torch.where(is_short, splits, 0).cumsum(0)
    ends[1, 1:] = torch.where(is_live & ~is_short, tiles, 0).cumsum(0)
    ends[2, 1:] = torch.where(is_short, counts, 0).cumsum(0)
    return ends[0], ends[1], ends[2]


@jit.compiled
def _plan_kernel(
    query_starts: pointer, context_lengths: pointer,
    short_ends: pointer, long_ends: pointer, short_starts: pointer, rows: scalar,
    SHORT_TOKENS: constexpr, LONG_TOKENS: constexpr, SPLIT: constexpr, LONG_SPLIT: constexpr,
    TILE: constexpr,
) -> None:  # fmt: skip
    shorts = tl.zeros((), tl.int32)
    longs = tl.zeros((), tl.int32)
    tokens = tl.zeros((), tl.int32)
    tl.store(short_ends, shorts)
    tl.store(long_ends, longs)
    tl.store(short_starts, tokens)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        is_in = row < rows
        begin = tl.load(query_starts + row, mask=is_in, other=0)
        count = tl.load(query_starts + row + 1, mask=is_in, other=0) - begin
        context = tl.load(context_lengths + row, mask=is_in, other=0)
        is_live = (count > 0) & (context > 0)
        is_short = is_live & (count <= SHORT_TOKENS)
        splits = tl.where(is_short, (context + SPLIT - 1) // SPLIT, 0)
        tiles = (count + LONG_TOKENS - 1) // LONG_TOKENS
        tiles *= (context + LONG_SPLIT - 1) // LONG_SPLIT
        tiles = tl.where(is_live & (count > SHORT_TOKENS), tiles, 0)
        counts = tl.where(is_short, count, 0)
        tl.store(short_ends + 1 + row, shorts + tl.cumsum(splits, 0), mask=is_in)
        tl.store(long_ends + 1 + row, longs + tl.cumsum(tiles, 0), mask=is_in)
        tl.store(short_starts + 1 + row, tokens + tl.cumsum(counts, 0), mask=is_in)
        shorts += tl.sum(splits, 0)
        longs += tl.sum(tiles, 0)
        tokens += tl.sum(counts, 0)


_TILE = 256


def plan_attention(
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    group: int,
    dtype: torch.dtype,
    queries_max: int | None = None,
    context_max: int | None = None,
    head_dim: int | None = None,
) -> AttentionPlan:
    """The tasks of a step, for `group` heads per KV head; without `head_dim`, in narrow tiles.

    No row has more than `queries_max` query tokens, or positions than `context_max`: what the host
    knows, None when it does not. Nothing notices a bound that is too low.
    """
    rows = context_lengths.size(0)
    require_ids(context_lengths, "context_lengths", dtype=torch.int32, shape=(rows,))
    require_ids(query_starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    require(1 <= group <= GROUP_MAX, "group", f"must be between 1 and {GROUP_MAX}")
    short, long = tiles_for(group, dtype, head_dim, query_starts.device)
    short_tokens = short // group
    # Each begins at a multiple of 16 bytes whatever the rows, or a kernel would be compiled anew.
    width = -(-(rows + 1) // 4) * 4
    ends = torch.empty((3, width), dtype=torch.int32, device=query_starts.device)[:, : rows + 1]
    _plan_kernel[(1,)](
        query_starts, context_lengths, ends[0], ends[1], ends[2], rows,
        SHORT_TOKENS=short_tokens, LONG_TOKENS=long // group,
        SPLIT=SPLIT, LONG_SPLIT=LONG_SPLIT, TILE=_TILE,
    )  # fmt: skip
    return AttentionPlan(
        short_ends=ends[0],
        long_ends=ends[1],
        short_starts=ends[2],
        short_tile=short,
        long_tile=long,
        short_tokens=min(short_tokens, queries_max or short_tokens),
        has_long=queries_max is None or queries_max > short_tokens,
        context_max=context_max,
    )
