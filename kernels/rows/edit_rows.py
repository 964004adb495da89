"""edit_rows: what rows on the device change in their own logits before sampling, apart.

formula  that of `kernels.sampling.logit_edits`, of the rules that lie beside the rows: biases;
         penalties of every token seen; -inf for stop tokens before `masked_until`, for the last
         token of a bad word whose others are the row's newest, and for what is not allowed.
         Rows that have any are written to `edited`; the logits stay as the model made them
shapes   logits [R, vocab] float32 | bfloat16 | float16, contiguous; edited EditedRows of as many;
         slots [R] int64, -1 = no rules
         RuleState, one entry per slot: kinds (which rules there are), logprobs (-1 = none), prompt
                       [slots] int64; repetition, presence, frequency [slots] float32;
                       bias_ids [slots, any] int32, padded with -1, biases [slots, any] float32;
                       seen [slots, vocab] int32: 0 never, 1 in the prompt, 1 + n: n times sampled;
                       allowed [slots, vocab / 32] int32, a bit per token;
                       words [slots, any, RECENT] int32, each at the end of its line after -1;
                       recent [slots, RECENT] int32: the token of index t at t modulo RECENT
reads    nothing back to the host: the launches depend on R only
cost     four launches; programs of rows without rules end at once. A row with any is widened, 6
         bytes per token of the vocabulary; one with penalties or a list of allowed tokens takes 12
         more
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.checks import require, require_ids
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.rows.step_rows import RowState
from kernels.sampling.edited_rows import EditedRows
from kernels.sampling.logprobs import require_logits
from kernels.sampling.sortable_keys import CHUNK, chunks_of

PENALTIES: Final = 1
BIASES: Final = 2
ALLOWED: Final = 4
WORDS: Final = 8
# Tokens of the longest bad word.
RECENT: Final = 32
BITS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleState:
    """The rules of the rows on the device, by slot."""

    kinds: Tensor
    logprobs: Tensor
    prompt: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias_ids: Tensor
    biases: Tensor
    seen: Tensor
    allowed: Tensor
    words: Tensor
    recent: Tensor

    def __post_init__(self) -> None:
        slots, biases, words = self.kinds.size(0), self.biases.size(1), self.words.size(1)
        vocab = self.seen.size(1)
        for name in ("kinds", "logprobs", "prompt"):
            require_ids(getattr(self, name), name, dtype=torch.int64, shape=(slots,))
        for name in ("repetition", "presence", "frequency"):
            require_ids(getattr(self, name), name, dtype=torch.float32, shape=(slots,))
        require_ids(self.biases, "biases", dtype=torch.float32, shape=(slots, biases))
        for name, shape in (
            ("bias_ids", (slots, biases)),
            ("seen", (slots, vocab)),
            ("allowed", (slots, -(-vocab // BITS))),
            ("words", (slots, words, RECENT)),
            ("recent", (slots, RECENT)),
        ):
            require_ids(getattr(self, name), name, dtype=torch.int32, shape=shape)


def edit_rows_reference(
    logits: Tensor, edited: EditedRows, state: RowState, rules: RuleState, slots: Tensor
) -> None:
    """The definition of correct."""
    edited.is_edited.zero_()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0 or not _has_rules(state, rules, slot):
            continue
        edited.is_edited[row] = 1
        own, kinds = edited.logits[row], int(rules.kinds[slot])
        own.copy_(logits[row])
        if kinds & BIASES:
            is_there = rules.bias_ids[slot] >= 0
            own[rules.bias_ids[slot][is_there].long()] += rules.biases[slot][is_there]
        if kinds & PENALTIES:
            _penalise(own, rules, slot)
        own[_forbidden(state, rules, slot)] = -math.inf
        if kinds & ALLOWED:
            token = torch.arange(own.numel(), device=own.device)
            is_allowed = (rules.allowed[slot][token // BITS] >> (token % BITS)) & 1
            own[is_allowed == 0] = -math.inf


def _has_rules(state: RowState, rules: RuleState, slot: int) -> bool:
    has_stops = state.num_tokens[slot] < state.masked_until[slot]
    return bool(has_stops) or int(rules.kinds[slot]) > 0


def _penalise(own: Tensor, rules: RuleState, slot: int) -> None:
    seen, repetition = rules.seen[slot], rules.repetition[slot]
    counts = (seen - 1).clamp_min(0).float()
    penalised = torch.where(own > 0, own / repetition, own * repetition)
    penalised -= rules.frequency[slot] * counts
    penalised -= rules.presence[slot] * (counts > 0)
    own.copy_(torch.where(seen > 0, penalised, own))


def _forbidden(state: RowState, rules: RuleState, slot: int) -> Tensor:
    known, found = state.num_tokens[slot], [state.stops.new_zeros(0)]
    if known < state.masked_until[slot]:
        found.append(state.stops[slot])
    if rules.kinds[slot] & WORDS:
        words = rules.words[slot]
        index = known - RECENT + 1 + torch.arange(RECENT - 1, device=words.device)
        is_said = (words[:, :-1] == rules.recent[slot][index % RECENT]) & (
            index >= rules.prompt[slot]
        )
        is_next = ((words[:, :-1] < 0) | is_said).all(1)
        found.append(words[is_next, -1])
    ids = torch.cat(found).long()
    return ids[ids >= 0]


@jit.compiled
def _widen_kernel(
    logits: pointer, edited: pointer, is_edited: pointer, slots: pointer, kinds: pointer,
    num_tokens: pointer, masked_until: pointer, vocab: stride, CHUNK: constexpr,
) -> None:  # fmt: skip
    """Of a chunk of a row that has rules: its logits as they are."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    kind = tl.load(kinds + slot, mask=slot >= 0, other=0)
    knows = tl.load(num_tokens + slot, mask=slot >= 0, other=0)
    has_rules = (kind > 0) | (knows < tl.load(masked_until + slot, mask=slot >= 0, other=0))
    if chunk == 0:
        tl.store(is_edited + row, has_rules.to(tl.int32))
    if has_rules:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = tl.load(logits + row * vocab + token, mask=token < vocab)
        tl.store(edited + row * vocab + token, logit.to(tl.float32), mask=token < vocab)


