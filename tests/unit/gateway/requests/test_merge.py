"""Several series as one: nothing is lost, one that fails ends all, who leaves waits for nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from gateway.requests.merge import QUEUE_MAX, interleaved


async def series(*told: str) -> AsyncIterator[str]:
    for each in told:
        yield each


async def test_each_is_told_in_its_own_order_and_they_begin_in_theirs() -> None:
    long = [str(index) for index in range(3 * QUEUE_MAX)]
    told = [each async for each in interleaved([series("a", "b"), series(), series(*long)])]
    assert told[0] == (0, "a")
    assert [said for which, said in told if which == 0] == ["a", "b"]
    assert [said for which, said in told if which == 2] == long


async def test_of_none_there_is_nothing() -> None:
    none: list[AsyncIterator[str]] = []
    assert [each async for each in interleaved(none)] == []


async def test_what_one_raises_ends_all() -> None:
    left = asyncio.Event()

    async def silent() -> AsyncIterator[str]:
        try:
            await asyncio.Event().wait()
            yield "never"
        finally:
            left.set()

    async def broken() -> AsyncIterator[str]:
        yield "a"
        raise ValueError("broken")

    told = interleaved([silent(), broken()])
    assert await anext(told) == (1, "a")
    with pytest.raises(ValueError, match="broken"):
        await anext(told)
    assert left.is_set()


async def test_leaving_stops_those_who_wait_for_room() -> None:
    said = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal said
        while True:
            said += 1
            yield "more"

    async with aclosing(interleaved([endless(), endless()])) as told:
        assert await anext(told) == (0, "more")
    assert said <= QUEUE_MAX + 4
