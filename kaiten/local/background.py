"""A stack beside a program: its supervisor runs in a thread, its processes end with this one."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from kaiten.local.private import remove_own
from kaiten.local.stack import ServeOptions, Stack, planned_stack
from kaiten.local.supervisor import Display, Supervisor
from kaiten.loop_thread import LoopThread
from kaiten.start_error import StartError


class BackgroundStack:
    """Ready once it is made. StartError when it cannot start; its logs stay in the data folder.

    The thread lives as long as the stack: the system ends a child with the thread that made it.
    """

    def __init__(self, options: ServeOptions, display: Display) -> None:
        self.loop = LoopThread("kaiten-stack")
        self._ready = Future[Stack]()
        self._supervisor = Future[Supervisor]()
        self._running = self.loop.start(self._run(options, display))
        self._running.add_done_callback(self._has_ended)
        try:
            self.stack = self._ready.result()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"BackgroundStack({self.stack.http_url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop every process in order, and wait for that. Again is fine."""
        if not self._running.done():
            self.loop.call(self._stop())
        # Why it did not start was told to whoever made it.
        with suppress(Exception):
            self._running.result()
        self.loop.close()

    async def _run(self, options: ServeOptions, display: Display) -> None:
        with planned_stack(options) as stack:
            supervisor = Supervisor(stack, display)
            self._supervisor.set_result(supervisor)

            async def on_ready(_took_s: Mapping[str, float]) -> None:
                self._ready.set_result(stack)

            await supervisor.run(on_ready)

    async def _stop(self) -> None:
        if self._supervisor.done():
            self._supervisor.result().stop()

    def _has_ended(self, running: Future[None]) -> None:
        """Before it was ready: somebody waits for it."""
        if not self._ready.done():
            self._ready.set_exception(running.exception() or RuntimeError("the stack was stopped"))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """For a stack's files, this user's alone. Who cannot start is told of a log in it: it stays."""
    pid, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="kaiten-"))
    try:
        yield folder
    except StartError:
        raise
    except BaseException:
        remove_own(folder, pid)
        raise
    remove_own(folder, pid)
