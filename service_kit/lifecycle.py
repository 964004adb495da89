"""start → serve → drain → stop, the same in every process.

The first SIGTERM or SIGINT drains: `serve` goes on while `drain` refuses new work and lets the old
end, for at most `drain_s`. The second stops at once. `stop` always runs, also after a failed start.

What a process holds when it is ready, it holds to its end, so the collector of cyclic garbage need
never look at it: a full collection would stop every stream for 0.2 s in a gateway and 0.5 s in a
worker, on a machine whose cores are busy.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import structlog
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from service_kit.errors import ConfigError

log = structlog.get_logger()

# A stop that hangs longer than this is abandoned: the supervisor must not have to kill us.
STOP_S_MAX: Final = 10.0
THREADS_S_MAX: Final = 2.0
# Net new ones between two looks for cyclic garbage, which a service hardly makes. With Python's 700
# a busy scheduler spends an eighth of its time on them.
YOUNG_OBJECTS: Final = 10_000


class Service(Protocol):
    """What `run` runs. Each method is called at most once, in this order."""

    @property
    def drain_s(self) -> float: ...

    async def start(self) -> Mapping[str, object] | None:
        """Make ready. What it returns becomes fields of the `service.ready` log line."""

    async def serve(self) -> None:
        """Work until cancelled. Returning means there is nothing left to do."""

    async def drain(self) -> None:
        """Turn readiness off, refuse new work, return when the accepted work has ended."""

    async def stop(self) -> None:
        """Release everything. Must work after a `start` that failed half-way."""


async def endless(loop: Coroutine[Any, Any, object]) -> None:
    """A loop of a task group that goes on for as long as the group. RuntimeError: it ended, also by
    a cancellation that nobody asked for, which a group takes for a task that is done.
    """
    try:
        await loop
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    raise RuntimeError(f"{getattr(loop, '__qualname__', loop)} ended")


def launch(build: Callable[[], Service]) -> int:
    """Build a service (settings may be wrong) and run it. Returns the exit code."""
    # Imports make hundreds of thousands of objects and hardly any garbage.
    gc.disable()
    try:
        service = build()
    except ConfigError as error:
        return _refuse(error)
    finally:
        gc.enable()
    return run(service)


def run(service: Service) -> int:
    """Run a service to its end: 0 drained or done, 1 crashed, 2 misconfigured."""
    runner, code = asyncio.Runner(), 0
    try:
        runner.run(_Run(service).main())
    except ConfigError as error:
        code = _refuse(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        log.critical("service.crashed", reason=reason, exc_info=error)
        code = 1
    # A thread at what lasts, as the loading of a model or a step that hangs, is waited for so long.
    end = threading.Timer(THREADS_S_MAX, os._exit, (code,))
    end.daemon = True
    end.start()
    runner.close()
    end.cancel()
    return code


def _refuse(error: ConfigError) -> int:
    """One sentence on stderr: framed for a person, else an event as all others are."""
    if sys.stderr.isatty():
        text = Text(str(error))
        panel = Panel(text, title="cannot start", title_align="left", border_style="red")
        Console(stderr=True).print(panel)
    else:
        told = {"event": "service.refused", "level": "error", "reason": str(error)}
        sys.stderr.write(json.dumps(told) + "\n")
    return 2


class _Run:
    """One run: the signals counted so far and the wait that the next one interrupts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._signals = 0
        self._drain_asked = asyncio.Event()
        self._stop_asked = asyncio.Event()

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if await self._unless(self._drain_asked, self._start()):
                await self._serve()
        finally:
            await self._stop()

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        log.info("service.signal", signal=signal.Signals(number).name, count=self._signals)
        (self._drain_asked if self._signals == 1 else self._stop_asked).set()

    async def _start(self) -> None:
        fields = await self._service.start()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        log.info("service.ready", **(fields or {}))

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._service.serve(), name="serve")
        try:
            if not await self._unless(self._drain_asked, _watch(serving)):
                await self._unless(self._stop_asked, self._drain(serving))
        finally:
            await _cancelled(serving)

    async def _drain(self, serving: "asyncio.Task[None]") -> None:
        """Drain within the limit; a `serve` that crashes meanwhile ends the drain."""
        log.info("service.draining", drain_s=self._service.drain_s)
        draining = asyncio.create_task(self._service.drain(), name="drain")
        try:
            async with asyncio.timeout(self._service.drain_s):
                await asyncio.wait({draining, serving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                await draining
        except TimeoutError:
            log.warning("service.drain_timeout", drain_s=self._service.drain_s)
        finally:
            await _cancelled(draining)

    async def _stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await self._service.stop()
        except TimeoutError:
            log.warning("service.stop_timeout", stop_s=STOP_S_MAX)
        log.info("service.stopped")

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """True when the work ended by itself, False when the event came first and cancelled it."""
        task = asyncio.create_task(work)
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            await _cancelled(task)
            await _cancelled(waiting)


async def _watch(task: "asyncio.Task[None]") -> None:
    """Wait for a task without owning it: cancelling the wait leaves the task running."""
    await asyncio.shield(task)


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel and wait until it really ended. Its result, if any, was read by somebody else."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    elif not task.cancelled():
        task.exception()
