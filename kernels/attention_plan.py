"""attention_plan: share a step's attention out into tasks, once per step, for all its layers.

A row of few query tokens (decode) is short: its tokens are one tile, its context is cut into splits
of SPLIT positions, a task each. Any other row is long: cut into tiles of query tokens, a task each,
which walks the whole context that its tile sees. A tile holds tokens x the heads of a KV head.

formula  short_ends[r] = tasks of the short rows before r; long_ends likewise
         row 0 |-- split 0 --|-- split 1 --|- 2 -|  row 1 |-- split 0 --|      short_ends 0, 3, 4
shapes   query_starts     [rows + 1] int32, ascending from 0
         context_lengths  [rows] int32
returns  two tensors [rows + 1] int32; nothing is read back to the host
cost     reads 8 bytes and writes 8 per row, in one program: a few microseconds at 1024 rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import jit
from kernels.checks import require, require_ids
from kernels.jit import constexpr, pointer, scalar, tl

# Positions per split: fixed, because the order of sums follows from it. 512 positions of 8 KV heads
# are 64 tasks per 4096 tokens, and the partial sums are 1.6 % of the bytes read (group of 4, bf16).
SPLIT: Final = 512
# Rows of a tile: the least that a tensor core takes, and what one program's registers hold.
SHORT_TILE: Final = 16
LONG_TILE: Final = 64
GROUP_MAX: Final = LONG_TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Of one step; a tile is counted in rows, tokens x heads of a KV head."""

    short_ends: Tensor
    long_ends: Tensor
    short_tile: int
    long_tile: int
    # Of a short tile, those that a row of this step may use: decode keeps no more partial sums.
    short_lines: int
    # What the host knows without asking the device, so as not to launch for nothing.
    has_long: bool
    context_max: int | None


def tiles_for(group: int, dtype: torch.dtype) -> tuple[int, int]:
    """(short, long) rows of a tile: at least one token with all its heads.

    Float32 multiplies without tensor cores, and its products must all fit into registers.
    """
    short = max(SHORT_TILE, jit.power_of_two(group))
    return short, short if dtype == torch.float32 else LONG_TILE


def attention_plan_reference(
    query_starts: Tensor, context_lengths: Tensor, short_tokens: int, long_tokens: int
) -> tuple[Tensor, Tensor]:
    """The definition of correct: (short_ends, long_ends) for tokens of one tile."""
    counts = query_starts.diff()
    is_live = (counts > 0) & (context_lengths > 0)
    is_short = counts <= short_tokens
    splits = (context_lengths + SPLIT - 1) // SPLIT
    tiles = (counts + long_tokens - 1) // long_tokens
    ends = torch.zeros((2, len(counts) + 1), dtype=torch.int32, device=counts.device)
    ends[0, 1:] = torch.where(is_live & is_short, splits, 0).cumsum(0)
    ends[1, 1:] = torch.where(is_live & ~is_short, tiles, 0).cumsum(0)
    return ends[0], ends[1]


@jit.compiled
def _plan_kernel(
    query_starts: pointer,
    context_lengths: pointer,
    short_ends: pointer,
    long_ends: pointer,
    rows: scalar,
    SHORT_TOKENS: constexpr,
    LONG_TOKENS: constexpr,
    SPLIT: constexpr,
    TILE: constexpr,
) -> None:
    shorts = tl.zeros((), tl.int32)
    longs = tl.zeros((), tl.int32)
    tl.store(short_ends, shorts)
    tl.store(long_ends, longs)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        is_in = row < rows
        begin = tl.load(query_starts + row, mask=is_in, other=0)
        count = tl.load(query_starts + row + 1, mask=is_in, other=0) - begin
        context = tl.load(context_lengths + row, mask=is_in, other=0)
        is_live = (count > 0) & (context > 0)
        is_short = count <= SHORT_TOKENS
        splits = tl.where(is_live & is_short, (context + SPLIT - 1) // SPLIT, 0)
        tiles = tl.where(
            is_live & (count > SHORT_TOKENS), (count + LONG_TOKENS - 1) // LONG_TOKENS, 0
        )
        tl.store(short_ends + 1 + row, shorts + tl.cumsum(splits, 0), mask=is_in)
        tl.store(long_ends + 1 + row, longs + tl.cumsum(tiles, 0), mask=is_in)
        shorts += tl.sum(splits, 0)
        longs += tl.sum(tiles, 0)


_TILE = 256


def plan_attention(
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    group: int,
    dtype: torch.dtype,
    queries_max: int | None = None,
    context_max: int | None = None,
) -> AttentionPlan:
    """The tasks of a step, for `group` heads per KV head.

    No row has more than `queries_max` query tokens, or positions than `context_max`: what the host
    knows, None when it does not. Nothing notices a bound that is too low.
    """
    rows = context_lengths.size(0)
    require_ids(context_lengths, "context_lengths", dtype=torch.int32, shape=(rows,))
    require_ids(query_starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    require(1 <= group <= GROUP_MAX, "group", f"must be between 1 and {GROUP_MAX}")
    short, long = tiles_for(group, dtype)
    short_tokens = short // group
    # Both begin at a multiple of 16 bytes whatever the rows, or a kernel would be compiled anew.
    width = -(-(rows + 1) // 4) * 4
    ends = torch.empty((2, width), dtype=torch.int32, device=query_starts.device)[:, : rows + 1]
    _plan_kernel[(1,)](
        query_starts,
        context_lengths,
        ends[0],
        ends[1],
        rows,
        SHORT_TOKENS=short_tokens,
        LONG_TOKENS=long // group,
        SPLIT=SPLIT,
        TILE=_TILE,
    )
    return AttentionPlan(
        short_ends=ends[0],
        long_ends=ends[1],
        short_tile=short,
        long_tile=long,
        short_lines=group * min(short_tokens, queries_max or short_tokens),
        has_long=queries_max is None or queries_max > short_tokens,
        context_max=context_max,
    )
