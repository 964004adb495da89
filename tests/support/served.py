"""`kaiten serve` with the shipped model as a process of its own, as a user starts it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
import psutil
import pytest

from kaiten.local.child import TETHER
from kaiten.v1.scheduler_service_pb2 import GetStateRequest, GetStateResponse
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.whole_stack import wait_until

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
WAIT_S = 120
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# A word in the command line of each process.
WORDS = {
    "store": "valkey-server",
    "scheduler": "scheduler_svc",
    "worker-0": "gpu_worker",
    "gateway": "gateway",
}


class Served:
    """A running stack and what it said when it was ready. Leaving the block kills it."""

    def __init__(
        self, data_dir: Path, *words: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self.data_dir = data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        # A test run that is itself killed leaves no stack behind.
        command = [sys.executable, "-I", "-S", TETHER, str(os.getpid())]
        command += [sys.executable, "-m", "kaiten", "serve", *words, "--data-dir", str(data_dir)]
        command += ["--grpc-port", "0", "--http-port", "0", "--threads", "1", "--dtype", "fp32"]
        command += [] if "--step-tokens" in words else ["--step-tokens", "512"]
        with (data_dir / "said").open("w") as said:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                cwd=ROOT,
                env=ENV | dict(environ or {}),
            )
        self.said = self._until_ready()
        self.address = self._shown(r"gRPC +(\S+)")
        self.http_url = self._shown(r"HTTP +(\S+)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def _until_ready(self) -> str:
        """Everything on stdout up to the end of the Python snippet."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "PY\n":
                return "".join(lines)
        pytest.fail(f"not ready: {(self.data_dir / 'said').read_text()}")

    def _shown(self, pattern: str) -> str:
        found = re.search(pattern, self.said)
        assert found, self.said
        return found[1]

    def snippet(self, start: str) -> str:
        """What was said to be pasted, from these words to the next empty line."""
        return self.said[self.said.index(start) :].split("\n\n")[0]

    def program(self) -> str:
        """The Python that was said to be pasted."""
        return self.said.split("<<'PY'\n")[1].rsplit("PY", 1)[0]

    def child(self, name: str) -> psutil.Process:
        """The running process of a part, as soon as there is one: it may be starting again."""
        return self._first(lambda: self.children(name), f"a process of {name}")

    def leader(self) -> psutil.Process:
        """Of the two schedulers the one that leads."""
        return self._first(self._leading, "a leader")[0]

    def state(self) -> GetStateResponse:
        """What the leader knows of the cell."""
        return self._first(self._leading, "a leader")[1]

    def _leading(self) -> list[tuple[psutil.Process, GetStateResponse]]:
        """Who leads says so itself."""
        told = []
        for scheduler in self.children("scheduler"):
            with suppress(psutil.Error, grpc.RpcError):
                told.append((scheduler, _state_of(scheduler)))
        return [(scheduler, state) for scheduler, state in told if state.is_leader]

    def _first(self, look: Callable[[], Sequence[T]], what: str) -> T:
        found: list[T] = []

        def is_there() -> bool:
            found[:] = look()
            return bool(found)

        wait_until(is_there, f"{what}; said: {(self.data_dir / 'said').read_text()}")
        return found[0]

    def children(self, name: str) -> list[psutil.Process]:
        """The processes of a part that run now."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            # It may end, or still be what it was forked from, while it is looked at.
            with suppress(psutil.Error):
                if any(WORDS[name] in each for each in process.cmdline()[:4]):
                    found.append(process)
        return found

    def is_whole(self) -> bool:
        """The last that was said of every part is that it is ready."""
        said = (self.data_dir / "said").read_text()
        last = dict(re.findall(r"^[\d:]+ (\S+) +(\w+)", said, re.MULTILINE))
        return {last.get(name) for name in (*WORDS, "standby")} == {"ready"}

    def listening(self) -> set[int]:
        """The TCP ports that its processes listen on now."""
        ports = set()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                found = process.net_connections("tcp")
                ports |= {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
        return ports

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


def _state_of(scheduler: psutil.Process) -> GetStateResponse:
    words = scheduler.cmdline()
    address = f"unix:{words[words.index('--grpc-socket') + 1]}"
    with grpc.insecure_channel(address) as channel:
        stub = SchedulerServiceStub(channel)
        state: GetStateResponse = stub.GetState(GetStateRequest(), timeout=1.0)
        return state
