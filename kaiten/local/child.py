"""One child process of the supervisor: its own log file, its death tied to ours, a polite stop."""

import asyncio
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Final

from kaiten.local import tether
from kaiten.local.liveness import Liveness, ProcessState, StartProgress, state_of

TETHER: Final = str(Path(tether.__file__))
READY_POLL_S: Final = 0.05
PING_EVERY_S: Final = 0.5
LOG_TAIL_BYTES: Final = 64 << 10
LOG_BYTES_MAX: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run and how to know that it is ready."""

    name: str
    command: tuple[str, ...]
    # On top of ours. Secrets go here: every user of the machine can read command lines.
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    log_path: Path
    # What it writes into, besides: made anew where somebody took it away.
    folders: tuple[Path, ...] = ()
    is_ready: Callable[[], Awaitable[bool]]
    # Any answer at all, of a process that was ready once; None: it is asked for nothing.
    is_alive: Callable[[], Awaitable[bool]] | None = None
    # Of its start, without a step of it.
    idle_s_max: float = 300.0
    # After SIGTERM, before SIGKILL. Longer than the services' own drain limit.
    stop_s_max: float = 45.0


class ChildDied(Exception):
    """The child ended before it was ready, or got no further."""


class Child:
    """A spec and the process that runs it now, if any."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.started_s = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._log_from = 0
        # Spawning and stopping exclude each other; nothing is spawned once a stop was asked for.
        self._changing = asyncio.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Child({self.spec.name}, pid={self.pid}, exit={self.exit_code})"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def spawn(self) -> None:
        """Start the process in its own session: Ctrl-C reaches the supervisor only. OSError: no
        process, file, folder or memory is to be had now."""
        for folder in (self.spec.log_path.parent, *self.spec.folders):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._changing:
            if self._is_closed:
                raise ChildDied(f"{self.spec.name} is being stopped")
            await self._turn_log()
            with self.spec.log_path.open("ab") as log:
                self._log_from = log.tell()
                self.started_s = time.monotonic()
                _require_thread()
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", TETHER, str(os.getpid()), *self.spec.command),
                    env=os.environ | dict(self.spec.environ),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    async def until_ready(self, progress: Callable[[str], None] = lambda _log: None) -> float:
        """Seconds from spawn to ready. `progress` gets the log so far, again and again."""
        start = StartProgress(self.started_s)
        while True:
            if not self.is_running:
                raise ChildDied(f"{self.spec.name} ended with {exit_text(self.exit_code)}")
            if await self.spec.is_ready():
                return time.monotonic() - self.started_s
            log = self.log_text()
            if start.idle_s(time.monotonic(), log) > self.spec.idle_s_max:
                idle = f"has done nothing for {self.spec.idle_s_max:g} s"
                raise ChildDied(f"{self.spec.name} is not ready, and {idle}")
            progress(log)
            await asyncio.sleep(READY_POLL_S)

    async def wait(self) -> None:
        """Return when the process has ended."""
        assert self._process is not None, f"{self.spec.name} was never spawned"
        await self._process.wait()

    async def ended_or_hung(self) -> str:
        """Return when the process has ended: by itself, or, with the reason, because it hung."""
        ending = asyncio.create_task(self.wait())
        watching = asyncio.create_task(self._until_hung())
        try:
            await asyncio.wait({ending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ""
            why = watching.result()
            await self.abandon()
            return why
        finally:
            ending.cancel()
            watching.cancel()

    async def _until_hung(self) -> str:
        is_alive, pid = self.spec.is_alive, self.pid
        if is_alive is None or pid is None:
            return await asyncio.Future[str]()
        liveness = Liveness(time.monotonic())
        while True:
            await asyncio.sleep(PING_EVERY_S)
            await self._turn_log()
            if await is_alive():
                liveness.answered(time.monotonic())
                continue
            state = state_of(pid, os.sysconf("SC_CLK_TCK"))
            if why := liveness.silent(time.monotonic(), state or ProcessState()):
                return why

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL when the limit passes. True when it ended by itself."""
        self._is_closed = True
        async with self._changing:
            if not self.is_running:
                return True
            self._signal(signal.SIGTERM)
            # Who was stopped by a signal hears of the other when it goes on.
            self._signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(self.wait(), self.spec.stop_s_max)
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True

    def kill(self) -> None:
        """SIGKILL at once, and for good."""
        self._is_closed = True
        self._signal(signal.SIGKILL)

    async def abandon(self) -> None:
        """End a process that is of no use; it may be spawned again."""
        if self.is_running:
            self._signal(signal.SIGKILL)
            await self.wait()

    def log_text(self) -> str:
        """The end of what this run of the process has logged; empty where somebody took it away."""
        try:
            with self.spec.log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                # Cut meanwhile, as logrotate does, all of it is of this run.
                begin = self._log_from if self._log_from <= end else 0
                log.seek(max(begin, end - LOG_TAIL_BYTES))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    async def _turn_log(self) -> None:
        """Too long, it becomes NAME.log.1, in place of the one before. The process goes on writing
        to the same file, at its end; what it writes meanwhile may be lost.
        """
        log = self.spec.log_path
        with suppress(OSError):
            if log.stat().st_size <= LOG_BYTES_MAX:
                return
            # Where there is no room for it, all the more is room needed.
            with suppress(OSError):
                await asyncio.to_thread(shutil.copyfile, log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)
            self._log_from = 0

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            # Popen's own looks first whether it has ended, and takes the exit code from asyncio,
            # which waits for it: that says 255 then, and a warning to whoever runs us.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _require_thread() -> None:
    """OSError: none is to be had. asyncio waits for a process by one, and would find that out when
    there is a process already, which nobody waits for then."""
    try:
        Thread(target=int).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from None


def exit_text(code: int | None) -> str:
    """`exit code 1`, or `signal SIGKILL`."""
    if code is not None and code < 0:
        # Real-time signals have no names.
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
