"""What one row does to its own logits before sampling, and the counters it needs for that.

Everything follows from the tokens given at the join and those sampled since, so a row that was
preempted, resumed or moved to another worker counts what it would have counted undisturbed.
Memory: five bytes per token of the vocabulary, only for a row with a penalty and while it stays.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from gpu_worker.batch.plans import RowSampling
from gpu_worker.batch.step_types import FloatArray, IntArray, LogitEdits, RuleChanges
from kernels.rows.edit_rows import ALLOWED, BIASES, BITS, PENALTIES, RECENT, WORDS

_NONE: Final = np.zeros(0, np.int64)


def has_rules(sampling: RowSampling) -> bool:
    """Whether a row with this sampling edits its logits at all (min_tokens aside)."""
    return bool(
        has_penalties(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
    )


def has_penalties(sampling: RowSampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class RowRules:
    """One row's. `see` every sampled token; the arrays are as the next sample needs them."""

    def __init__(
        self, sampling: RowSampling, token_ids: Sequence[int], prompt_tokens: int, vocab_size: int
    ) -> None:
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        self.biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.allowed_ids = np.array(sampling.allowed_token_ids, np.int64)
        self.bad_words = sampling.bad_words
        self._bad_words = BadWords(sampling.bad_words, token_ids[prompt_tokens:])
        self._seen: SeenTokens | None = None
        if has_penalties(sampling):
            # The other two penalties do not look at the prompt.
            prompt = token_ids[:prompt_tokens] if self.repetition != 1.0 else ()
            self._seen = SeenTokens(prompt, token_ids[prompt_tokens:], vocab_size)

    @property
    def kinds(self) -> int:
        """Which rules there are, as a device that holds the rows itself is told."""
        has = {
            PENALTIES: self._seen is not None,
            BIASES: len(self.biases),
            ALLOWED: len(self.allowed_ids),
            WORDS: len(self.bad_words),
        }
        return sum(kind for kind, is_there in has.items() if is_there)

    def see(self, token_id: int) -> None:
        """The row sampled this token."""
        self._bad_words.see(token_id)
        if self._seen is not None:
            self._seen.see(token_id)

    @property
    def seen_ids(self) -> IntArray:
        return _NONE if self._seen is None else self._seen.ids

    @property
    def seen_counts(self) -> FloatArray:
        return _NONE.astype(np.float32) if self._seen is None else self._seen.counts

    def forbidden_ids(self) -> IntArray:
        """Tokens that would complete a bad word now."""
        return self._bad_words.completions()


