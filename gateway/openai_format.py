"""Events as OpenAI-style JSON: chunks of a stream, or one object at the end. Pure.

A `Shape` is one of the two endpoints; what they share is in `Stream` and `Gather`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gateway.detokenize import Pieces
from gateway.errors import Failed
from gateway.generation import Delta, Finished
from protos.kaiten.v1.common_pb2 import FinishReason, TokenLogprobs
from protos.kaiten.v1.inference_service_pb2 import Done as DoneMessage
from service_kit.errors import Cancelled, DeadlineExceeded, KaitenError

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


class Shape(Protocol):
    """One endpoint's way of writing a choice."""

    id_prefix: str
    object_kind: str
    chunk_kind: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first text, if there is one."""

    def chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]: ...

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]: ...

    def logprobs(self, tokens: Sequence["TokenInfo"]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """One token's log-probabilities, in text. `offset`: characters of the output before it."""

    text: str
    raw: bytes
    logprob: float
    top: Sequence[tuple[str, bytes, float]]
    offset: int


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

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
            "top_logprobs": [{text: logprob for text, _, logprob in t.top} for t in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _chat_logprob(token: TokenInfo) -> dict[str, Any]:
    top = [{"token": t, "logprob": p, "bytes": list(raw)} for t, raw, p in token.top]
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
                    top=self._top(logprobs),
                    offset=offset,
                )
            )
            offset += len(text)
        return infos

    def _top(self, logprobs: TokenLogprobs) -> list[tuple[str, bytes, float]]:
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return [(*self._text(token_id), self._clip(logprob)) for token_id, logprob in pairs]

    def _text(self, token_id: int) -> tuple[str, bytes]:
        text = self._pieces.token_text(token_id)
        return text, self._pieces.get(token_id) or text.encode()

    def _clip(self, logprob: float) -> float:
        return max(logprob, self.LOGPROB_MIN)


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

    def opening(self, index: int, echo: str = "") -> bytes:
        choice = self._shape.opening(index)
        if echo:
            choice = self._shape.chunk(index, echo, None, None)
        return b"" if choice is None else self._chunk(choice)

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


class Gather:
    """One response as one object."""

    def __init__(
        self, shape: Shape, envelope: Envelope, namer: Namer, *, choices: int, with_logprobs: bool
    ) -> None:
        self._shape = shape
        self._envelope = envelope
        self._namer = namer
        self._with_logprobs = with_logprobs
        self._choices = [_Gathered() for _ in range(choices)]

    def opening(self, index: int, echo: str) -> None:
        self._choices[index].texts.append(echo)

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
            choices.append(choice)
        body = self._envelope.wrap(self._shape.object_kind, choices)
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
        return DeadlineExceeded("decode" if finished.output_tokens else "queue or prefill")
    return Failed(finished.error or "the system could not compute this choice")


def sse(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: "
        + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"
    )


SSE_DONE: Final = b"data: [DONE]\n\n"
