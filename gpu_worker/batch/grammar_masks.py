"""Which tokens a row with a grammar may be given next, as bits, computed beside the steps.

Everything follows from the grammar and the output so far, so a row that was preempted, resumed or
moved to another worker samples what it would have sampled undisturbed. A row's next mask is begun
as soon as its token is known: while results are sent, plans come and the next step computes.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher

from gpu_worker.batch.plans import RowSampling
from gpu_worker.batch.step_types import GrammarRow, IndexArray, IntArray
from service_kit.grammars import (
    BITS,
    MASK_CREDIT_S,
    MASK_S_MEAN,
    GrammarTokenizer,
    InvalidGrammar,
    Mask,
    mask_of,
    one_line,
    set_bits,
)

# Compiled, of the rows to come: choices of one request, and requests with one schema.
_KEPT: Final = 128
_WORD_BYTES: Final = 4
# Of rows that left, and may come back.
_CREDITS_KEPT: Final = 1024
# Steps whose masks are timed row by row, from the last slow one on.
_TIMED_STEPS: Final = 16
# Grammar, seed and choice.
_Key = tuple[str, int, int]


@dataclass(eq=False, slots=True)
class _Row:
    # The tokens that end the output.
    stops: IntArray
    # The row's allowed_token_ids; None: all.
    allowed: Mask | None
    # Of the next token, once `pending` is done.
    mask: Mask
    # What its masks may still take beyond the mean.
    credit_s: float
    # What the row that comes back after a preemption has in common with it.
    key: _Key
    # Set by the job that begins the row, before it has a token to see.
    matcher: LLMatcher = field(init=False)
    # The job after which the mask is that of the next token.
    pending: "Future[None] | None" = None
    # Why there is no mask any more.
    problem: str = ""

    def next_mask(self) -> IndexArray:
        """Waits for it."""
        if self.pending is not None:
            self.pending.result()
        return self.mask.view(np.int32)


class GrammarMasks:
    """Of all rows of a batch. Called on one thread."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_words, self._words = -(-vocab_size // BITS), tokenizer.mask_words
        self._rows: dict[int, _Row] = {}
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        # A grammar that takes long to compile holds up nobody's masks.
        self._starts = ThreadPoolExecutor(1, "grammars")
        self._steps = ThreadPoolExecutor(1, "masks")
        self._together = LLExecutor()
        self._timed_steps = 0
        self._credits: OrderedDict[_Key, float] = OrderedDict()

    def join(self, slot: int, sampling: RowSampling, output: Sequence[int]) -> None:
        """`output`: the tokens sampled so far."""
        allowed = sampling.allowed_token_ids
        key = sampling.grammar, sampling.seed, sampling.choice
        left_s = self._credits.pop(key, MASK_CREDIT_S)
        row = self._rows[slot] = _Row(
            stops=np.array(sampling.stop_token_ids, np.int64),
            allowed=mask_of(allowed, self._words) if allowed else None,
            mask=np.zeros(self._words, np.uint32),
            credit_s=left_s if output else MASK_CREDIT_S,
            key=key,
        )
        row.pending = self._starts.submit(self._start, row, self._compile(sampling.grammar), output)

    def leave(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None and row.credit_s < MASK_CREDIT_S:
            self._credits[row.key] = row.credit_s
            if len(self._credits) > _CREDITS_KEPT:
                self._credits.popitem(last=False)

    def see(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """These rows sampled these tokens, and go on."""
        rows = [self._rows[slot] for slot in slots]
        pending = self._steps.submit(self._advance, rows, token_ids)
        for row in rows:
            row.pending = pending

    def masks(self, slots: Sequence[int]) -> IndexArray:
        """[rows, vocabulary / 32] of these rows: a bit for each token that may come next."""
        return np.stack([self._rows[slot].next_mask()[: self._vocab_words] for slot in slots])

    def row(self, slot: int) -> GrammarRow:
        return self._rows[slot]

    def _compile(self, grammar: str) -> "Future[LLMatcher]":
        if grammar not in self._compiled:
            self._compiled[grammar] = self._starts.submit(self._tokenizer.compiled, grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    # On other threads:

    def _start(self, row: _Row, compiled: "Future[LLMatcher]", output: Sequence[int]) -> None:
        try:
            row.matcher = compiled.result().deep_copy()
        except InvalidGrammar as error:
            # Its mask stays empty, so it ends with the first token it would sample.
            row.problem = str(error)
            return
        row.matcher.consume_tokens(list(output))
        self._fill_together([row])

    def _advance(self, rows: Sequence[_Row], token_ids: Sequence[int]) -> None:
        if self._timed_steps:
            self._timed_steps -= 1
            is_slow = self._fill_timed(rows, token_ids)
        else:
            # Of all rows, and of whoever else is on the machine: it only says when to look closer.
            started = time.perf_counter()
            matchers = [row.matcher for row in rows]
            self._together.consume_token_par(list(zip(matchers, token_ids, strict=True)))
            self._fill_together(rows)
            is_slow = time.perf_counter() - started > MASK_S_MEAN
        if is_slow:
            self._timed_steps = _TIMED_STEPS

    def _fill_together(self, rows: Sequence[_Row]) -> None:
        masks = np.zeros((len(rows), self._words), np.uint32)
        self._together.unsafe_compute_mask_ptr(
            [(row.matcher, index) for index, row in enumerate(rows)],
            masks.ctypes.data,
            self._words * _WORD_BYTES,
            len(rows),
        )
        self._keep(rows, masks)

    def _fill_timed(self, rows: Sequence[_Row], token_ids: Sequence[int]) -> bool:
        """Whether one of them took longer than the mean. Who has no credit left is told to end."""
        masks = np.zeros((len(rows), self._words), np.uint32)
        is_slow = False
        for row, token_id, mask in zip(rows, token_ids, masks, strict=True):
            started = time.thread_time()
            row.matcher.consume_token(token_id)
            row.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            over_s = time.thread_time() - started - MASK_S_MEAN
            is_slow = is_slow or over_s > 0
            row.credit_s = min(MASK_CREDIT_S, row.credit_s - over_s)
        self._keep(rows, masks)
        return is_slow

    def _keep(self, rows: Sequence[_Row], masks: Mask) -> None:
        """The masks of these rows, with their own stops for the end of the grammar."""
        self._tokenizer.spell_out([row.matcher for row in rows], masks)
        word, bit = divmod(self._tokenizer.end, BITS)
        is_complete = (masks[:, word] >> np.uint32(bit)) & 1
        masks[:, word] &= ~np.uint32(1 << bit)
        for row, mask, may_end in zip(rows, masks, is_complete.tolist(), strict=True):
            set_bits(mask, row.stops, is_set=bool(may_end))
            if row.allowed is not None:
                mask &= row.allowed
            if row.matcher.is_error():
                row.problem = one_line(row.matcher.get_error())
            elif row.credit_s < 0:
                row.problem = f"its tokens take {MASK_S_MEAN * 1e3:.0f} ms each and longer to check"
            if row.problem:
                mask[:] = 0
            row.mask = mask
