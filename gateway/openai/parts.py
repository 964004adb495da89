"""The one place where events become parts of an answer: chunks of a stream, or one object."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.http.exchange import HttpExchange, now_s
from gateway.http.json_reply import DONE, to_event
from gateway.openai.logprobs import LogprobFormatter, Offsets, PromptLogprobs, TokenLogprob
from gateway.openai.usage import Count, Timing, Usage, ends_of
from gateway.requests.merge import merged
from gateway.requests.replay import Replay
from gateway.requests.stream import Accepted, Delta, Done, Explained, Finished, Generation
from gateway.text.tools.flat import Call, flat, joined
from gateway.text.tools.parser import Piece
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import Cancelled, DeadlineExceeded, Failed, Unsatisfiable, Unserved

# Of one choice, before they are put together: each takes more than its text.
PARTS_MAX: Final = 1024
Fields = dict[str, Any]
Reason = Literal["stop", "length"]
TokenIds = Annotated[list[Count], Meta(description="with return_token_ids")]
REASONS: Final[dict[FinishReason, Reason]] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


class Head(Struct, kw_only=True):
    """What every object of one response begins with."""

    id: str
    object: str
    created: Count
    model: str


class Chunk(Head, kw_only=True):
    """One event of a stream."""

    choices: list[Any]
    # With include_usage it is null until the last chunk, and else not there; with
    # continuous_usage_stats it is of this choice, so far.
    usage: Usage | UnsetType | None = UNSET
    kaiten: Timing | UnsetType = UNSET


def head_of(id: str, model: str) -> Fields:
    return {"id": id, "created": now_s(), "model": model}


class Echo(NamedTuple):
    """What a completion shows of its prompt."""

    text: str = ""
    # Likeliest tokens with its log-probabilities, which are then shown too; None: text only.
    top: int | None = None


class Part(NamedTuple):
    """What an event says of one choice, or all events together."""

    choice: int
    # The answer; where the output is read that is less than all of it.
    text: str = ""
    is_first: bool = False
    logprobs: Sequence[TokenLogprob] | None = None
    token_ids: list[int] | UnsetType = UNSET
    # Output tokens of the choice up to here.
    position: int = 0
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    end: Finished | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()
    # The same and the text in their order, where the output is read.
    pieces: Sequence[Piece] = ()
    # At the end: there were calls, which is why it ended.
    has_calls: bool = False

    @property
    def reason(self) -> Reason | None:
        """OpenAI's word for the end. Other ends are errors there, and are raised."""
        return None if self.end is None else reason_of(self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What an answer shows beside the text. `prompt_logprobs`: so many likeliest tokens."""

    logprobs: bool = True
    token_ids: bool = False
    prompt_logprobs: int | None = None
    # An output with calls ended for them.
    calls_as_end: bool = True


class Parts:
    """What happens to the generations of one HTTP request."""

    def __init__(
        self,
        generations: Sequence[Generation | Replay],
        formatter: LogprobFormatter,
        shown: Shown,
        echoes: Sequence[Echo] = (Echo(),),
    ) -> None:
        self._generations = generations
        self._formatter = formatter
        self._shown = shown
        # By the first choice of each prompt: how many it has, and what they show of it.
        self._prompts: dict[int, tuple[int, Echo]] = {}
        self._count = 0
        # Of those that were accepted, by the same.
        self._prompt_tokens: dict[int, int] = {}
        for generation, echo in zip(generations, echoes, strict=True):
            self._prompts[self._count] = len(generation.choices), echo
            self._count += len(generation.choices)
        self._offsets = [
            Offsets(choice.text.detokenizer())
            for generation in generations
            for choice in generation.choices
        ]
        self._done: list[pb.Done] = []

    def ends(self) -> Fields:
        """What the last message of a response says."""
        return ends_of(self._done)

    def usage_so_far(self, part: Part) -> Usage:
        """Of the part's choice, with it."""
        output = part.position if part.end is None else part.end.output_tokens
        first = max(each for each in self._prompt_tokens if each <= part.choice)
        prompt = self._prompt_tokens[first]
        return Usage(prompt, output, prompt + output)

    async def batches(self) -> AsyncGenerator[list[Part], None]:
        """What piled up comes together."""
        async with aclosing(merged(self._generations)) as batches:
            async for base, events in batches:
                parts: list[Part] = []
                for event in events:
                    if isinstance(event, Explained):
                        # It takes as long as a thousand deltas.
                        parts += await asyncio.to_thread(self._of_prompt, base, event)
                    else:
                        parts += self._of(base, event)
                if parts:
                    yield parts

    async def collect(self, *, is_strict: bool = True) -> list[Part]:
        """Each choice as one part. `is_strict`: an end that is an error is raised at once."""
        found: list[list[Part]] = [[] for _ in range(self._count)]
        for generation in self._generations:
            generation.collect()
        async with aclosing(self.batches()) as batches:
            async for parts in batches:
                for part in parts:
                    so_far = found[part.choice]
                    so_far.append(part)
                    if len(so_far) > PARTS_MAX:
                        so_far[:] = [self._whole(part.choice, so_far)]
                    if is_strict and part.end is not None:
                        reason_of(part.end)
        return [self._whole(choice, parts) for choice, parts in enumerate(found)]

    def _whole(self, choice: int, parts: Sequence[Part]) -> Part:
        told = [part.logprobs for part in parts if part.logprobs]
        ids = [part.token_ids for part in parts if part.token_ids is not UNSET]
        prompts = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not UNSET]
        return Part(
            choice,
            "".join([part.text for part in parts]),
            logprobs=list(chain.from_iterable(told)) if self._shown.logprobs else None,
            token_ids=list(chain.from_iterable(ids)) if self._shown.token_ids else UNSET,
            prompt_logprobs=prompts[0] if prompts else UNSET,
            end=parts[-1].end,
            reasoning="".join([part.reasoning for part in parts]),
            calls=joined([call for part in parts for call in part.calls]),
            pieces=[piece for part in parts for piece in part.pieces],
            has_calls=parts[-1].has_calls,
        )

    def _of(self, base: int, event: Accepted | Delta | Finished | Done) -> Iterable[Part]:
        match event:
            case Delta():
                return self._of_delta(base + event.choice, event)
            case Finished():
                has_calls = event.has_calls and self._shown.calls_as_end
                return (Part(base + event.choice, end=event, has_calls=has_calls),)
            case Done():
                self._done.append(event.message)
                return ()
            case Accepted():
                self._prompt_tokens[base] = event.prompt_tokens
                n, echo = self._prompts[base]
                # With its log-probabilities the prompt's text comes when these are known.
                text = echo.text if echo.top is None else ""
                return [Part(base + index, text, is_first=True) for index in range(n)]

    def _of_delta(self, index: int, delta: Delta) -> Iterable[Part]:
        """A part, or nothing when there is nothing to tell yet."""
        shown, logprobs, pieces = self._shown, None, delta.pieces
        part = Part(index, delta.text) if pieces is None else _part(index, pieces)
        if not (_says_something(part) or delta.logprobs or shown.token_ids):
            return ()
        if shown.logprobs and delta.logprobs:
            logprobs = self._formatter.output(delta, self._offsets[index])
        token_ids = list(delta.token_ids) if shown.token_ids else UNSET
        position = delta.position + len(delta.token_ids)
        return (part._replace(logprobs=logprobs, token_ids=token_ids, position=position),)

    def _of_prompt(self, first: int, event: Explained) -> Iterable[Part]:
        """The same for each of its choices, if it is told at all."""
        echo, most = self._prompts[first][1], self._shown.prompt_logprobs
        part = Part(first)
        if echo.top is None and most is None:
            return ()
        if echo.top is not None:
            tokens = self._formatter.prompt(event, echo.top)
            part = part._replace(text=echo.text, logprobs=tokens)
        if most is not None:
            part = part._replace(prompt_logprobs=self._formatter.prompt_by_id(event, most))
        indexes = range(first, first + event.choices)
        for each in indexes:
            self._offsets[each].skip(len(part.text))
        return [part._replace(choice=each) for each in indexes]


