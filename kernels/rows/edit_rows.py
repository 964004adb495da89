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
triton   Programs of a row share its chunks, and each applies what is of its own: none waits for one
cost     one launch; programs of rows without rules end at once. A row with any takes 6 bytes per
         token of the vocabulary, one with penalties 4 more, with biases 8
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
def _is_mine(token: pointer, CHUNK: constexpr) -> pointer:
    """Whether the token is of the chunks that this program takes."""
    return (token >= 0) & ((token // CHUNK) % tl.num_programs(0) == tl.program_id(0))


@jit.compiled
def _add_biases(
    own: pointer, slot: scalar, bias_ids: pointer, biases: pointer, count: scalar,
    CHUNK: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        token = tl.load(bias_ids + slot * count + at, mask=at < count, other=-1)
        is_in = _is_mine(token, CHUNK)
        bias = tl.load(biases + slot * count + at, mask=is_in, other=0.0)
        tl.store(own + token, tl.load(own + token, mask=is_in, other=0.0) + bias, mask=is_in)


@jit.compiled
def _penalised(
    logit: pointer, token: pointer, is_in: pointer, slot: scalar, kind: scalar,
    repetition: pointer, presence: pointer, frequency: pointer, seen: pointer, allowed: pointer,
    vocab: stride, words: scalar,
    PENALTIES: constexpr, ALLOWED: constexpr, BITS: constexpr,
) -> pointer:  # fmt: skip
    """What penalties and a list of allowed tokens leave of these logits."""
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
    return tl.where(((bits >> (token % BITS)) & 1) > 0, logit, float("-inf"))


@jit.compiled
def _forbid_stops(
    own: pointer, slot: scalar, stops: pointer, count: scalar, CHUNK: constexpr, TILE: constexpr
) -> None:
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        stop = tl.load(stops + slot * count + at, mask=at < count, other=-1)
        tl.store(own + stop, float("-inf"), mask=_is_mine(stop, CHUNK))


@jit.compiled
def _forbid_words(
    own: pointer, slot: scalar, knows: scalar, prompt: pointer, words: pointer, recent: pointer,
    count: scalar, RECENT: constexpr, CHUNK: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    """What would complete a bad word."""
    column = tl.arange(0, RECENT)
    index = knows - RECENT + 1 + column
    is_own = (index >= tl.load(prompt + slot)) & (column < RECENT - 1)
    said = tl.load(recent + slot * RECENT + (index + RECENT) % RECENT, mask=is_own, other=-2)
    for start in range(0, count, TILE):
        word = start + tl.arange(0, TILE)
        line = words + (slot * count + word)[:, None] * RECENT + column[None, :]
        tokens = tl.load(line, mask=(word < count)[:, None], other=-1)
        is_last = (column == RECENT - 1)[None, :]
        differs = (tokens >= 0) & (tokens != said[None, :]) & (is_last == 0)
        last = tl.max(tl.where(is_last, tokens, -1), 1)
        is_next = (tl.max(differs.to(tl.int32), 1) == 0) & _is_mine(last, CHUNK)
        tl.store(own + last, float("-inf"), mask=is_next)


@jit.compiled
def _edit_rows_kernel(
    logits: pointer, edited: pointer, is_edited: pointer, slots: pointer,
    kinds: pointer, num_tokens: pointer, masked_until: pointer, prompt: pointer,
    repetition: pointer, presence: pointer, frequency: pointer,
    bias_ids: pointer, biases: pointer, seen: pointer, allowed: pointer,
    stops: pointer, words: pointer, recent: pointer,
    vocab: stride, chunks: scalar, bias_count: scalar, allowed_count: scalar, stops_count: scalar,
    words_count: scalar,
    PENALTIES: constexpr, BIASES: constexpr, ALLOWED: constexpr, WORDS: constexpr,
    RECENT: constexpr, BITS: constexpr,
    CHUNK: constexpr, TILE: constexpr, WORDS_TILE: constexpr,
) -> None:  # fmt: skip
    """Of some chunks of a row: whether the row has rules, and if so all of them."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    kind = tl.load(kinds + slot, mask=slot >= 0, other=0)
    knows = tl.load(num_tokens + slot, mask=slot >= 0, other=0)
    is_masked = knows < tl.load(masked_until + slot, mask=slot >= 0, other=0)
    if tl.program_id(0) == 0:
        tl.store(is_edited + row, (is_masked | (kind > 0)).to(tl.int32))
    if is_masked | (kind > 0):
        own, has_biases = edited + row * vocab, (kind & BIASES) > 0
        # Between what threads write and what others of the program read or write there, a barrier.
        if has_biases:
            for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
                token = chunk * CHUNK + tl.arange(0, CHUNK)
                logit = tl.load(logits + row * vocab + token, mask=token < vocab)
                tl.store(own + token, logit.to(tl.float32), mask=token < vocab)
            tl.debug_barrier()
            _add_biases(own, slot, bias_ids, biases, bias_count, CHUNK, TILE)
            tl.debug_barrier()
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            is_in = token < vocab
            raw = tl.load(logits + row * vocab + token, mask=is_in & (has_biases == 0), other=0.0)
            biased = tl.load(own + token, mask=is_in & has_biases, other=0.0)
            logit = _penalised(
                tl.where(has_biases, biased, raw.to(tl.float32)), token, is_in, slot, kind,
                repetition, presence, frequency, seen, allowed,
                vocab, allowed_count, PENALTIES, ALLOWED, BITS,
            )  # fmt: skip
            tl.store(own + token, logit, mask=is_in)
        tl.debug_barrier()
        if is_masked:
            _forbid_stops(own, slot, stops, stops_count, CHUNK, TILE)
        if (kind & WORDS) > 0:
            _forbid_words(
                own, slot, knows, prompt, words, recent, words_count, RECENT, CHUNK, WORDS_TILE
            )


_TILE = 256
_WORDS_TILE = 16
# Logits of a row that its programs take at a time.
_CHUNK = 1024
_WARPS = 8
# For each processor, of all rows together: most rows have no rules, and a program by chunk would be
# thousands that only find that out.
_PROGRAMS = 4


def _edit_rows_triton(
    logits: Tensor, edited: EditedRows, state: RowState, rules: RuleState, slots: Tensor
) -> None:
    rows, vocab = logits.shape
    chunks = -(-vocab // _CHUNK)
    each = -(-jit.programs(logits.device, _PROGRAMS) // max(1, rows))
    _edit_rows_kernel[(min(chunks, each), rows)](
        logits, edited.logits, edited.is_edited, slots,
        rules.kinds, state.num_tokens, state.masked_until, rules.prompt,
        rules.repetition, rules.presence, rules.frequency,
        rules.bias_ids, rules.biases, rules.seen, rules.allowed,
        state.stops, rules.words, rules.recent,
        vocab, chunks, rules.biases.size(1), rules.allowed.size(1), state.stops.size(1),
        rules.words.size(1),
        PENALTIES=PENALTIES, BIASES=BIASES, ALLOWED=ALLOWED, WORDS=WORDS, RECENT=RECENT, BITS=BITS,
        CHUNK=_CHUNK, TILE=_TILE, WORDS_TILE=_WORDS_TILE, num_warps=_WARPS,
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
