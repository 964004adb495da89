"""Rounds of a conversation: what is told of it, and when a response's answer becomes a part."""

import pytest

from gateway.openai.conversations.content import ITEMS_MAX, PLACES_MAX, Content, Round
from gateway.openai.packing import unpacked
from gateway.openai.responses.reply import (
    CallItem,
    CallOutputItem,
    InputTextReply,
    Item,
    MessageItem,
)
from service_kit.errors import InvalidRequest


def message(id: str) -> MessageItem:
    return MessageItem(id=id, role="user", content=[InputTextReply("input_text", id)])


def ids(content: Content) -> list[str]:
    return [each.id for each in content.items]


GIVEN = Round([message("a")])
OPEN = Round([message("b")], "r1", is_open=True)
CONTENT = Content(metadata={"k": "v"}, rounds=[GIVEN, OPEN, Round([message("c")])])


def test_an_answer_is_told_where_it_was_asked() -> None:
    assert ids(CONTENT) == ["a", "c"]
    assert CONTENT.open_round == OPEN
    assert ids(CONTENT.closed([message("said")])) == ["a", "b", "said", "c"]
    # One that came to nothing leaves nothing, its id included.
    assert CONTENT.closed(None).rounds == [GIVEN, Round([message("c")])]


@pytest.mark.parametrize("content", [CONTENT, CONTENT.closed([message("said")])])
def test_what_was_there_when_a_response_began(content: Content) -> None:
    assert content.has_round_of("r1")
    assert ids(content.before("r1")) == ["a"]
    for other in ("", "r2"):
        assert not content.has_round_of(other)
        assert content.before(other).rounds == content.rounds


def test_an_item_is_taken_out() -> None:
    assert ids(CONTENT.without("a")) == ["c"]
    assert CONTENT.without("a").rounds[0] == OPEN
    # What is not told yet is not taken out either.
    assert CONTENT.without("b") == CONTENT
    closed = CONTENT.closed([])
    assert ids(closed.without("b")) == ["a", "c"]
    # The same request again is still known.
    assert closed.without("b").has_round_of("r1")


def test_where_an_item_stood_is_remembered_for_a_page() -> None:
    content = Content(metadata={}, rounds=[Round([message(id) for id in "abcd"])])
    for gone in "bca":
        content = content.without(gone)
    assert [content.num_before(id) for id in "abcx"] == [0, 0, 0, None]
    assert content.num_before("d") == 1
    many = [f"m{number}" for number in range(PLACES_MAX + 1)]
    content = content.with_round(Round([message(id) for id in many]))
    for id in many[::-1]:
        content = content.without(id)
    assert len(content.places) == PLACES_MAX
    assert [content.num_before(id) for id in (many[0], many[-2], many[-1])] == [1, 1, None]


async def test_it_comes_back_as_it_was_and_is_bounded() -> None:
    items: list[Item] = [
        CallItem(id="f", call_id="c", name="n", arguments="{}", status="completed"),
        CallOutputItem(id="o", call_id="c", output="x"),
    ]
    content = CONTENT.with_round(Round(items))
    assert await unpacked(await content.packed(bounded="items"), Content) == content
    many = content.with_round(Round([message("m")] * (ITEMS_MAX - 4)))
    with pytest.raises(InvalidRequest, match=f"items: would make .* longer than {ITEMS_MAX} items"):
        await many.packed(bounded="items")
    # An answer is always taken.
    assert await many.packed()
    large = content.with_round(Round([message("x" * (9 << 20))]))
    with pytest.raises(InvalidRequest, match=r"conversation: would make .* bytes; delete some"):
        await large.packed(bounded="conversation")
