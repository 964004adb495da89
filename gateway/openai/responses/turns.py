"""Turns of a conversation and the items that they are told as, each made of the other."""

from collections.abc import Iterator, Sequence

from gateway.openai.responses.body import (
    FunctionCallInput,
    FunctionOutputInput,
    InputItem,
    InputMessage,
    InputReasoningText,
    ReasoningInput,
)
from gateway.openai.responses.reply import (
    NUMBERED,
    CallItem,
    CallOutputItem,
    InputTextReply,
    Item,
    MessageItem,
    OutputItem,
    OutputMessage,
    ReasoningItem,
    ReasoningText,
)
from gateway.requests.tool_rules import is_object
from gateway.values.generation_request import Message


def items_of_turns(prefix: str, turns: Sequence[Message], num_before: int = 0) -> list[Item]:
    """Their ids begin with the prefix: no id of what it answered, that may be referred to.
    `num_before`: turns that are told elsewhere.
    """
    return [
        item
        for index, turn in enumerate(turns, num_before)
        for item in _items_of_turn(f"{prefix}{NUMBERED}in{index}", turn)
    ]


def _items_of_turn(id: str, message: Message) -> Iterator[Item]:
    text = message.content
    if message.tool_call_id:
        yield CallOutputItem(id=id, call_id=message.tool_call_id, output=text or "")
        return
    if message.reasoning:
        thought = [ReasoningText(message.reasoning)]
        yield ReasoningItem(id=f"{id}_r", content=thought, status="completed")
    if text is not None:
        part = _said(text) if message.role == "assistant" else InputTextReply("input_text", text)
        yield MessageItem(id=id, role=message.role, content=[part])
    for number, call in enumerate(message.tool_calls):
        yield CallItem(
            id=f"{id}_{number}",
            call_id=call.id,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )


def turns_of_items(items: Sequence[Item | OutputItem]) -> list[Message]:
    """What an assistant thought, said and called is one. A call that was broken off is none: no
    template could write it. Its turn is one all the same: they take turns.
    """
    turns: list[Message] = []
    for item in items:
        given = as_input(item)
        if isinstance(given, FunctionCallInput) and not is_object(given.arguments):
            if turns and turns[-1].role == "assistant" and _says_something(turns[-1]):
                continue
            given = InputMessage(role="assistant", content="")
        given.added_to(turns)
    return turns


def _says_something(turn: Message) -> bool:
    return turn.content is not None or bool(turn.tool_calls)


def as_input(item: Item | OutputItem) -> InputItem:
    """As a client would send it back."""
    match item:
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            return FunctionCallInput(
                type="function_call", call_id=call_id, name=name, arguments=arguments
            )
        case CallOutputItem(call_id=call_id, output=output):
            return FunctionOutputInput(type="function_call_output", call_id=call_id, output=output)
        case ReasoningItem():
            content = [
                InputReasoningText(type="reasoning_text", text=part.text) for part in item.content
            ]
            return ReasoningInput(type="reasoning", content=content)
        case MessageItem() | OutputMessage():
            return InputMessage(role=item.role, content="".join(part.text for part in item.content))


def as_item(item: OutputItem) -> Item:
    """Of an output, as it is told once it is a part of what was asked."""
    if not isinstance(item, OutputMessage):
        return item
    content = [_said(part.text) for part in item.content]
    return MessageItem(id=item.id, role=item.role, status=item.status, content=content)


def _said(text: str) -> InputTextReply:
    return InputTextReply("output_text", text, annotations=[])
