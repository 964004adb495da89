"""An event loop in a thread of its own, for callers that have none, or stand in one: a notebook."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """It ends with the program, with what still runs in it cancelled, or before, by `close`."""

    def __init__(self, name: str) -> None:
        self._started = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
        self._awaited = set[Future[Any]]()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop, self._asked = self._started.result()

    def __repr__(self) -> str:
        return f"LoopThread({self._thread.name})"

    @property
    def is_current(self) -> bool:
        """Whoever asks runs there."""
        return current_thread() is self._thread

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it there. Who gives up waiting cancels the future, and with it the coroutine.

        RuntimeError: nothing runs there any more, or never did: threads are not forked.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError(
                f"{self._thread.name} was closed, or is of the process that this was forked from"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return future

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there, and wait for its result. Interrupted, it is cancelled."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, wait until it has ended. Again is fine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._asked.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._until_asked())
        except (SystemExit, KeyboardInterrupt) as ended:
            # What runs there has called for the end: who waits would do so for ever.
            for future in tuple(self._awaited):
                future.set_exception(ended)

    async def _until_asked(self) -> None:
        asked = asyncio.Event()
        self._started.set_result((asyncio.get_running_loop(), asked))
        await asked.wait()