def _says_something(part: Part) -> bool:
    return bool(part.text or part.reasoning or part.calls)


def _part(choice: int, pieces: Sequence[Piece]) -> Part:
    text, reasoning, calls = flat(pieces)
    return Part(choice, text, reasoning=reasoning, calls=calls, pieces=pieces)


class Format(NamedTuple):
    """How one of the two generating endpoints writes its answers."""

    id_prefix: str
    chunk: type[Chunk]
    # Of a chunk; None: this part is not told.
    choice: Callable[[Part], Struct | None]
    # All choices at once, between the first and the last fields of every reply.
    reply: Callable[[Fields, Sequence[Part], Fields], Struct]


async def send_stream(
    exchange: HttpExchange,
    form: Format,
    head: Fields,
    parts: Parts,
    *,
    with_usage: bool,
    is_continuous: bool = False,
    ping_s: float,
) -> None:
    """A chunk per part, one for the usage if it is wanted, and [DONE]. `is_continuous`: each has
    the usage so far."""

    def usage(part: Part) -> Usage | UnsetType | None:
        if is_continuous:
            return parts.usage_so_far(part)
        return None if with_usage else UNSET

    await exchange.start_events()
    async with exchange.pinged(ping_s), aclosing(parts.batches()) as batches:
        async for batch in batches:
            choices = [(part, form.choice(part)) for part in batch]
            chunks = [
                form.chunk(**head, choices=[choice], usage=usage(part))
                for part, choice in choices
                if choice is not None
            ]
            if chunks:
                await exchange.send_events(b"".join(map(to_event, chunks)))
    last = to_event(form.chunk(**head, choices=[], **parts.ends())) if with_usage else b""
    await exchange.end_events(last + DONE)


def reason_of(finished: Finished) -> Reason:
    """OpenAI's word. Other ends are errors there, and are raised."""
    reason = finished.reason
    if reason in REASONS:
        return REASONS[reason]
    if reason == FinishReason.FINISH_REASON_CANCELLED:
        raise Cancelled
    if reason == FinishReason.FINISH_REASON_DEADLINE_EXCEEDED:
        phase = "decode" if finished.output_tokens else "queue or prefill"
        raise DeadlineExceeded(phase, finished.error)
    if finished.is_retryable:
        raise Unserved(finished.error)
    if finished.is_unsatisfiable:
        raise Unsatisfiable(finished.error)
    raise Failed(finished.error or "the system could not compute this choice")
