"""Services as real processes that start in a tenth of a second.

Importing torch and grpc takes seconds, so every process is forked from one server process that has
imported them already (multiprocessing's forkserver). Apart from that each is what its console
script would start: its own pid, signals, event loop and log file.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SCHEDULER = "scheduler_svc.main"
FAULTY_SCHEDULER = "tests.fakes.faulty_scheduler"
GATEWAY = "gateway.main"
WORKER = "gpu_worker.main"
MOCK_WORKER = "tests.fakes.mock_worker"
AHEAD_WORKER = "tests.fakes.ahead_worker"
HELD_WORKER = "tests.fakes.held_worker"

# What the fork server imports, before the first start.
PRELOADED = ["tests.support.preload"]
_PR_SET_PDEATHSIG = 1
EXIT_TIMEOUT_S = 60.0

_context = multiprocessing.get_context("forkserver")


def command_lines() -> list[list[str]]:
    """Of the processes below this one. Others may end while they are looked at."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found


class ServiceProcess:
    """One service: `main(argv)` of a module. It can be started again after it has ended."""

    def __init__(self, *, name: str, module: str, argv: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.module = module
        self.argv = list(argv)
        self.log_path = log_path
        # On top of the fork server's, which is that of the first start of all.
        self.environ: dict[str, str] = {}
        self._process: multiprocessing.process.BaseProcess | None = None

    def __repr__(self) -> str:
        return f"<ServiceProcess {self.name} pid={self.pid if self.is_alive else None}>"

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return None if self._process is None else self._process.exitcode

    def start(self) -> None:
        assert not self.is_alive, f"{self.name} runs already"
        self._process = forked(_enter, self.module, self.argv, str(self.log_path), self.environ)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As a crash, and wait until it is gone. Fine when it has ended already."""
        if self._process is not None and self._process.is_alive():
            self.send(signal.SIGKILL)
            self.join()

    def join(self) -> int:
        """Wait for the end; the exit code."""
        assert self._process is not None
        self._process.join(EXIT_TIMEOUT_S)
        assert self._process.exitcode is not None, f"{self.name} did not end: {self.log()[-2000:]}"
        return self._process.exitcode

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


def forked(target: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
    """A process that does this and ends, at the latest with the tests."""
    # One thread each: a test has many processes and few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _context.set_forkserver_preload(PRELOADED)
    process = _context.Process(target=_tied, args=(target, args), daemon=True)
    process.start()
    return process


def events(process: ServiceProcess, event: str) -> list[dict[str, Any]]:
    """Log lines of that name. Who waits for one asks often: no other line is parsed, nor the one
    that is being written.
    """
    whole, _, _ = process.log().rpartition("\n")
    lines = (line for line in whole.splitlines() if event in line and line[0] == "{")
    return [entry for entry in map(json.loads, lines) if entry.get("event") == event]


def _tied(target: Callable[..., None], args: tuple[object, ...]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server, our parent to the system, lives for as long as any of its children does: a
    # test run that is itself killed leaves nothing behind because each of them looks.
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    target(*args)


def _enter(module: str, argv: list[str], log_path: str, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(importlib.import_module(module).main(argv))


def _end_with_the_tests() -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)