class SeenTokens:
    """How often each token is in the output; 0 for one of the prompt.

    A long prompt joins between two steps that everybody waits for, so it is counted by arrays as
    wide as the vocabulary and not token by token.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> None:
        sampled = np.array(output, np.int64)
        self._times = np.bincount(sampled, minlength=vocab_size).astype(np.float32)
        self._is_seen = self._times > 0
        self._is_seen[np.array(prompt, np.int64)] = True
        self._ids = np.flatnonzero(self._is_seen)
        self._length = len(self._ids)

    @property
    def ids(self) -> IntArray:
        """Distinct, in no order."""
        return self._ids[: self._length]

    @property
    def counts(self) -> FloatArray:
        """Parallel to `ids`."""
        return self._times[self.ids]

    def see(self, token_id: int) -> None:
        self._times[token_id] += 1
        if self._is_seen[token_id]:
            return
        self._is_seen[token_id] = True
        if self._length == len(self._ids):
            self._ids = np.pad(self._ids, (0, max(64, self._length)))
        self._ids[self._length] = token_id
        self._length += 1


class BadWords:
    """Sequences that the output must not contain; a word starts after the prompt."""

    def __init__(self, words: Sequence[Sequence[int]], output: Sequence[int]) -> None:
        self._always = np.array(sorted({word[-1] for word in words if len(word) == 1}), np.int64)
        # By the token before the last, so that a step looks at few of them.
        self._by_hinge: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                entry = (list(word[:-1]), word[-1])
                self._by_hinge.setdefault(word[-2], []).append(entry)
        longest = max(map(len, words), default=1)
        self._tail: deque[int] = deque(output, maxlen=longest - 1)

    def see(self, token_id: int) -> None:
        self._tail.append(token_id)

    def completions(self) -> IntArray:
        if not self._tail or self._tail[-1] not in self._by_hinge:
            return self._always
        tail = list(self._tail)
        found = [last for start, last in self._by_hinge[tail[-1]] if tail[-len(start) :] == start]
        return np.concatenate([self._always, np.array(found, np.int64)])


def edits_of(
    rules: Sequence[tuple[int, RowRules]], masks: Sequence[tuple[int, IntArray]], row_count: int
) -> LogitEdits | None:
    """The edits of a step. `rules` and `masks` (ids forbidden besides) name rows of the Q."""
    if not rules and not masks:
        return None
    penalties = np.zeros((3, row_count), np.float32)
    penalties[0] = 1.0
    for row, each in rules:
        penalties[:, row] = each.repetition, each.presence, each.frequency
    bias_rows, bias_ids = _entries([(row, each.bias_ids) for row, each in rules])
    seen_rows, seen_ids = _entries([(row, each.seen_ids) for row, each in rules])
    allowed_rows, allowed_ids = _entries([(row, each.allowed_ids) for row, each in rules])
    forbidden = [*masks, *((row, each.forbidden_ids()) for row, each in rules)]
    forbidden_rows, forbidden_ids = _entries(forbidden)
    return LogitEdits(
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        biases=_joined([each.biases for _, each in rules]),
        seen_rows=seen_rows,
        seen_ids=seen_ids,
        seen_counts=_joined([each.seen_counts for _, each in rules]),
        repetition=penalties[0],
        presence=penalties[1],
        frequency=penalties[2],
        forbidden_rows=forbidden_rows,
        forbidden_ids=forbidden_ids,
        allowed_rows=allowed_rows,
        allowed_ids=allowed_ids,
    )


def _entries(parts: Sequence[tuple[int, IntArray]]) -> tuple[IntArray, IntArray]:
    """Parallel (rows, token ids)."""
    rows = np.array([row for row, _ in parts], np.int64)
    lengths = [len(token_ids) for _, token_ids in parts]
    token_ids = np.concatenate([_NONE, *(token_ids for _, token_ids in parts)])
    return np.repeat(rows, lengths), token_ids


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    """A copy: the counters go on while a device may still read."""
    return np.concatenate([np.zeros(0, np.float32), *parts])


def rule_changes(
    rules: Mapping[int, RowRules], tokens_of: Callable[[int], Sequence[int]], vocab_size: int
) -> RuleChanges:
    """The rules of rows that join, by slot, for a device that holds the rows itself."""
    own = list(rules.values())
    biases = max(len(each.biases) for each in own)
    bias_ids = np.full((len(own), biases), -1, np.int32)
    values = np.zeros((len(own), biases), np.float32)
    words = np.full((len(own), max(len(each.bad_words) for each in own), RECENT), -1, np.int32)
    recent = np.zeros((len(own), RECENT), np.int32)
    bits = np.zeros((len(own), -(-vocab_size // BITS) * BITS), np.bool_)
    for row, (slot, each) in enumerate(rules.items()):
        bias_ids[row, : len(each.biases)] = each.bias_ids
        values[row, : len(each.biases)] = each.biases
        bits[row, each.allowed_ids] = True
        for index, word in enumerate(each.bad_words):
            words[row, index, RECENT - len(word) :] = word
        tokens = tokens_of(slot)
        newest = np.arange(max(0, len(tokens) - RECENT), len(tokens))
        recent[row, newest % RECENT] = tokens[len(tokens) - len(newest) :]
    seen = [slot * vocab_size + each.seen_ids for slot, each in rules.items()]
    return RuleChanges(
        slots=np.array(list(rules), np.int64),
        bias_ids=bias_ids,
        biases=values,
        words=words,
        recent=recent,
        allowed=np.packbits(bits, axis=1, bitorder="little").view(np.int32),
        seen=np.concatenate([_NONE, *seen]),
        seen_times=_joined([each.seen_counts for each in own]).astype(np.int32) + 1,
    )
