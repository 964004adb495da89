"""Many requests over one stream: each is accepted, refused and ended on its own.

One task per request; what they tell meets in a bounded queue, so a client that does not read holds
them all up, and what piles up meanwhile is coalesced where it always is: in the subscriptions.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final, Generic, NamedTuple, TypeVar

from gateway.requests.stream import Event, Generation
from service_kit.errors import KaitenError

# As the caller writes a request; here it is only handed on.
AskT = TypeVar("AskT")
# Wake-ups of all requests that wait to be written.
QUEUE_MAX: Final = 64


class Told(NamedTuple):
    """What request number `which` has to say: events, or the error that is its end."""

    which: int
    events: Sequence[Event] = ()
    error: KaitenError | None = None


class Batch(Generic[AskT]):
    """One batch. `end` may raise what a stream by itself would end with."""

    def __init__(
        self,
        asks: Sequence[AskT],
        generate: Callable[[AskT], Awaitable[Generation]],
        follow: Callable[[Generation, AskT], AbstractContextManager[Generation]],
        end: Callable[[Generation], None],
    ) -> None:
        self._asks = asks
        self._generate = generate
        self._follow = follow
        self._end = end
        self._queue: asyncio.Queue[Told | None] = asyncio.Queue(QUEUE_MAX)

    async def tellings(self) -> AsyncGenerator[Told, None]:
        """Everything all of them tell, as it comes. Leaving leaves them all."""
        telling = asyncio.create_task(self._tell_all())
        try:
            while (told := await self._queue.get()) is not None:
                yield told
            await telling
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    async def _tell_all(self) -> None:
        try:
            with ExitStack() as held:
                async with asyncio.TaskGroup() as tasks:
                    # One after the other: they are accepted in the order of the batch.
                    for which, ask in enumerate(self._asks):
                        await self._open(which, ask, held, tasks)
        except BaseException:
            # Nobody will read these any more, but the reader must not wait for ever.
            while not self._queue.empty():
                self._queue.get_nowait()
            self._queue.put_nowait(None)
            raise
        await self._queue.put(None)

    async def _open(self, which: int, ask: AskT, held: ExitStack, tasks: asyncio.TaskGroup) -> None:
        try:
            generation = await self._generate(ask)
        except KaitenError as error:
            await self._queue.put(Told(which, error=error))
            return
        own = ExitStack()
        own.enter_context(self._follow(generation, ask))
        # A task cancelled before its first step would never leave what it follows.
        held.callback(own.close)
        tasks.create_task(self._run(which, generation, own))

    async def _run(self, which: int, generation: Generation, own: ExitStack) -> None:
        try:
            with own:
                async for events in generation:
                    await self._queue.put(Told(which, events))
            self._end(generation)
        except KaitenError as error:
            await self._queue.put(Told(which, error=error))
