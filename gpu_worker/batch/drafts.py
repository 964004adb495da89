"""Drafts by prompt lookup (Saxena 2023; vLLM's method `ngram`): a row's newest tokens stood there
before, so what followed then is drafted to follow now.

The step computes the drafted tokens behind the row's own and samples after each of them:

    known  … a b c a b│     drafted: c a     after  b → c    c → a    a → d
                      └ its own token b               right    right    the first that was not
                                                                        drafted ends it: c a d

A token is sampled by the logits, seed, choice and position that it would have had in a step of its
own, so drafts change no token: where they are right a row has several from one step.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpu_worker.batch.plan_validation import Columns
from gpu_worker.batch.step_types import BoolArray, IndexArray, IntArray, StepInputs, StepSamples

# Tokens that must have stood there before; and how many are compared to find the best such place.
NGRAM_MIN: Final = 2
NGRAM_MAX: Final = 5
# Of a step, drafted ones included. Up to here a CPU computes a further token in less time than one
# in a step of its own: a tenth with AMX, half with AVX2 (benchmarks/results/speculation.jsonl).
STEP_TOKENS_MAX: Final = 32
# Tokens of a row after which it is drafted for again, when even a single one was wrong.
PAUSE_TOKENS: Final = 16


class PromptLookup:
    """Drafts tokens of rows; fewer of a row whose drafts were wrong.

    A draft that was right to its end doubles the row's next, one of which nothing was halves it.
    """

    def __init__(self, slots: int, most: int) -> None:
        """`most`: tokens that are drafted of a row at once."""
        self._most = most
        self._lengths = np.full(slots, most, np.int64)
        # Number of tokens from which on the row's are drafted again.
        self._next = np.zeros(slots, np.int64)

    def join(self, slot: int) -> None:
        self._lengths[slot], self._next[slot] = self._most, 0

    def draft(
        self, slots: Sequence[int], columns: Columns, tokens: IndexArray, counts: IntArray
    ) -> IntArray:
        """[slots] How many are drafted of each of these rows beside the `counts` of a step: written
        to `tokens` [slots, context] behind those that are known."""
        drafts = np.zeros_like(counts)
        left = STEP_TOKENS_MAX - int(counts.sum())
        share = max(1, left // max(1, len(slots)))
        for slot in slots:
            known = int(columns.num_tokens[slot])
            if known < self._next[slot]:
                continue
            # A row's last token is sampled and never computed.
            room = int(columns.limit[slot]) - known - 1
            count = min(room, int(self._lengths[slot]), share, left)
            drafted = look_up(tokens[slot, :known], count)
            tokens[slot, known : known + len(drafted)] = drafted
            drafts[slot] = len(drafted)
            left -= len(drafted)
        return drafts

    def settle(
        self, step: StepInputs, drafts: IntArray, taken: BoolArray, columns: Columns
    ) -> None:
        """Rows go on by as many tokens more as drafts were accepted. `drafts` [R]; taken [Q]: the
        tokens that rows keep."""
        given = np.bincount(step.sampled_rows[taken], minlength=len(drafts))
        for row in np.flatnonzero((drafts > 0) & (given > 0)).tolist():
            slot, accepted = int(step.slots[row]), int(given[row]) - 1
            columns.num_computed_tokens[slot] += accepted
            columns.num_tokens[slot] += accepted
            columns.is_idle[slot] |= columns.num_tokens[slot] >= columns.limit[slot]
            self._judge(
                slot, int(columns.num_tokens[slot]), drafted=int(drafts[row]), accepted=accepted
            )

    def _judge(self, slot: int, num_tokens: int, *, drafted: int, accepted: int) -> None:
        if accepted == drafted:
            self._lengths[slot] = min(2 * self._lengths[slot], self._most)
        elif accepted == 0:
            self._lengths[slot] = max(1, drafted // 2)
            if drafted == 1:
                self._next[slot] = num_tokens + PAUSE_TOKENS


def look_up(tokens: IndexArray, count: int) -> IndexArray:
    """`count` tokens to follow `tokens` [n], or none: those behind the newest of the places that
    end alike for longest. What repeats itself up to its end goes on repeating."""
    if count < 1:
        return tokens[:0]
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < NGRAM_MAX and len(places):
        earlier = places[places >= length]
        earlier = earlier[tokens[earlier - length] == tokens[-1 - length]]
        if not len(earlier):
            break
        places, length = earlier, length + 1
    if length < NGRAM_MIN:
        return tokens[:0]
    return np.resize(tokens[places[-1] + 1 :], count)


def after_each(
    rows: IntArray, tokens: IntArray, known: IntArray, drafted: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """What is sampled of rows with `drafted` tokens each: [Q] the row, the token after which, and
    how many tokens it has by then. `tokens` are the last of each row, `known` those without."""
    times = drafted + 1
    behind = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
    first = (tokens - drafted).repeat(times)
    return rows.repeat(times), first + behind, known.repeat(times) + behind


def is_reached(step: StepInputs, samples: StepSamples, is_last: BoolArray) -> BoolArray:
    """[Q] Whether all tokens drafted before this one were right, and none of them its row's last.

    A drafted token after which logits are no numbers counts as wrong: its row's next step has the
    same, and says so.
    """
    rows = step.sampled_rows
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    is_right = samples.token_ids[:-1] == step.token_ids[step.sampled_tokens[1:]]
    is_right &= samples.is_ok[:-1] & samples.is_ok[1:] & ~is_last[:-1]
    is_wrong = ~is_first
    is_wrong[1:] &= ~is_right
    wrong = is_wrong.cumsum()
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    reached: BoolArray = wrong == wrong[first]
    return reached
