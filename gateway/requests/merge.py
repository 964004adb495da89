"""Several series as one: the prompts of one HTTP request, the requests of one gRPC batch."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Final, TypeVar

from gateway.requests.replay import Replay
from gateway.requests.stream import Event, Generation

SaidT = TypeVar("SaidT")
# A client that does not read holds all of them up, and what piles up meanwhile is coalesced where
# it always is: in the subscriptions.
QUEUE_MAX: Final = 64


async def merged(
    generations: Sequence[Generation | Replay],
) -> AsyncGenerator[tuple[int, Sequence[Event]], None]:
    """(first choice index of the generation, its events), in the order in which they come."""
    if len(generations) == 1:
        # The usual case costs no task.
        async for events in generations[0]:
            yield 0, events
        return
    bases = [0, *accumulate(len(generation.choices) for generation in generations)]
    async with aclosing(interleaved(generations)) as told:
        async for which, events in told:
            yield bases[which], events


async def interleaved(
    sources: Sequence[AsyncIterator[SaidT]],
) -> AsyncGenerator[tuple[int, SaidT], None]:
    """(which source, what it said), as it comes; they begin in their order.

    What a source raises ends it all. Leaving cancels them all, but closes none.
    """
    queue: asyncio.Queue[tuple[int, SaidT] | Exception | None] = asyncio.Queue(QUEUE_MAX)

    async def pump(which: int, source: AsyncIterator[SaidT]) -> None:
        end = None
        try:
            async for said in source:
                await queue.put((which, said))
        except Exception as error:
            end = error
        await queue.put(end)

    pumps = [asyncio.create_task(pump(which, source)) for which, source in enumerate(sources)]
    try:
        for _ in pumps:
            while (told := await queue.get()) is not None:
                if isinstance(told, Exception):
                    raise told
                yield told
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
