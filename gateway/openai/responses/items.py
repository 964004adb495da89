"""The items of an output that is read, and the events that tell them: reasoning, text, calls.

However the output came in parts, items, texts and numbers are the same, at every gateway: an event
has a number of its own, a delta one for each of its characters, and it is told by its last.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from gateway.openai.chat import ChatTokenLogprob, token_logprobs
from gateway.openai.parts import Part
from gateway.openai.responses.events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    Event,
    ItemEvent,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    Resumed,
    TextDeltaEvent,
    TextDoneEvent,
    Told,
    closed,
    opened,
)
from gateway.openai.responses.reply import (
    NUMBERED,
    CallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    message_id,
)
from gateway.requests.stream import Finished
from gateway.requests.tool_rules import is_object
from gateway.text.tools.parser import CallArguments, CallBegins, Content, Piece
from kaiten.v1.common_pb2 import FinishReason

DELTAS: Final = (TextDeltaEvent, ReasoningDeltaEvent, ArgumentsDeltaEvent)


class Items:
    """Of one response. `number` is that of the last event."""

    def __init__(self, response_id: str, number: int) -> None:
        self.number = number
        self.output: list[OutputItem] = []
        self._id = message_id(response_id).removeprefix("msg_")
        # Of the item that goes on; its text is in parts.
        self._open: OutputItem | None = None
        self._said: list[str] = []
        self._events: list[Event] = []

    def feed(self, pieces: Sequence[Piece]) -> list[Event]:
        for piece in pieces:
            if isinstance(piece, CallBegins):
                self._begin(
                    CallItem(
                        id=f"fc_{self._id}_{piece.call}",
                        call_id=piece.id,
                        name=piece.name,
                        arguments="",
                        status="in_progress",
                    )
                )
            elif isinstance(piece, CallArguments):
                self._go_on(ArgumentsDeltaEvent, piece.fragment)
            elif isinstance(piece, Content):
                self._text(piece.text)
            else:
                if not isinstance(self._open, ReasoningItem):
                    item = ReasoningItem(id=f"rs_{self._id}", content=[], status="in_progress")
                    self._begin(item, ReasoningText(""))
                self._go_on(ReasoningDeltaEvent, piece.text, content_index=0)
        return self._told()

    def end(self, status: ItemStatus) -> list[Event]:
        """With a message, if there was nothing at all."""
        if self._open is None:
            self._text("")
        self._close(status)
        return self._told()

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _text(self, text: str) -> None:
        if not isinstance(self._open, OutputMessage):
            before = sum(isinstance(each, OutputMessage) for each in self.output)
            id = f"msg_{self._id}{NUMBERED}{before}" if before else f"msg_{self._id}"
            self._begin(OutputMessage(id=id, content=[], status="in_progress"), OutputText())
        if text:
            self._go_on(TextDeltaEvent, text, content_index=0, logprobs=[])

    def _begin(self, item: OutputItem, part: OutputText | ReasoningText | None = None) -> None:
        self._close("completed")
        self._open = item
        self._tell(ItemEvent, type="response.output_item.added", item=item)
        if part is not None:
            kind = "response.content_part.added"
            self._tell(PartEvent, type=kind, item_id=item.id, content_index=0, part=part)

    def _go_on(self, kind: type[Any], text: str, **fields: Any) -> None:
        assert self._open is not None
        self._said.append(text)
        self.number += len(text) - 1
        self._tell(kind, item_id=self._open.id, delta=text, **fields)

    def _close(self, status: ItemStatus) -> None:
        item, text = self._open, "".join(self._said)
        self._open, self._said = None, []
        done = "response.content_part.done"
        match item:
            case None:
                return
            case CallItem():
                # However it ended: a stop string may break it off, too.
                told: ItemStatus = "completed" if is_object(text) else "incomplete"
                item = replace(item, arguments=text, status=told)
                self._tell(ArgumentsDoneEvent, item_id=item.id, arguments=text)
            case ReasoningItem():
                thought = ReasoningText(text)
                item = replace(item, content=[thought], status=status)
                self._tell(ReasoningDoneEvent, item_id=item.id, content_index=0, text=text)
                self._tell(PartEvent, type=done, item_id=item.id, content_index=0, part=thought)
            case OutputMessage():
                part = OutputText(text=text)
                item = replace(item, content=[part], status=status)
                self._tell(TextDoneEvent, item_id=item.id, content_index=0, text=text, logprobs=[])
                self._tell(PartEvent, type=done, item_id=item.id, content_index=0, part=part)
        self._tell(ItemEvent, type="response.output_item.done", item=item)
        self.output.append(item)

    def _tell(self, kind: type[Any], **fields: Any) -> None:
        self.number += 1
        told = kind(sequence_number=self.number, output_index=len(self.output), **fields)
        self._events.append(told)


class ItemStream:
    """Of an output that is read. Its parts begin at the beginning, whatever the client has."""

    def __init__(self, begun: Response, resumed: Resumed) -> None:
        self._begun = begun
        self._after = resumed.after
        self._items = Items(begun.id, 1)
        self._last: list[Event] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self.end: Finished | None = None

    def opening(self) -> Iterator[Event]:
        yield from opened(self._begun)

    def deltas(self, batch: list[Part]) -> Iterator[Event]:
        for part in batch:
            self.end = part.end or self.end
            self._logprobs += token_logprobs(part.logprobs or ())
            yield from self._left(self._items.feed(part.pieces))

    def told(self) -> Told:
        assert self.end is not None
        self._last = self._items.end(item_status(self.end))
        return Told("", self._logprobs, self._items.output)

    def closing(self, response: Response) -> Iterator[Event]:
        yield from self._left(self._last)
        yield closed(response, self._items.number + 1)

    def _left(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            if (left := after(event, self._after)) is not None:
                yield left


def items_of(whole: Part, response_id: str) -> list[OutputItem]:
    """Of an output that has ended."""
    assert whole.end is not None
    items = Items(response_id, 1)
    items.feed(whole.pieces)
    items.end(item_status(whole.end))
    return items.output


def item_status(end: Finished) -> ItemStatus:
    """Of the last item."""
    return "completed" if end.reason == FinishReason.FINISH_REASON_STOP else "incomplete"


def after(event: Event, number: int) -> Event | None:
    """What of an event is not known to who has all up to this number."""
    left = event.sequence_number - number
    if left <= 0:
        return None
    if isinstance(event, DELTAS) and left < len(event.delta):
        return replace(event, delta=event.delta[-left:])
    return event
