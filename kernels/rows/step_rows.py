"""step_rows: what a step computes, worked out from the rows that live on the device.

formula  a row that has ended computes nothing, whatever is asked; the others close up:
         starts[r] = tokens of the live rows before r
         token i of row r   position = num_computed_tokens[r] + i, in blocks[position / size] of its
                            table, of each layer group's; its id is the row's own last token if it
                            is the last known, else given
         places beyond the last token are padding: token 0, position 0, written nowhere
shapes   RowState, one entry per slot: is_live (0 or 1), num_tokens, num_computed_tokens, limit,
                       masked_until, last_token [slots] int64;
                       blocks [groups, slots, width], stops [slots, any] int32
         Asked, of R rows and T tokens: slots [R] int64, distinct, -1 = padding;
                       starts [R + 1] int64 ascending from 0, to at most T; token_ids [T] int64,
                       read where the host knows them
returns  RowStep; all tables as `paged_attention` and `rope_write_kv` take them, and of each row the
         index of its last token (where it has ended, of any)
reads    nothing back to the host: the launch depends on R and T only
cost     each row adds up the counts before it: R * R / 2 loads of 8 bytes that stay in the cache, a
         few microseconds at 1024 rows; besides, 40 bytes per token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.checks import require, require_ids
from kernels.jit import constexpr, pointer, scalar, tl


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """The rows on the device, by slot."""

    is_live: Tensor
    num_tokens: Tensor
    num_computed_tokens: Tensor
    limit: Tensor
    masked_until: Tensor
    last_token: Tensor
    blocks: Tensor
    stops: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.is_live.shape)
        for name in (
            "is_live",
            "num_tokens",
            "num_computed_tokens",
            "limit",
            "masked_until",
            "last_token",
        ):
            require_ids(getattr(self, name), name, dtype=torch.int64, shape=shape)
        blocks, stops = self.blocks, self.stops
        of_group = (blocks.size(0), *shape, blocks.size(-1))
        require_ids(blocks, "blocks", dtype=torch.int32, shape=of_group)
        require_ids(stops, "stops", dtype=torch.int32, shape=(*shape, stops.size(-1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The rows and tokens that the host wants computed."""

    slots: Tensor
    starts: Tensor
    token_ids: Tensor

    def __post_init__(self) -> None:
        rows = self.slots.numel()
        require_ids(self.slots, "slots", dtype=torch.int64, shape=(rows,))
        require_ids(self.starts, "starts", dtype=torch.int64, shape=(rows + 1,))
        tokens = self.token_ids.numel()
        require_ids(self.token_ids, "token_ids", dtype=torch.int64, shape=(tokens,))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """What will be computed."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [groups, T] int64
    query_starts: Tensor  # [R + 1] int32
    context_lengths: Tensor  # [R] int32
    last_tokens: Tensor  # [R] int64


def live_counts(state: RowState, asked: Asked) -> tuple[Tensor, Tensor]:
    """(slot of each row, 0 for padding; tokens it computes)."""
    slots = asked.slots.clamp_min(0)
    is_live = (asked.slots >= 0) & (state.is_live[slots] > 0)
    return slots, torch.where(is_live, asked.starts.diff(), 0)


def step_rows_reference(
    state: RowState, asked: Asked, block_size: int, contexts: Tensor | None = None
) -> RowStep:
    """The definition of correct."""
    rows, tokens = asked.slots.numel(), asked.token_ids.numel()
    slots, counts = live_counts(state, asked)
    ends = counts.cumsum(0)
    starts = ends - counts
    done = state.num_computed_tokens[slots]
    token = torch.arange(tokens, device=slots.device)
    row = torch.searchsorted(ends, token, right=True)
    is_there = row < rows
    row = row.clamp_max(rows - 1)
    index = token - starts[row]
    slot, position = slots[row], torch.where(is_there, done[row] + index, 0)
    given = asked.token_ids[(asked.starts[row] + index).clamp_max(max(tokens - 1, 0))]
    ids = torch.where(position == state.num_tokens[slot] - 1, state.last_token[slot], given)
    block = state.blocks[:, slot, position // block_size].long()
    context_lengths = torch.where(counts > 0, done + counts, 0).int()
    return RowStep(
        token_ids=torch.where(is_there, ids, 0),
        positions=position,
        slot_mapping=torch.where(is_there, block * block_size + position % block_size, -1),
        query_starts=torch.cat((ends.new_zeros(1), ends)).int(),
        context_lengths=context_lengths if contexts is None else contexts.copy_(context_lengths),
        last_tokens=(ends - 1).clamp_min(0),
    )


@jit.compiled
def _step_rows_kernel(
    is_live: pointer, num_tokens: pointer, num_computed_tokens: pointer, last_token: pointer,
    blocks: pointer,
    slots: pointer, starts: pointer, given: pointer,
    token_ids: pointer, positions: pointer, slot_mapping: pointer,
    query_starts: pointer, context_lengths: pointer, last_tokens: pointer,
    rows: scalar, tokens: scalar,
    table_stride: scalar, group_stride: scalar, mapping_stride: scalar,
    GROUPS: constexpr, BLOCK_SIZE: constexpr, ROWS_TILE: constexpr, TOKENS_TILE: constexpr,
) -> None:  # fmt: skip
    """One row; the program after the last row pads."""
    own = tl.program_id(0)
    start = tl.zeros((), tl.int64)
    for at in range(0, rows, ROWS_TILE):
        row = at + tl.arange(0, ROWS_TILE)
        slot = tl.load(slots + row, mask=row < own, other=-1)
        lives = tl.load(is_live + slot, mask=slot >= 0, other=0) > 0
        count = tl.load(starts + row + 1, mask=lives, other=0)
        count -= tl.load(starts + row, mask=lives, other=0)
        start += tl.sum(count, 0)
    tl.store(query_starts + own, start.to(tl.int32))
    if own == rows:
        for pad in range(start, tokens, TOKENS_TILE):
            token = pad + tl.arange(0, TOKENS_TILE)
            nothing = tl.zeros([TOKENS_TILE], tl.int64)
            tl.store(token_ids + token, nothing, mask=token < tokens)
            tl.store(positions + token, nothing, mask=token < tokens)
            for group in range(GROUPS):
                its_mapping = slot_mapping + group * mapping_stride
                tl.store(its_mapping + token, nothing - 1, mask=token < tokens)
    else:
        asked_slot = tl.load(slots + own)
        is_alive = tl.load(is_live + asked_slot, mask=asked_slot >= 0, other=0) > 0
        own_slot = tl.maximum(asked_slot, 0)
        asked = tl.load(starts + own)
        own_count = tl.where(is_alive, tl.load(starts + own + 1) - asked, 0)
        first = tl.load(num_computed_tokens + own_slot)
        context = tl.where(own_count > 0, first + own_count, 0)
        tl.store(context_lengths + own, context.to(tl.int32))
        tl.store(last_tokens + own, tl.maximum(start + own_count - 1, 0))
        newest, its_id = tl.load(num_tokens + own_slot) - 1, tl.load(last_token + own_slot)
        for begin in range(0, own_count, TOKENS_TILE):
            index = begin + tl.arange(0, TOKENS_TILE)
            is_in, position = index < own_count, first + index
            ids = tl.load(given + asked + index, mask=is_in & (position != newest), other=0)
            to = start + index
            tl.store(token_ids + to, tl.where(position == newest, its_id, ids), mask=is_in)
            tl.store(positions + to, position, mask=is_in)
            entry = own_slot * table_stride + position // BLOCK_SIZE
            for group in range(GROUPS):
                block = tl.load(blocks + entry, mask=is_in, other=0)
                entry += group_stride
                place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
                tl.store(slot_mapping + group * mapping_stride + to, place, mask=is_in)


_ROWS_TILE = 256
_TOKENS_TILE = 128


def _step_rows_triton(
    state: RowState, asked: Asked, block_size: int, contexts: Tensor | None
) -> RowStep:
    rows, tokens = asked.slots.numel(), asked.token_ids.numel()
    groups = state.blocks.size(0)

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        # One by one: a view may begin where Triton would compile anew for it.
        return torch.empty(size, dtype=dtype, device=asked.slots.device)

    step = RowStep(
        token_ids=empty(tokens, torch.int64),
        positions=empty(tokens, torch.int64),
        # An even number apart, for the same reason.
        slot_mapping=empty(groups * (tokens + tokens % 2), torch.int64).view(groups, -1)[
            :, :tokens
        ],
        query_starts=empty(rows + 1, torch.int32),
        context_lengths=empty(rows, torch.int32) if contexts is None else contexts,
        last_tokens=empty(rows, torch.int64),
    )
    _step_rows_kernel[(rows + 1,)](
        state.is_live, state.num_tokens, state.num_computed_tokens, state.last_token, state.blocks,
        asked.slots, asked.starts, asked.token_ids,
        step.token_ids, step.positions, step.slot_mapping,
        step.query_starts, step.context_lengths, step.last_tokens,
        rows, tokens, state.blocks.stride(1), state.blocks.stride(0), step.slot_mapping.stride(0),
        GROUPS=groups, BLOCK_SIZE=block_size, ROWS_TILE=_ROWS_TILE, TOKENS_TILE=_TOKENS_TILE,
    )  # fmt: skip
    return step


_PATHS = {
    "triton": _step_rows_triton,
    "native": step_rows_reference,
    "torch": step_rows_reference,
}


def step_rows(
    state: RowState, asked: Asked, block_size: int, contexts: Tensor | None = None
) -> RowStep:
    """Of the rows asked for, what those that live compute. At least one row.

    `contexts`: where the context lengths are to lie, [R] int32.
    """
    require(asked.slots.numel() >= 1, "slots", "must have a row")
    require(block_size >= 1, "block_size", "must be at least 1")
    if contexts is not None:
        require_ids(contexts, "contexts", dtype=torch.int32, shape=(asked.slots.numel(),))
    return _PATHS[dispatch.path_for(asked.slots)](state, asked, block_size, contexts)
