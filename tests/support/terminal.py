"""A real terminal for a program: a pty that it controls, read until it shows what is waited for."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
AGAIN_S = 2.0
# Not by `preexec_fn`: of a process that talks over gRPC it is a fork with gRPC's handlers, which
# sometimes end it.
CONTROLLED = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
# What moves the cursor and sets colours, as xterm names it; and what rings.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x07\x0f]|\r")


class Terminal:
    """A context manager; leaving it kills the program."""

    def __init__(self, *words: str, environ: Mapping[str, str] | None = None) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self._shown = b""
        self._seen_chars = 0
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", CONTROLLED, sys.executable, "-m", "kaiten", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
            | dict(environ or {}),
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)

    @property
    def shown(self) -> str:
        """All that was shown since the last wait, without control sequences."""
        return CONTROL.sub("", self._shown.decode(errors="replace"))[self._seen_chars :]

    def types(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, wanted: str) -> str:
        """What was shown before this. AssertionError: it ended, or too long went by."""
        limit_s = time.monotonic() + WAIT_S
        while wanted not in self.shown:
            left_s = limit_s - time.monotonic()
            assert left_s > 0, f"{wanted!r} was never shown: {self.shown!r}"
            assert self._read(left_s), f"ended before it showed {wanted!r}: {self.shown!r}"
        before, _, _ = self.shown.partition(wanted)
        self._seen_chars += len(before) + len(wanted)
        return before

    def ends(self) -> int:
        """The exit code, and what was shown until then in `shown`."""
        while self._read(WAIT_S):
            pass
        return self.process.wait(WAIT_S)

    def interrupt_until(self, wanted: str) -> None:
        """Ctrl-C, as a person does it: again when nothing comes of it.

        A signal between Python's look for signals and its wait for a key waits for the next one.
        """
        for _ in range(round(WAIT_S / AGAIN_S)):
            self.types("\x03")
            again_s = time.monotonic() + AGAIN_S
            while wanted not in self.shown and (left_s := again_s - time.monotonic()) > 0:
                assert self._read(left_s), f"ended before it showed {wanted!r}"
            if wanted in self.shown:
                break
        self.until(wanted)

    def terminate(self) -> None:
        """SIGTERM, and a key: one that comes just before the wait for a key is seen after it."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(OSError):
            self.types("\r")

    def _read(self, wait_s: float) -> bool:
        """False: nobody writes any more."""
        readable, _, _ = select.select([self._fd], [], [], wait_s)
        if not readable:
            return True
        try:
            read = os.read(self._fd, 65536)
        except OSError:
            return False
        self._shown += read
        return bool(read)
