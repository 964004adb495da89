"""Start the children of a stack, keep them alive, stop them in order.

Before a child is ready its death ends the start, because it is a misconfiguration; afterwards it is
a fault, and the child is started again. The first SIGTERM or Ctrl-C drains, the second kills.
"""

import asyncio
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from kaiten.error_groups import first_alone
from kaiten.local.child import Child, ChildDied, ChildSpec, exit_text
from kaiten.local.log_reading import cause_of, fix_of, last_words
from kaiten.local.stack import Stack
from kaiten.start_error import StartError
from kaiten.waits import doubled_s

RESTART_S_MIN: Final = 0.2
RESTART_S_MAX: Final = 5.0
# A child that was ready for this long had recovered: its next death is a first death.
STABLE_S: Final = 30.0
FREE_BYTES_MIN: Final = 1 << 20


class Display(Protocol):
    """What the person at the terminal is told."""

    def starting(self, name: str) -> None: ...
    def progress(self, name: str, log: str) -> None: ...
    def ready(self, name: str, seconds: float) -> None: ...
    def died(self, name: str, why: str, restart_s: float) -> None: ...
    def stopping(self, name: str) -> None: ...
    def stopped(self, name: str, *, by_itself: bool) -> None: ...


def restart_s(deaths: int) -> float:
    """The wait after the n-th death in a row."""
    return doubled_s(RESTART_S_MIN, deaths, RESTART_S_MAX)


class Supervisor:
    """One run of a stack. `run` may be called once."""

    def __init__(self, stack: Stack, display: Display) -> None:
        self._stack = stack
        self._display = display
        self._children = {spec.name: Child(spec) for stage in stack.stages for spec in stage}
        self._asked = asyncio.Event()
        self._is_forced = False

    def __repr__(self) -> str:
        return f"Supervisor({', '.join(map(repr, self._children.values()))})"

    def stop_by_signals(self) -> None:
        """Of the program's main thread, whose running loop this must be. A terminal that ends says
        so twice (its shell, then the kernel), and nobody means all at once by it; under `nohup` it
        is ignored."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._asked.set)

    async def run(self, on_ready: Callable[[Mapping[str, float]], Awaitable[None]]) -> int:
        """Until asked to stop. `on_ready` gets the seconds each child took. The exit code."""
        try:
            await self._unless_asked(self._live(on_ready))
        finally:
            await self._stop_all()
        return 1 if self._is_forced else 0

    def stop(self) -> None:
        """Ask for the end: each part may finish what it does. Asked again, all at once."""
        if not self._asked.is_set():
            self._asked.set()
            return
        self._is_forced = True
        for child in self._children.values():
            child.kill()

    async def _unless_asked(self, work: Coroutine[Any, Any, None]) -> None:
        """Until the work fails, or somebody asks to stop."""
        task, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if task.done():
            task.result()
        task.cancel()
        await asyncio.wait({task})

    async def _live(self, on_ready: Callable[[Mapping[str, float]], Awaitable[None]]) -> None:
        """Start all, and keep each of them from when it was ready first."""
        took_s: dict[str, float] = {}
        with first_alone(StartError):
            async with asyncio.TaskGroup() as keepers:
                for stage in self._stack.stages:
                    await self._start(stage, took_s, keepers)
                await on_ready(took_s)

    async def _start(
        self, stage: Sequence[ChildSpec], took_s: dict[str, float], keepers: asyncio.TaskGroup
    ) -> None:
        with first_alone(StartError):
            async with asyncio.TaskGroup() as group:
                for spec in stage:
                    child = self._children[spec.name]
                    group.create_task(self._start_one(child, took_s, keepers))

    async def _start_one(
        self, child: Child, took_s: dict[str, float], keepers: asyncio.TaskGroup
    ) -> None:
        name = child.spec.name
        self._display.starting(name)
        try:
            await child.spawn()
            seconds = await child.until_ready(lambda log: self._display.progress(name, log))
        except ChildDied as error:
            raise start_error(child, error) from error
        except OSError as error:
            raise StartError(f"{name} cannot be started: {error}", fix_of(str(error))) from error
        took_s[name] = seconds
        self._display.ready(name, seconds)
        keepers.create_task(self._keep(child))

    async def _keep(self, child: Child) -> None:
        """Restart the child whenever it ends, and end it when it hangs."""
        deaths, unborn = 0, ""
        ready_s = time.monotonic()
        while True:
            hung = await child.ended_or_hung()
            deaths = 1 if time.monotonic() - ready_s > STABLE_S else deaths + 1
            why = unborn or hung or death_of(child)
            unborn = ""
            self._display.died(child.spec.name, why, restart_s(deaths))
            await asyncio.sleep(restart_s(deaths))
            try:
                # Shielded: a process must not be born unseen while this task is being cancelled.
                await asyncio.shield(child.spawn())
                self._display.ready(child.spec.name, await child.until_ready())
            except ChildDied as error:
                unborn = str(error) if child.is_running else ""
                await child.abandon()
            except OSError as error:
                # The others go on, and so do we.
                unborn = f"it cannot be started: {error}"
            ready_s = time.monotonic()

    async def _stop_all(self) -> None:
        for names in self._stack.stop_order:
            await asyncio.gather(*(self._stop_one(name) for name in names))

    async def _stop_one(self, name: str) -> None:
        child = self._children.get(name)
        if child is None:
            return
        if not child.is_running:
            await child.stop()
            return
        self._display.stopping(name)
        by_itself = await child.stop()
        self._display.stopped(name, by_itself=by_itself)


def death_of(child: Child) -> str:
    """How it ended, and what its log says about that, if it could."""
    how = exit_text(child.exit_code)
    code = child.exit_code or 0
    cause = cause_of(child.log_text()) if code > 0 else ""
    if code == -signal.SIGABRT:
        cause = last_words(child.log_text())
    told = f"{how}: {cause}" if cause else how
    folder = child.spec.log_path.parent
    return f"{told}; the disk of {folder} is full" if is_full(folder) else told


def is_full(folder: Path) -> bool:
    """Its disk has no room for what a store or a log writes at once. False: it cannot be told."""
    try:
        return shutil.disk_usage(folder).free < FREE_BYTES_MIN
    except OSError:
        return False


def start_error(child: Child, error: ChildDied) -> StartError:
    """The boxed cause and fix of a failed start."""
    said = cause_of(child.log_text())
    cause = f"{error}: {said}" if said else str(error)
    read = f"its log: {child.spec.log_path}"
    fix = fix_of(cause)
    return StartError(cause, f"{fix}\n{read}" if fix else read)
