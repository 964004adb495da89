"""Events of items: the same numbers and texts however an output came in parts."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.openai.responses.conversation import origin_of
from gateway.openai.responses.events import Event
from gateway.openai.responses.items import DELTAS, Items, after
from gateway.openai.responses.reply import CallItem, message_id
from gateway.openai.responses.turns import items_of_turns
from gateway.text.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway.text.tools.parser import OutputParser, Piece, Speech
from gateway.values.generation_request import Message, ToolCall

SPEECH = Speech(
    tools=next(each for each in TOOL_FORMATS if each.name == "hermes"),
    names=frozenset({"clock"}),
    reasoning=REASONING_FORMATS[0],
)
CALL = '<tool_call>\n{"name": "clock", "arguments": {"a": "é}"}}\n</tool_call>'
TEXTS = [
    "",
    "Hello.",
    f"<think>\nHm.\n</think>\n\nI see.{CALL}\n{CALL} Done.",
    f"{CALL}and {CALL}",
    "<think>Hm",
]
cuts = st.lists(st.integers(0, 200), max_size=8)


def pieces_of(text: str, at: list[int]) -> list[list[Piece]]:
    parser = OutputParser(SPEECH, str)
    borders = sorted({0, len(text), *(cut for cut in at if cut < len(text))})
    parts = [parser.feed(text[begin:end]) for begin, end in itertools.pairwise(borders)]
    return [*parts, parser.flush()]


def told(text: str, at: list[int]) -> tuple[Items, list[Event]]:
    items = Items("resp_x", 1)
    events = [event for pieces in pieces_of(text, at) for event in items.feed(pieces)]
    return items, events + items.end("completed")


def by_character(events: list[Event]) -> list[tuple[int, str, str]]:
    """What each number tells."""
    found: list[tuple[int, str, str]] = []
    for event in events:
        text = event.delta if isinstance(event, DELTAS) else " "
        first = event.sequence_number - len(text) + 1
        found += [(first + index, event.type, character) for index, character in enumerate(text)]
    return found


@settings(max_examples=200, deadline=None)
@given(text=st.sampled_from(TEXTS), one=cuts, other=cuts, known=st.integers(-1, 200))
def test_who_comes_back_anywhere_gets_what_is_left(
    text: str, one: list[int], other: list[int], known: int
) -> None:
    items, events = told(text, one)
    others, later = told(text, other)
    assert items.output == others.output
    numbers = [number for number, _, _ in by_character(events)]
    assert numbers == [*range(2, items.number + 1)]
    rest = [left for event in later if (left := after(event, known)) is not None]
    assert by_character(rest) == [each for each in by_character(events) if each[0] > known]


def test_items_come_one_after_the_other() -> None:
    items, events = told(TEXTS[2], [])
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == items.output
    assert [type(item).__struct_config__.tag for item in items.output] == kinds
    assert len({item.id for item in items.output}) == len(kinds)
    indexes = [event.output_index for event in events]  # type: ignore[union-attr]
    assert indexes == sorted(indexes)


def test_no_two_responses_have_an_item_of_one_id() -> None:
    """Whatever their clients have called them."""
    names = ["a", *("a_0", "a_1", "a_in0", "a_in0_0", "a_in0_r", "a-in0", "a.1")]
    asked = [
        Message(
            role="assistant",
            content="b",
            reasoning="c",
            tool_calls=(ToolCall(id="d", name="e", arguments="{}"),),
        ),
        Message(role="user", content="f"),
    ]
    ids: list[str] = []
    for name in names:
        items = Items(f"resp_{name}", 1)
        for pieces in pieces_of(TEXTS[2], []):
            items.feed(pieces)
        items.end("completed")
        found = [*items.output, *items_of_turns(message_id(f"resp_{name}"), asked)]
        ids += [item.id for item in found]
        assert {origin_of(item.id) for item in items.output} == {name}
    assert len({*ids}) == len(ids)


def test_a_call_is_complete_where_its_arguments_are() -> None:
    """However the output ended: by a stop string, too."""
    for end in range(TEXTS[2].index("{") + 1, len(TEXTS[2])):
        items, _ = told(TEXTS[2][:end], [])
        for item in items.output:
            if isinstance(item, CallItem):
                assert (item.status == "completed") is (item.arguments == '{"a": "é}"}')


def test_an_output_of_nothing_is_a_message() -> None:
    items, events = told("", [])
    assert [event.type.removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert len(items.output) == 1


def test_what_is_cut_off_is_incomplete() -> None:
    items = Items("resp_x", 1)
    items.feed([piece for pieces in pieces_of(TEXTS[2], []) for piece in pieces])
    items.end("incomplete")
    assert [item.status for item in items.output][-2:] == ["completed", "incomplete"]