@jit.compiled
def _bias_kernel(
    edited: pointer, slots: pointer, kinds: pointer, bias_ids: pointer, biases: pointer,
    vocab: stride, count: scalar, BIASES: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    """Of a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (tl.load(kinds + slot, mask=slot >= 0, other=0) & BIASES) > 0:
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            token = tl.load(bias_ids + slot * count + at, mask=at < count, other=-1)
            is_in = token >= 0
            place = edited + row * vocab + token
            bias = tl.load(biases + slot * count + at, mask=is_in, other=0.0)
            tl.store(place, tl.load(place, mask=is_in, other=0.0) + bias, mask=is_in)


@jit.compiled
def _penalise_kernel(
    edited: pointer, slots: pointer, kinds: pointer, repetition: pointer, presence: pointer,
    frequency: pointer, seen: pointer, allowed: pointer, vocab: stride, words: scalar,
    PENALTIES: constexpr, ALLOWED: constexpr, BITS: constexpr, CHUNK: constexpr,
) -> None:  # fmt: skip
    """Of a chunk of a row with penalties, or with a list of allowed tokens."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    kind = tl.load(kinds + slot, mask=slot >= 0, other=0)
    if (kind & (PENALTIES | ALLOWED)) > 0:
        token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        is_in = token < vocab
        place = edited + row * vocab + token
        logit = tl.load(place, mask=is_in, other=0.0)
        is_penal = is_in & ((kind & PENALTIES) > 0)
        times = tl.load(seen + slot * vocab + token, mask=is_penal, other=0)
        count = tl.maximum(times - 1, 0).to(tl.float32)
        factor = tl.load(repetition + slot)
        penalised = tl.where(logit > 0.0, tl.div_rn(logit, factor), logit * factor)
        penalised -= tl.load(frequency + slot) * count
        penalised -= tl.where(count > 0.0, tl.load(presence + slot), 0.0)
        logit = tl.where(times > 0, penalised, logit)
        is_listed = is_in & ((kind & ALLOWED) > 0)
        bits = tl.load(allowed + slot * words + token // BITS, mask=is_listed, other=-1)
        is_allowed = ((bits >> (token % BITS)) & 1) > 0
        tl.store(place, tl.where(is_allowed, logit, float("-inf")), mask=is_in)


@jit.compiled
def _forbid_kernel(
    edited: pointer, slots: pointer, kinds: pointer, num_tokens: pointer, masked_until: pointer,
    stops: pointer, prompt: pointer, words: pointer, recent: pointer,
    vocab: stride, stops_count: scalar, words_count: scalar,
    WORDS: constexpr, RECENT: constexpr, TILE: constexpr, WORDS_TILE: constexpr,
) -> None:  # fmt: skip
    """Of a row: stop tokens while they are masked, and what would complete a bad word."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    own = edited + row * vocab
    knows = tl.load(num_tokens + slot, mask=slot >= 0, other=0)
    if knows < tl.load(masked_until + slot, mask=slot >= 0, other=0):
        for start in range(0, stops_count, TILE):
            at = start + tl.arange(0, TILE)
            stop = tl.load(stops + slot * stops_count + at, mask=at < stops_count, other=-1)
            tl.store(own + stop, float("-inf"), mask=stop >= 0)
    if (tl.load(kinds + slot, mask=slot >= 0, other=0) & WORDS) > 0:
        column = tl.arange(0, RECENT)
        index = knows - RECENT + 1 + column
        is_own = (index >= tl.load(prompt + slot)) & (column < RECENT - 1)
        said = tl.load(recent + slot * RECENT + (index + RECENT) % RECENT, mask=is_own, other=-2)
        for start in range(0, words_count, WORDS_TILE):
            word = start + tl.arange(0, WORDS_TILE)
            line = words + (slot * words_count + word)[:, None] * RECENT + column[None, :]
            tokens = tl.load(line, mask=(word < words_count)[:, None], other=-1)
            is_last = (column == RECENT - 1)[None, :]
            differs = (tokens >= 0) & (tokens != said[None, :]) & (is_last == 0)
            last = tl.max(tl.where(is_last, tokens, -1), 1)
            is_next = (tl.max(differs.to(tl.int32), 1) == 0) & (last >= 0)
            tl.store(own + last, float("-inf"), mask=is_next)


_TILE = 256
_WORDS_TILE = 16
# With four, what rules ask of a logit spills on sm_80.
_WARPS = 8


def _edit_rows_triton(
    logits: Tensor, edited: EditedRows, state: RowState, rules: RuleState, slots: Tensor
) -> None:
    rows, vocab = logits.shape
    grid = (chunks_of(vocab), rows)
    _widen_kernel[grid](
        logits, edited.logits, edited.is_edited, slots, rules.kinds,
        state.num_tokens, state.masked_until, vocab, CHUNK=CHUNK,
    )  # fmt: skip
    _bias_kernel[(rows,)](
        edited.logits, slots, rules.kinds, rules.bias_ids, rules.biases,
        vocab, rules.biases.size(1), BIASES=BIASES, TILE=_TILE,
    )  # fmt: skip
    _penalise_kernel[grid](
        edited.logits, slots, rules.kinds, rules.repetition, rules.presence, rules.frequency,
        rules.seen, rules.allowed, vocab, rules.allowed.size(1),
        PENALTIES=PENALTIES, ALLOWED=ALLOWED, BITS=BITS, CHUNK=CHUNK, num_warps=_WARPS,
    )  # fmt: skip
    _forbid_kernel[(rows,)](
        edited.logits, slots, rules.kinds, state.num_tokens, state.masked_until, state.stops,
        rules.prompt, rules.words, rules.recent, vocab, state.stops.size(1), rules.words.size(1),
        WORDS=WORDS, RECENT=RECENT, TILE=_TILE, WORDS_TILE=_WORDS_TILE,
    )  # fmt: skip


_PATHS = {
    "triton": _edit_rows_triton,
    "native": edit_rows_reference,
    "torch": edit_rows_reference,
}


def edit_rows(
    logits: Tensor, edited: EditedRows, state: RowState, rules: RuleState, slots: Tensor
) -> None:
    """Write to `edited` which rows have rules, and the logits of these with their rules applied."""
    require_logits(logits, torch.bfloat16, torch.float16)
    require(edited.logits.shape == logits.shape, "edited", "must have the shape of logits")
    require(rules.seen.size(1) == logits.size(1), "rules", "must be of this vocabulary")
    require_ids(slots, "slots", dtype=torch.int64, shape=(logits.size(0),))
    _PATHS[dispatch.path_for(logits)](logits, edited, state, rules, slots)
