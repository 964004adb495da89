"""Log-probabilities with the texts of their tokens, in the forms of OpenAI and vLLM. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.openai.reply_models import (
    ChatLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
)
from gateway.requests.stream import Delta, Explained
from gateway.text.detokenizer import Detokenizer, Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """One token's log-probabilities, in text. `offset`: characters of the output before it.

    None: there is none, for the first token of a prompt or where the model gave no number.
    """

    text: str
    raw: bytes
    logprob: float | None
    top: Sequence[tuple[str, bytes, float | None]] | None
    offset: int


def chat_logprobs(tokens: Sequence[TokenInfo]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token.text,
                token.logprob,
                list(token.raw),
                [TopLogprob(text, logprob, list(raw)) for text, raw, logprob in token.top or ()],
            )
            for token in tokens
        ]
    )


def text_logprobs(tokens: Sequence[TokenInfo]) -> TextLogprobs:
    return TextLogprobs(
        [token.text for token in tokens],
        [token.logprob for token in tokens],
        [_by_text(token) for token in tokens],
        [token.offset for token in tokens],
    )


def _by_text(token: TokenInfo) -> dict[str, float | None] | None:
    """Of tokens that look the same the likeliest counts: they are ordered."""
    if token.top is None:
        return None
    return {text: logprob for text, _, logprob in reversed(token.top)}


class LogprobFormatter:
    """Log-probabilities with token texts. JSON has no -Infinity; OpenAI writes -9999."""

    LOGPROB_MIN: Final = -9999.0

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def output(self, delta: Delta, offset: int) -> list[TokenInfo]:
        infos = []
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=False):
            text, raw = self._text(token_id)
            infos.append(
                TokenInfo(
                    text=text,
                    raw=raw,
                    logprob=self._clip(logprobs.logprob),
                    top=self._top(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)),
                    offset=offset,
                )
            )
            offset += len(text)
        return infos

    def echo(self, event: Explained, top: int) -> list[TokenInfo]:
        """All of a prompt, its first token without a log-probability."""
        infos = []
        decoded, offset = Detokenizer(self._pieces), 0
        for token_id, run in zip(event.token_ids, (None, *_runs(event, top)), strict=True):
            text, raw = self._text(token_id)
            logprob, tops = (None, None) if run is None else (self._clip(run[0]), self._top(run[1]))
            infos.append(TokenInfo(text=text, raw=raw, logprob=logprob, top=tops, offset=offset))
            offset += len(decoded.feed((token_id,)))
        return infos

    def prompt(self, event: Explained, top: int | None = None) -> PromptLogprobs:
        """As vLLM writes it: per token its own and the likeliest ones (None: all), by id."""
        rows: PromptLogprobs = [None]
        for token_id, (own, tops) in zip(event.token_ids[1:], _runs(event, top), strict=True):
            ranks = {top_id: rank for rank, (top_id, _) in enumerate(tops, 1)}
            rows.append(
                {
                    str(each): PromptLogprob(
                        self._clip(logprob), ranks.get(each), self._pieces.token_text(each)
                    )
                    for each, logprob in dict([(token_id, own), *tops]).items()
                }
            )
        return rows

    def _top(self, tops: Iterable[tuple[int, float]]) -> list[tuple[str, bytes, float | None]]:
        return [(*self._text(token_id), self._clip(logprob)) for token_id, logprob in tops]

    def _text(self, token_id: int) -> tuple[str, bytes]:
        text = self._pieces.token_text(token_id)
        return text, self._pieces.get(token_id) or text.encode()

    def _clip(self, logprob: float) -> float | None:
        return None if math.isnan(logprob) else max(logprob, self.LOGPROB_MIN)


def _runs(event: Explained, top: int | None) -> Iterator[tuple[float, Sequence[tuple[int, float]]]]:
    """Own log-probability and the `top` likeliest of each prompt token but the first."""
    told = event.logprobs
    k = len(told.top_token_ids) // max(1, told.token_count)
    shown = k if top is None else min(k, top)
    for index, own in enumerate(told.logprobs):
        part = slice(index * k, index * k + shown)
        yield own, list(zip(told.top_token_ids[part], told.top_logprobs[part], strict=True))
