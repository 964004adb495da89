"""Which turns of a long conversation are left out."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.responses.conversation import newest, origin_of
from gateway.values.generation_request import Message

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TURNS = st.lists(st.builds(Message, role=ROLES, content=st.text("x", max_size=9)), max_size=40)


def size(turns: Sequence[Message]) -> int:
    return sum(len(each.content or "") for each in turns)


@given(turns=TURNS, room=st.integers(0, 200))
async def test_the_newest_that_fit_and_none_less(turns: list[Message], room: int) -> None:
    asked = 0

    async def fits(kept: Sequence[Message]) -> bool:
        nonlocal asked
        asked += 1
        return size(kept) <= room

    found = list(await newest(turns, fits))
    head = next((i for i, each in enumerate(turns) if each.role != "system"), len(turns))
    starts = [i for i in range(head + 1, len(turns)) if turns[i].role == "user"]
    possible = [turns, *([*turns[:head], *turns[start:]] for start in starts)]
    assert found == next((each for each in possible if size(each) <= room), possible[-1])
    assert asked <= max(len(starts), 1).bit_length() + 1


@pytest.mark.parametrize(
    ("id", "request_id"),
    [
        ("msg_x", "x"),
        ("msg_x_1", "x_1"),
        ("msg_x_1~2", "x_1"),
        ("rs_x_1", "x_1"),
        # As many calls as one likes, and one look for them.
        ("fc_x_1", "x"),
        ("fc_x", ""),
        ("msg_a/b", ""),
        ("resp_x", ""),
    ],
)
def test_whose_output_an_item_may_be_of(id: str, request_id: str) -> None:
    assert origin_of(id) == request_id
