"""Several generations as one series of events: the prompts of one HTTP request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gateway.requests.stream import Event, Generation


async def merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, Sequence[Event]], None]:
    """(first choice index of the generation, its events), in the order in which they come."""
    if len(generations) == 1:
        # The usual case costs no task per event.
        async for events in generations[0]:
            yield 0, events
        return
    bases = _bases(generations)
    waiting = {_next(generation): index for index, generation in enumerate(generations)}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task, index in [(t, i) for t, i in waiting.items() if t.done()]:
                del waiting[task]
                taken = task.result()
                if taken is not None:
                    waiting[_next(generations[index])] = index
                    yield bases[index], taken
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(generation: Generation) -> "asyncio.Task[Sequence[Event] | None]":
    async def take() -> Sequence[Event] | None:
        return await anext(generation, None)

    return asyncio.create_task(take())


def _bases(generations: Sequence[Generation]) -> list[int]:
    bases, total = [], 0
    for generation in generations:
        bases.append(total)
        total += len(generation.choices)
    return bases
