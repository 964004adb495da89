"""Events as OpenAI-style replies: chunks of a stream, or one object at the end.

A `Shape` is one of the two endpoints; `Stream` and `Collector` are what they share.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from gateway.http.sse import sse
from gateway.openai import reply_models as models
from gateway.openai.logprobs import LogprobFormatter, TokenInfo, chat_logprobs, text_logprobs
from gateway.openai.reply_models import FinishWord
from gateway.requests.merge import merged
from gateway.requests.stream import Accepted, Delta, Event, Explained, Finished, Generation
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from service_kit.errors import Cancelled, DeadlineExceeded, Failed, KaitenError

FINISH_REASONS: Final[dict[int, FinishWord]] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True, kw_only=True)
class Totals:
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

    def usage(self) -> models.Usage:
        return models.Usage(
            self.prompt_tokens,
            self.output_tokens,
            self.prompt_tokens + self.output_tokens,
            models.PromptTokensDetails(self.cached_tokens),
        )

    def timing(self) -> models.Timing:
        tokens_per_s = self.output_tokens / self.decode_us * 1e6 if self.decode_us else None
        return models.Timing(
            self.queue_us / 1000,
            self.prefill_us / 1000,
            self.decode_us / 1000,
            None if tokens_per_s is None else round(tokens_per_s, 3),
            self.preemptions,
        )


class Envelope(NamedTuple):
    """What every object of one response repeats."""

    id: str
    created: int
    model: str


class Echo(NamedTuple):
    """What a completion shows of its prompt."""

    text: str = ""
    # Likeliest tokens with its log-probabilities, which are then shown too; None: text only.
    top: int | None = None


class Shape(Protocol):
    """One endpoint's way of writing."""

    id_prefix: str
    reply: Callable[..., Any]
    chunk: Callable[..., Any]
    # Choices may be of different prompts.
    has_prompts: bool

    def opening(self, index: int) -> Any:
        """The choice of the chunk before its first text; None: there is none."""

    def part(self, index: int, text: str, logprobs: Any, reason: FinishWord | None) -> Any:
        """A choice of a chunk."""

    def choice(self, index: int, text: str, logprobs: Any, reason: FinishWord) -> Any: ...

    def logprobs(self, tokens: Sequence[TokenInfo]) -> Any: ...


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    reply: Callable[..., Any] = models.Chat
    chunk: Callable[..., Any] = models.ChatChunk
    has_prompts = False
    logprobs = staticmethod(chat_logprobs)

    def opening(self, index: int) -> models.ChatChunkChoice:
        delta = models.ChatDelta(role="assistant", content="")
        return models.ChatChunkChoice(index=index, delta=delta)

    def part(
        self, index: int, text: str, logprobs: Any, reason: FinishWord | None
    ) -> models.ChatChunkChoice:
        return models.ChatChunkChoice(
            index=index,
            delta=models.ChatDelta(content=text if reason is None else UNSET),
            logprobs=logprobs,
            finish_reason=reason,
        )

    def choice(self, index: int, text: str, logprobs: Any, reason: FinishWord) -> models.ChatChoice:
        return models.ChatChoice(
            index=index,
            message=models.ChatMessage(text),
            logprobs=logprobs,
            finish_reason=reason,
        )


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    reply: Callable[..., Any] = models.Completion
    chunk: Callable[..., Any] = models.CompletionChunk
    has_prompts = True
    logprobs = staticmethod(text_logprobs)

    def opening(self, index: int) -> None:
        return None

    def part(
        self, index: int, text: str, logprobs: Any, reason: FinishWord | None
    ) -> models.CompletionChunkChoice:
        return models.CompletionChunkChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=reason
        )

    def choice(
        self, index: int, text: str, logprobs: Any, reason: FinishWord
    ) -> models.CompletionChoice:
        return models.CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=reason
        )


class Form(Protocol):
    """What events become. Each gives the bytes to be sent at once, if there are any."""

    def opening(self, index: int, echo: Echo) -> bytes: ...

    def explained(self, first: int, event: Explained, echo: Echo) -> bytes: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def finished(self, index: int, finished: Finished) -> bytes: ...


async def formed(
    form: Form, generations: Sequence[Generation], echoes: Sequence[Echo], totals: Totals
) -> AsyncGenerator[bytes, None]:
    """What there is to be sent, whenever there is something; the sums are complete at the end."""

    def take(base: int, event: Event) -> bytes:
        match event:
            case Delta():
                return form.delta(base + event.choice, event)
            case Finished():
                return form.finished(base + event.choice, event)
            case Accepted():
                n, echo = _prompt_at(base, generations, echoes)
                return b"".join([form.opening(base + index, echo) for index in range(n)])
            case Explained():
                return form.explained(base, event, _prompt_at(base, generations, echoes)[1])
        totals.add(event.message)
        return b""

    async with aclosing(merged(generations)) as batches:
        async for base, events in batches:
            if any(type(event) is Explained for event in events):
                # One takes as long as a thousand deltas.
                parts = [await asyncio.to_thread(take, base, event) for event in events]
            else:
                parts = [take(base, event) for event in events]
            if sent := b"".join(parts):
                yield sent


def _prompt_at(
    base: int, generations: Sequence[Generation], echoes: Sequence[Echo]
) -> tuple[int, Echo]:
    """How many choices the prompt has whose first one is `base`, and what they show of it."""
    for generation, echo in zip(generations, echoes, strict=True):
        if base == 0:
            return len(generation.choices), echo
        base -= len(generation.choices)
    raise AssertionError("no prompt begins there")


