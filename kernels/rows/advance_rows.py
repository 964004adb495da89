"""advance_rows: the rows on the device take what a step computed and sampled.

formula  of each live row that computed: num_computed_tokens += its tokens; if that are num_tokens
             now, it samples; if that is id t, not broken: num_tokens += 1; last_token = t; it has
             ended if t is one of its stops (and num_tokens, before, >= masked_until) or if it knows
             `limit` tokens now
         a broken sample (logits that are not numbers) ends its row and gives it no token
shapes   RowState, Asked as in `step_rows`, of the same step; token_ids [R] int64, ok [R] bool, read
             where a row samples
returns  [R] int64: the token, BROKEN, or ABSENT where the row does not sample: it had ended before
         the step, or goes on with its prompt
writes   state.num_computed_tokens, num_tokens, last_token, is_live, of the rows asked for; what its
         rules must know of the token: rules.recent, and of rows with penalties rules.seen
cost     one program per row; 4 bytes per stop of its list, about a microsecond
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.checks import require_ids
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.rows.edit_rows import PENALTIES, RECENT, RuleState
from kernels.rows.step_rows import Asked, RowState, live_counts

ABSENT: Final = -1
BROKEN: Final = -2


def advance_rows_reference(
    state: RowState, rules: RuleState, asked: Asked, token_ids: Tensor, ok: Tensor
) -> Tensor:
    """The definition of correct."""
    slots, counts = live_counts(state, asked)
    result = torch.full_like(token_ids, ABSENT)
    state.num_computed_tokens.index_add_(0, slots, counts)
    samples = (counts > 0) & (state.num_computed_tokens[slots] == state.num_tokens[slots])
    slot, token, is_ok = slots[samples], token_ids[samples], ok[samples]
    known = state.num_tokens[slot]
    is_stop = (state.stops[slot] == token.unsqueeze(1)).any(1) & (known >= state.masked_until[slot])
    is_over = is_stop | (known + 1 >= state.limit[slot]) | ~is_ok
    its_slot, its_token = slot[is_ok], token[is_ok]
    rules.recent[its_slot, known[is_ok] % RECENT] = its_token.int()
    counts_it = (rules.kinds[its_slot] & PENALTIES) > 0
    place = its_slot[counts_it], its_token[counts_it]
    rules.seen[place] = rules.seen[place].clamp_min(1) + 1
    state.num_tokens[slot] = known + is_ok
    state.last_token[slot] = torch.where(is_ok, token, state.last_token[slot])
    state.is_live[slot] = (~is_over).long()
    result[samples] = torch.where(is_ok, token, BROKEN)
    return result


@jit.compiled
def _advance_rows_kernel(
    is_live: pointer, num_tokens: pointer, num_computed_tokens: pointer, limit: pointer,
    masked_until: pointer, last_token: pointer, stops: pointer,
    slots: pointer, starts: pointer,
    token_ids: pointer, ok: pointer, result: pointer,
    kinds: pointer, seen: pointer, recent: pointer, stops_count: scalar, vocab: stride,
    ABSENT: constexpr, BROKEN: constexpr, STOPS_TILE: constexpr,
    PENALTIES: constexpr, RECENT: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    lives = tl.load(is_live + slot, mask=slot >= 0, other=0) > 0
    count = tl.load(starts + row + 1) - tl.load(starts + row)
    before = tl.load(num_computed_tokens + slot, mask=lives, other=0)
    knows = tl.load(num_tokens + slot, mask=lives, other=0)
    is_taken = lives & (count > 0) & (before + count == knows)
    token = tl.load(token_ids + row, mask=is_taken, other=0)
    is_ok = tl.load(ok + row, mask=is_taken, other=0) != 0
    is_stop = knows < 0
    for at in range(0, stops_count, STOPS_TILE):
        index = at + tl.arange(0, STOPS_TILE)
        is_in = (index < stops_count) & is_taken
        stop = tl.load(stops + slot * stops_count + index, mask=is_in, other=-1)
        is_stop = is_stop | (tl.sum((stop == token).to(tl.int32), 0) > 0)
    is_stop = is_stop & (knows >= tl.load(masked_until + slot, mask=is_taken, other=0))
    is_over = is_stop | (knows + 1 >= tl.load(limit + slot, mask=is_taken, other=0))
    goes_on = is_ok & (is_over == 0)
    # One thread writes what each has read for itself: not before all have, at the sum's barrier.
    tl.store(num_computed_tokens + slot, before + count, mask=lives)
    tl.store(num_tokens + slot, knows + 1, mask=is_taken & is_ok)
    tl.store(last_token + slot, token, mask=is_taken & is_ok)
    tl.store(is_live + slot, goes_on.to(tl.int64), mask=is_taken)
    tl.store(recent + slot * RECENT + knows % RECENT, token.to(tl.int32), mask=is_taken & is_ok)
    counts = is_taken & is_ok
    counts = counts & ((tl.load(kinds + slot, mask=counts, other=0) & PENALTIES) > 0)
    times = tl.load(seen + slot * vocab + token, mask=counts, other=0)
    tl.store(seen + slot * vocab + token, tl.maximum(times, 1) + 1, mask=counts)
    told = tl.where(is_taken, tl.where(is_ok, token, BROKEN), ABSENT)
    tl.store(result + row, told)


_STOPS_TILE = 64


def _advance_rows_triton(
    state: RowState, rules: RuleState, asked: Asked, token_ids: Tensor, ok: Tensor
) -> Tensor:
    result = torch.empty_like(token_ids)
    _advance_rows_kernel[(asked.slots.numel(),)](
        state.is_live, state.num_tokens, state.num_computed_tokens, state.limit, state.masked_until,
        state.last_token, state.stops, asked.slots, asked.starts,
        token_ids, ok, result, rules.kinds, rules.seen, rules.recent,
        state.stops.size(1), rules.seen.size(1),
        ABSENT=ABSENT, BROKEN=BROKEN, STOPS_TILE=_STOPS_TILE, PENALTIES=PENALTIES, RECENT=RECENT,
    )  # fmt: skip
    return result


_PATHS = {
    "triton": _advance_rows_triton,
    "native": advance_rows_reference,
    "torch": advance_rows_reference,
}


def advance_rows(
    state: RowState, rules: RuleState, asked: Asked, token_ids: Tensor, ok: Tensor
) -> Tensor:
    """What became of each row's sample; the rows have gone on."""
    rows = asked.slots.numel()
    require_ids(token_ids, "token_ids", dtype=torch.int64, shape=(rows,))
    require_ids(ok, "ok", dtype=torch.bool, shape=(rows,))
    return _PATHS[dispatch.path_for(asked.slots)](state, rules, asked, token_ids, ok)
