"""Events as OpenAI-style JSON: chunks of a stream, or one object at the end. Pure.

A `Shape` is one of the two endpoints; what they share is in `Stream` and `Gather`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from gateway.http.sse import sse
from gateway.requests.stream import Delta, Explained, Finished
from gateway.text.detokenizer import Detokenizer, Pieces
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from service_kit.errors import Cancelled, DeadlineExceeded, Failed, KaitenError

FINISH_REASONS: Final = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True, kw_only=True)
class Usage:
    """Sums over the prompts of one HTTP request."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    # Prompts of one HTTP request run side by side: the longest is what the client waited for.
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    preemptions: int = 0

    def add(self, done: DoneMessage) -> None:
        timings = done.timings
        self.queue_us = max(self.queue_us, timings.queue_us)
        self.prefill_us = max(self.prefill_us, timings.prefill_us)
        self.decode_us = max(self.decode_us, timings.decode_us)
        self.preemptions += timings.preemptions
        self.prompt_tokens += done.usage.prompt_tokens
        self.output_tokens += done.usage.output_tokens
        self.cached_tokens += done.usage.cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timing_to_json(self) -> dict[str, Any]:
        """Where the time went. OpenAI has no word for it, so it stands under our name."""
        tokens_per_s = self.output_tokens / self.decode_us * 1e6 if self.decode_us else None
        return {
            "queue_ms": self.queue_us / 1000,
            "prefill_ms": self.prefill_us / 1000,
            "decode_ms": self.decode_us / 1000,
            "tokens_per_s": None if tokens_per_s is None else round(tokens_per_s, 3),
            "preemptions": self.preemptions,
        }

    def fields(self) -> dict[str, Any]:
        """What the last message of a response says."""
        return {"usage": self.to_json(), "kaiten": self.timing_to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


class Echo(NamedTuple):
    """What a completion shows of its prompt."""

    text: str = ""
    # Likeliest tokens with its log-probabilities, which are then shown too; None: text only.
    top: int | None = None


class Shape(Protocol):
    """One endpoint's way of writing a choice."""

    id_prefix: str
    object_kind: str
    chunk_kind: str
    # Choices may be of different prompts.
    has_prompts: bool

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first text, if there is one."""

    def chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]: ...

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]: ...

    def logprobs(self, tokens: Sequence["TokenInfo"]) -> Any: ...


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


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    has_prompts = False

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if reason is None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenInfo]) -> Any:
        return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_kind = "text_completion"
    chunk_kind = "text_completion"
    has_prompts = True

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        return self.chunk(index, text, logprobs, reason)

    def logprobs(self, tokens: Sequence[TokenInfo]) -> Any:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _by_text(token: TokenInfo) -> dict[str, float | None] | None:
    """Of tokens that look the same the likeliest counts: they are ordered."""
    if token.top is None:
        return None
    return {text: logprob for text, _, logprob in reversed(token.top)}


def _chat_logprob(token: TokenInfo) -> dict[str, Any]:
    top = [{"token": t, "logprob": p, "bytes": list(raw)} for t, raw, p in token.top or ()]
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw),
        "top_logprobs": top,
    }


class Namer:
    """Log-probabilities with token texts. JSON has no -Infinity; OpenAI writes -9999."""

    LOGPROB_MIN: Final = -9999.0

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def name(self, delta: Delta, offset: int) -> list[TokenInfo]:
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

    def name_prompt(self, event: Explained, top: int) -> list[TokenInfo]:
        """All of a prompt, its first token without a log-probability."""
        infos = []
        decoded, offset = Detokenizer(self._pieces), 0
        for token_id, run in zip(event.token_ids, (None, *_runs(event, top)), strict=True):
            text, raw = self._text(token_id)
            logprob, tops = (None, None) if run is None else (self._clip(run[0]), self._top(run[1]))
            infos.append(TokenInfo(text=text, raw=raw, logprob=logprob, top=tops, offset=offset))
            offset += len(decoded.feed((token_id,)))
        return infos

    def prompt_to_json(
        self, event: Explained, top: int | None = None
    ) -> list[dict[str, Any] | None]:
        """As vLLM writes it: per token its own and the likeliest ones (None: all), by id."""
        rows: list[dict[str, Any] | None] = [None]
        for token_id, (own, tops) in zip(event.token_ids[1:], _runs(event, top), strict=True):
            ranks = {top_id: rank for rank, (top_id, _) in enumerate(tops, 1)}
            rows.append(
                {
                    str(each): {
                        "logprob": self._clip(logprob),
                        "rank": ranks.get(each),
                        "decoded_token": self._pieces.token_text(each),
                    }
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


class Stream:
    """One response as server-sent events."""

    def __init__(
        self,
        shape: Shape,
        envelope: Envelope,
        namer: Namer,
        *,
        with_token_ids: bool,
        with_usage: bool,
        with_positions: bool = False,
    ) -> None:
        self._shape = shape
        self._envelope = envelope
        self._namer = namer
        self._with_token_ids = with_token_ids
        self._with_positions = with_positions
        # Every chunk then says that the usage is still to come.
        self._extra: dict[str, Any] = {"usage": None} if with_usage else {}
        self._offsets: dict[int, int] = {}

    def opening(self, index: int, echo: Echo) -> bytes:
        choice = self._shape.opening(index)
        if echo.text and echo.top is None:
            choice = self._shape.chunk(index, echo.text, None, None)
        return b"" if choice is None else self._chunk(choice)

    def explained(self, first: int, event: Explained, echo: Echo) -> bytes:
        """The echo of an explained prompt, for each choice."""
        if echo.top is None:
            return b""
        logprobs = self._shape.logprobs(self._namer.name_prompt(event, echo.top))
        indexes = range(first, first + event.choices)
        self._offsets.update(dict.fromkeys(indexes, len(echo.text)))
        chunks = (self._shape.chunk(index, echo.text, logprobs, None) for index in indexes)
        return b"".join(map(self._chunk, chunks))

    def delta(self, index: int, delta: Delta) -> bytes:
        """A chunk, or nothing when there is nothing to tell yet."""
        logprobs = None
        if delta.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = self._shape.logprobs(self._namer.name(delta, offset))
            self._offsets[index] = offset + len(delta.text)
        elif not delta.text and not self._with_token_ids:
            return b""
        choice = self._shape.chunk(index, delta.text, logprobs, None)
        if self._with_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        if self._with_positions:
            choice["position"] = delta.position + len(delta.token_ids)
        return self._chunk(choice)

    def finished(self, index: int, finished: Finished) -> bytes:
        return self._chunk(self._shape.chunk(index, "", None, reason_of(finished)))

    def usage(self, usage: Usage) -> bytes:
        body = self._envelope.wrap(self._shape.chunk_kind, ())
        return sse(body | usage.fields())

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return sse(self._envelope.wrap(self._shape.chunk_kind, (choice,)) | self._extra)


@dataclass(slots=True)
class _Gathered:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    text_chars: int = 0
    reason: str = ""
    prompt: Sequence[dict[str, Any] | None] | None = None


class Gather:
    """One response as one object."""

    def __init__(
        self,
        shape: Shape,
        envelope: Envelope,
        namer: Namer,
        *,
        choices: int,
        with_logprobs: bool,
        prompt_logprobs: int | None,
    ) -> None:
        self._shape = shape
        self._envelope = envelope
        self._namer = namer
        self._with_logprobs = with_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._choices = [_Gathered() for _ in range(choices)]

    def opening(self, index: int, echo: str) -> None:
        self._choices[index].texts.append(echo)
        self._choices[index].text_chars += len(echo)

    def explained(self, first: int, event: Explained, echo: Echo) -> None:
        """The log-probabilities of the prompt, wherever they were asked for."""
        choices = self._choices[first : first + event.choices]
        if echo.top is not None:
            infos = self._namer.name_prompt(event, echo.top)
            for choice in choices:
                choice.logprobs += infos
        if self._prompt_logprobs is not None:
            prompt = self._namer.prompt_to_json(event, self._prompt_logprobs)
            for choice in choices:
                choice.prompt = prompt

    def delta(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if self._with_logprobs:
            choice.logprobs += self._namer.name(delta, choice.text_chars)
        choice.text_chars += len(delta.text)

    def finished(self, index: int, finished: Finished) -> None:
        self._choices[index].reason = reason_of(finished)

    def to_json(self, usage: Usage, *, with_token_ids: bool) -> dict[str, Any]:
        choices = []
        for index, got in enumerate(self._choices):
            logprobs = self._shape.logprobs(got.logprobs) if self._with_logprobs else None
            choice = self._shape.choice(index, "".join(got.texts), logprobs, got.reason)
            if with_token_ids:
                choice["token_ids"] = got.token_ids
            if got.prompt is not None and self._shape.has_prompts:
                choice["prompt_logprobs"] = got.prompt
            choices.append(choice)
        body = self._envelope.wrap(self._shape.object_kind, choices)
        if self._prompt_logprobs is not None and not self._shape.has_prompts:
            body["prompt_logprobs"] = self._choices[0].prompt
        return body | usage.fields()


def reason_of(finished: Finished) -> str:
    """OpenAI's word. Other ends are errors there, and are raised."""
    word = FINISH_REASONS.get(finished.reason)
    if word is None:
        raise _as_error(finished)
    return word


def _as_error(finished: Finished) -> KaitenError:
    if finished.reason == FinishReason.FINISH_REASON_CANCELLED:
        return Cancelled()
    if finished.reason == FinishReason.FINISH_REASON_DEADLINE_EXCEEDED:
        phase = "decode" if finished.output_tokens else "queue or prefill"
        return DeadlineExceeded(phase, finished.error)
    return Failed(finished.error or "the system could not compute this choice")