class Stream:
    """One response as server-sent events."""

    def __init__(
        self,
        shape: Shape,
        envelope: Envelope,
        formatter: LogprobFormatter,
        *,
        with_token_ids: bool,
        with_usage: bool,
        with_positions: bool = False,
    ) -> None:
        self._shape = shape
        self._envelope = envelope
        self._formatter = formatter
        self._with_token_ids = with_token_ids
        self._with_positions = with_positions
        # Every chunk then says that the usage is still to come.
        self._usage: UnsetType | None = None if with_usage else UNSET
        self._offsets: dict[int, int] = {}

    def opening(self, index: int, echo: Echo) -> bytes:
        choice = self._shape.opening(index)
        if echo.text and echo.top is None:
            choice = self._shape.part(index, echo.text, None, None)
        return b"" if choice is None else self._chunk(choice)

    def explained(self, first: int, event: Explained, echo: Echo) -> bytes:
        """The echo of an explained prompt, for each choice."""
        if echo.top is None:
            return b""
        logprobs = self._shape.logprobs(self._formatter.echo(event, echo.top))
        indexes = range(first, first + event.choices)
        self._offsets.update(dict.fromkeys(indexes, len(echo.text)))
        parts = (self._shape.part(index, echo.text, logprobs, None) for index in indexes)
        return b"".join(map(self._chunk, parts))

    def delta(self, index: int, delta: Delta) -> bytes:
        """A chunk, or nothing when there is nothing to tell yet."""
        logprobs = None
        if delta.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = self._shape.logprobs(self._formatter.output(delta, offset))
            self._offsets[index] = offset + len(delta.text)
        elif not delta.text and not self._with_token_ids:
            return b""
        choice = self._shape.part(index, delta.text, logprobs, None)
        if self._with_token_ids:
            choice.token_ids = list(delta.token_ids)
        if self._with_positions:
            choice.position = delta.position + len(delta.token_ids)
        return self._chunk(choice)

    def finished(self, index: int, finished: Finished) -> bytes:
        return self._chunk(self._shape.part(index, "", None, reason_of(finished)))

    def end(self, totals: Totals) -> bytes:
        """The last event, which has the usage and no choice."""
        usage, timing = totals.usage(), totals.timing()
        chunk = self._shape.chunk
        return sse(chunk(**self._envelope._asdict(), choices=[], usage=usage, kaiten=timing))

    def _chunk(self, choice: Any) -> bytes:
        id, created, model = self._envelope
        chunk = self._shape.chunk
        return sse(chunk(id=id, created=created, model=model, choices=[choice], usage=self._usage))


@dataclass(slots=True)
class Collected:
    """One choice, so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    text_chars: int = 0
    end: Finished | None = None
    prompt: models.PromptLogprobs | UnsetType = UNSET


class Collector:
    """One response as one object.

    `keeps_failures`: a choice may end in any way, as a stored one has; else that is an error.
    """

    def __init__(
        self,
        formatter: LogprobFormatter,
        *,
        choices: int,
        with_logprobs: bool = False,
        with_token_ids: bool = False,
        prompt_logprobs: int | None = None,
        keeps_failures: bool = False,
    ) -> None:
        self.choices = [Collected() for _ in range(choices)]
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._formatter = formatter
        self._prompt_logprobs = prompt_logprobs
        self._keeps_failures = keeps_failures

    def opening(self, index: int, echo: Echo) -> bytes:
        self.choices[index].texts.append(echo.text)
        self.choices[index].text_chars += len(echo.text)
        return b""

    def explained(self, first: int, event: Explained, echo: Echo) -> bytes:
        """The log-probabilities of the prompt, wherever they were asked for."""
        choices = self.choices[first : first + event.choices]
        if echo.top is not None:
            infos = self._formatter.echo(event, echo.top)
            for choice in choices:
                choice.logprobs += infos
        if self._keeps_failures or self._prompt_logprobs is not None:
            prompt = self._formatter.prompt(event, self._prompt_logprobs)
            for choice in choices:
                choice.prompt = prompt
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        choice = self.choices[index]
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if self._with_logprobs:
            choice.logprobs += self._formatter.output(delta, choice.text_chars)
        choice.text_chars += len(delta.text)
        return b""

    def finished(self, index: int, finished: Finished) -> bytes:
        if not self._keeps_failures:
            reason_of(finished)
        self.choices[index].end = finished
        return b""

    def reply(self, shape: Shape, envelope: Envelope, totals: Totals) -> Any:
        """All of it, when every choice has ended."""
        choices = []
        for index, each in enumerate(self.choices):
            assert each.end is not None
            logprobs = shape.logprobs(each.logprobs) if self._with_logprobs else None
            choice = shape.choice(index, "".join(each.texts), logprobs, reason_of(each.end))
            if self._with_token_ids:
                choice.token_ids = each.token_ids
            if shape.has_prompts:
                choice.prompt_logprobs = each.prompt
            choices.append(choice)
        reply = shape.reply(
            **envelope._asdict(), choices=choices, usage=totals.usage(), kaiten=totals.timing()
        )
        if not shape.has_prompts:
            reply.prompt_logprobs = self.choices[0].prompt
        return reply


def reason_of(finished: Finished) -> FinishWord:
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
