"""A response as a stream of events that can be taken up again anywhere, by any gateway.

An event's number follows from the output alone: 0 to 3 open it, 3 + p is the text up to its p-th
token, and five more numbers close it. So numbers ascend with gaps, and whoever has all up to
number n goes on with those above it.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from msgspec import Struct

from gateway.http.exchange import HttpExchange
from gateway.http.json_reply import to_json
from gateway.openai.chat import ChatTokenLogprob, token_logprobs
from gateway.openai.parts import Part, Parts
from gateway.openai.responses.reply import (
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningText,
    Response,
    Status,
    message_id,
)
from gateway.openai.usage import Count
from gateway.requests.stream import Finished

# The number before the first token's.
OPENED: Final = 3
# Text that was held back as it might have become more comes without a token.
HELD_BACK: Final = 1


class StateEvent(Struct, kw_only=True):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: Count
    response: Response


class ItemEvent(Struct, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: Count
    output_index: Count = 0
    item: OutputItem


class PartEvent(Struct, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: Count
    item_id: str
    output_index: Count = 0
    content_index: Count = 0
    part: OutputText | ReasoningText


class TextDeltaEvent(Struct, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: Count
    item_id: str
    output_index: Count = 0
    content_index: Count = 0
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(Struct, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: Count
    item_id: str
    output_index: Count = 0
    content_index: Count = 0
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(Struct, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: Count
    item_id: str
    output_index: Count
    content_index: Count
    delta: str


class ReasoningDoneEvent(Struct, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: Count
    item_id: str
    output_index: Count
    content_index: Count
    text: str


class ArgumentsDeltaEvent(Struct, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = (
        "response.function_call_arguments.delta"
    )
    sequence_number: Count
    item_id: str
    output_index: Count
    delta: str


class ArgumentsDoneEvent(Struct, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: Count
    item_id: str
    output_index: Count
    arguments: str


Event = (
    StateEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
EVENTS: Final = get_args(Event)
# How a stream says the end. There is no event for a response that was cancelled.
ENDS: Final[dict[Status, Any]] = {
    "completed": "response.completed",
    "failed": "response.failed",
}


class Resumed(NamedTuple):
    """What a client has: all events up to number `after`. -1: none."""

    after: int = -1

    @property
    def position(self) -> int:
        """How many tokens' text that is; more than there are where it has all of it."""
        return max(0, self.after - OPENED)


class Told(NamedTuple):
    """What a stream from the beginning was told; of an output that was read, its items."""

    text: str
    logprobs: list[ChatTokenLogprob]
    items: list[OutputItem] | None = None


class Stream(Protocol):
    """The events of one choice, with their numbers, from its parts."""

    end: Finished | None

    def opening(self) -> Iterable[Event]: ...

    def deltas(self, batch: list[Part]) -> Iterable[Event]: ...

    def told(self) -> Told | None:
        """At the end. None: it was not told from the beginning."""

    def closing(self, response: Response) -> Iterable[Event]: ...


async def send_response_stream(
    exchange: HttpExchange,
    stream: Stream,
    parts: Parts,
    finish: Callable[[Finished, Told | None], Awaitable[Response]],
    *,
    resumed: Resumed,
    ping_s: float,
) -> None:
    """`finish` makes the response of its end, and of what was told if that was all."""
    await exchange.start_events()
    async with exchange.pinged(ping_s), aclosing(parts.batches()) as batches:
        await _send(exchange, stream.opening(), resumed)
        async for batch in batches:
            await _send(exchange, stream.deltas(batch), resumed)
    assert stream.end is not None
    response = await finish(stream.end, stream.told())
    await _send(exchange, stream.closing(response), resumed)
    await exchange.end_events(b"")


async def _send(exchange: HttpExchange, events: Iterable[Event], resumed: Resumed) -> None:
    raw = b"".join(_to_event(each) for each in events if each.sequence_number > resumed.after)
    if raw:
        await exchange.send_events(raw)


def _to_event(event: Event) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + to_json(event) + b"\n\n"


def opened(begun: Response) -> Iterator[Event]:
    yield StateEvent(type="response.created", sequence_number=0, response=begun)
    yield StateEvent(type="response.in_progress", sequence_number=1, response=begun)


def closed(response: Response, number: int) -> StateEvent:
    kind = ENDS.get(response.status, "response.incomplete")
    return StateEvent(type=kind, sequence_number=number, response=response)


class TextStream:
    """Of an output that is all text. `parts` begin at `resumed.position`."""

    def __init__(self, begun: Response, resumed: Resumed) -> None:
        self._begun = begun
        self._resumed = resumed
        self._item_id = message_id(begun.id)
        self._position = resumed.position
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self.end: Finished | None = None

    def told(self) -> Told | None:
        return None if self._resumed.position else Told("".join(self._texts), self._logprobs)

    def opening(self) -> Iterator[Event]:
        yield from opened(self._begun)
        empty = OutputMessage(id=self._item_id, status="in_progress", content=[])
        yield ItemEvent(type="response.output_item.added", sequence_number=2, item=empty)
        yield PartEvent(
            type="response.content_part.added",
            sequence_number=OPENED,
            item_id=self._item_id,
            part=OutputText(),
        )

    def deltas(self, batch: list[Part]) -> Iterator[Event]:
        for part in batch:
            if part.end is not None:
                self.end = part.end
            elif not part.is_first and (part.text or part.logprobs):
                yield self._delta(part)

    def _delta(self, part: Part) -> TextDeltaEvent:
        is_held_back = part.position <= self._position
        self._position = max(part.position, self._position)
        logprobs = token_logprobs(part.logprobs or ())
        self._texts.append(part.text)
        self._logprobs += logprobs
        return TextDeltaEvent(
            sequence_number=OPENED + self._position + (HELD_BACK if is_held_back else 0),
            item_id=self._item_id,
            delta=part.text,
            logprobs=logprobs,
        )

    def closing(self, response: Response) -> Iterator[Event]:
        assert self.end is not None
        number = OPENED + self.end.output_tokens + HELD_BACK
        (item,) = response.output
        assert isinstance(item, OutputMessage)
        (part,) = item.content
        yield TextDoneEvent(
            sequence_number=number + 1,
            item_id=item.id,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield PartEvent(
            type="response.content_part.done",
            sequence_number=number + 2,
            item_id=item.id,
            part=part,
        )
        yield ItemEvent(type="response.output_item.done", sequence_number=number + 3, item=item)
        yield closed(response, number + 4)
