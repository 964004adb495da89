"""What is long is done in parts: whoever else is served gets turns meanwhile."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.batches.files import LINES_AT_ONCE, TooManyLines, at_most, lines_of
from gateway.openai.packing import INLINE_BYTES_MAX, packed, unpacked
from gateway.openai.responses.note import Note
from gateway.openai.responses.reply import Asked, ReasoningReply


@contextmanager
def counted_turns() -> Iterator[list[int]]:
    """How often somebody else had a turn in the block."""
    turns = [0]

    async def other() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    try:
        yield turns
    finally:
        task.cancel()


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def lines(*pieces: bytes, most: int = 1 << 20) -> list[bytes]:
    return [line async for line in lines_of(pieces_of(*pieces), most)]


async def test_a_million_empty_lines() -> None:
    with counted_turns() as turns:
        assert len(await lines(b"\n" * (1 << 20))) == 1 << 20
    assert turns[0] >= (1 << 20) // LINES_AT_ONCE


async def test_too_many_lines_are_counted_before_anybody_looks_at_them() -> None:
    """Empty ones as well: a file of those costs a look at its first piece."""
    for good in ([b"a\n\nb\n"], [b"a\n", b"\n", b"b"], [b"", b"a\nb", b"\nc"]):
        assert [piece async for piece in at_most(3, pieces_of(*good))] == good
    blank = b"\n" * (1 << 20)
    for bad, told in (([b"a\n\n\nb"], 0), ([b"a\n\n", b"\n\n"], 1), ([blank, blank], 0)):
        pieces = at_most(3, pieces_of(*bad))
        assert [await anext(pieces) for _ in range(told)] == bad[:told]
        with pytest.raises(TooManyLines, match=r"at most 3 lines, empty ones counted; it has more"):
            await anext(pieces)


# Some editors begin a file with a mark.
PIECES = st.binary(max_size=8).map(lambda raw: raw.replace(b"\0", b"\n"))
PIECES |= st.sampled_from([BOM_UTF8, BOM_UTF8[:1], BOM_UTF8[1:]])


@given(st.lists(PIECES))
def test_lines_are_those_of_all_pieces_together(pieces: list[bytes]) -> None:
    whole = b"".join(pieces).removeprefix(BOM_UTF8).split(b"\n")
    expected = whole if whole[-1] else whole[:-1]
    assert asyncio.run(lines(*pieces)) == expected


async def test_of_a_line_that_is_too_long_no_more_is_kept_than_tells_it() -> None:
    found = await lines(b"a" * 50, b"a" * 50, b"a\nb", most=10)
    assert [len(line) for line in found] == [12, 1]


@pytest.mark.parametrize("chars", [10, 8 * INLINE_BYTES_MAX])
async def test_a_long_conversation_is_packed_elsewhere(chars: int) -> None:
    asked = Asked(
        created_at=1,
        background=False,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        previous_response_id=None,
        reasoning=ReasoningReply(),
        store=True,
        temperature=1.0,
        top_logprobs=0,
        top_p=1.0,
    )
    # What cannot be made small.
    text = "".join(chr(0x4E00 + (17 * at * at + at) % 20_000) for at in range(chars))
    note = Note(asked=asked, turns=[("user", text)], with_logprobs=False)
    is_long = chars > 10
    with counted_turns() as turns:
        stored = await packed(note)
        assert bool(turns[0]) == is_long
        before = turns[0]
        assert await unpacked(stored, Note) == note
        assert (turns[0] > before) == is_long
