"""Log-probabilities with token texts. JSON has no -Infinity; OpenAI writes -9999."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from gateway.openai.usage import Count
from gateway.requests.stream import Delta, Explained
from gateway.text.detokenizer import Detokenizer, Pieces

LOGPROB_MIN: Final = -9999.0


class TokenLogprob(NamedTuple):
    """One token's. None: of a prompt's first token, or where the model gave no number."""

    text: str
    raw: bytes
    logprob: float | None
    # The likeliest tokens, best first.
    top: Sequence[tuple[str, bytes, float | None]] | None
    # Characters of the output before it.
    offset: int


class PromptLogprob(Struct):
    """Of one token at one place of a prompt, as vLLM writes it."""

    logprob: float | None
    # Beyond the likeliest it is not known.
    rank: Count | None
    decoded_token: str


# By token id, for each token of a prompt but the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Offsets:
    """Where the text of each token begins, however many of them come at once, and though a
    character is not whole yet or may be the beginning of a stop string."""

    def __init__(self, decoded: Detokenizer) -> None:
        self._decoded = decoded
        self._chars = 0

    def skip(self, chars: int) -> None:
        """So much text is before the next token."""
        self._chars += chars

    def take(self, token_id: int) -> int:
        """Of the next token."""
        begin = self._chars
        self._chars += len(self._decoded.feed((token_id,)))
        return begin


class LogprobFormatter:
    """One per endpoint."""

    def __init__(self, pieces: Pieces, *, names_ids: bool = False) -> None:
        self._pieces = pieces
        self._names_ids = names_ids

    @property
    def by_id(self) -> "LogprobFormatter":
        """One that calls tokens by their ids, as vLLM can: two that look the same differ."""
        return LogprobFormatter(self._pieces, names_ids=True)

    def output(self, delta: Delta, offsets: Offsets) -> list[TokenLogprob]:
        tokens = []
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=False):
            text, raw = self._text(token_id)
            top = self._top(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))
            offset = offsets.take(token_id)
            tokens.append(TokenLogprob(text, raw, _clip(logprobs.logprob), top, offset))
        return tokens

    def prompt(self, event: Explained, top: int) -> list[TokenLogprob]:
        """All of a prompt, its first token without a log-probability."""
        tokens = []
        offsets = Offsets(Detokenizer(self._pieces))
        for token_id, run in zip(event.token_ids, (None, *_runs(event, top)), strict=True):
            text, raw = self._text(token_id)
            logprob, tops = (None, None) if run is None else (_clip(run[0]), self._top(run[1]))
            tokens.append(TokenLogprob(text, raw, logprob, tops, offsets.take(token_id)))
        return tokens

    def prompt_by_id(self, event: Explained, top: int) -> PromptLogprobs:
        """Per token its own and at most `top` likeliest ones."""
        rows: PromptLogprobs = [None]
        for token_id, (own, tops) in zip(event.token_ids[1:], _runs(event, top), strict=True):
            ranks = {top_id: rank for rank, (top_id, _) in enumerate(tops, 1)}
            named = dict([(token_id, own), *tops])
            rows.append(
                {
                    str(each): PromptLogprob(
                        _clip(logprob), ranks.get(each), self._pieces.token_text(each)
                    )
                    for each, logprob in named.items()
                }
            )
        return rows

    def _top(self, tops: Iterable[tuple[int, float]]) -> list[tuple[str, bytes, float | None]]:
        return [(*self._text(token_id), _clip(logprob)) for token_id, logprob in tops]

    def _text(self, token_id: int) -> tuple[str, bytes]:
        text = self._pieces.token_text(token_id)
        raw = self._pieces.get(token_id) or text.encode()
        return f"token_id:{token_id}" if self._names_ids else text, raw


def _clip(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, LOGPROB_MIN)


def _runs(event: Explained, top: int) -> Iterator[tuple[float, Sequence[tuple[int, float]]]]:
    """Own log-probability and the `top` likeliest of each prompt token but the first."""
    told = event.logprobs
    k = len(told.top_token_ids) // max(1, told.token_count)
    for index, own in enumerate(told.logprobs):
        part = slice(index * k, index * k + min(k, top))
        yield own, list(zip(told.top_token_ids[part], told.top_logprobs[part], strict=True))
