"""The whole stack for a benchmark.

`kaiten serve` as a user runs it, on free ports in a scratch folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kaiten.client import AsyncClient
from kaiten.local.ports import HeldPort
from ledger import Ledger

if TYPE_CHECKING:
    from psutil import Process

READY_S_MAX = 120.0
# An environment of `serving` in which nothing is folded away before it is read.
WHOLE_JOURNAL = {"KAITEN_SCHEDULER_FOLD_RECORDS": "100000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a running stack answers."""

    grpc: str
    http: str
    store_url: str
    pid: int
    # What it keeps, until the block ends.
    data: Path


@contextlib.contextmanager
def serving(
    model: str = "", *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """Serve `model` (empty: the shipped one) until the block ends."""
    command = [sys.executable, "-P", "-m", "kaiten", "serve", *([model] if model else [])]
    with (
        HeldPort() as grpc_port,
        HeldPort() as http_port,
        tempfile.TemporaryDirectory(prefix="kaiten-bench-") as folder,
    ):
        command += ["--grpc-port", str(grpc_port.number), "--http-port", str(http_port.number)]
        with (Path(folder) / "serve.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *flags, "--data-dir", f"{folder}/data"],
                stdout=log,
                stderr=log,
                env={**os.environ, **(environ or {})},
            )
        try:
            _wait(process, grpc_port.address, Path(folder) / "serve.log")
            (socket_path,) = (Path(folder) / "data").glob("run/store.sock")
            yield Stack(
                grpc=grpc_port.address,
                http=f"http://{http_port.address}",
                store_url=f"unix://{socket_path}",
                pid=process.pid,
                data=Path(folder) / "data",
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


@contextlib.asynccontextmanager
async def seats_taken(stack: Stack, seats: int, tokens: int) -> AsyncIterator[None]:
    """One request with so many choices, streaming when the block begins: whoever comes meanwhile
    waits, and all seats become free at once. Leaving the block waits for its end."""
    async with (
        AsyncClient(stack.grpc) as client,
        client.generate(
            token_ids=[7] * 16, n=seats, max_tokens=tokens, ignore_eos=True
        ) as generation,
    ):
        await anext(generation)
        yield
        await generation.result()


async def journal_seq(stack: Stack) -> int:
    """The newest record of its journal."""
    ledger = await Ledger.connect(stack.store_url)
    lease = await ledger.leader()
    await ledger.close()
    assert lease is not None
    return lease.journal_seq


def _wait(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    check = [sys.executable, "-P", "-m", "kaiten", "healthcheck", address]
    give_up_at = time.monotonic() + READY_S_MAX
    while subprocess.run(check, capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"the stack did not start:\n{log.read_text()}")
        time.sleep(0.1)


def rss_mb(pid: int) -> dict[str, float]:
    """Resident memory of every process of a stack, by what it runs."""
    return _by_role(pid, lambda process: process.memory_info().rss / 2**20)


def cpu_s(pid: int) -> dict[str, float]:
    """CPU time used so far by every process of a stack, by what it runs, and by ours: "client"."""
    import psutil

    me = psutil.Process().cpu_times()
    return _by_role(pid, lambda process: sum(process.cpu_times()[:2])) | {
        "client": me.user + me.system
    }


def pids_of(pid: int) -> dict[str, int]:
    """Of the Python processes of a stack with one of each kind, by what they run, and of ours."""
    import psutil

    children = psutil.Process(pid).children(recursive=True)
    found = {_role(each): each.pid for each in children if "-m" in each.cmdline()}
    return found | {"client": os.getpid()}


def _by_role(pid: int, figure: "Callable[[Process], float]") -> dict[str, float]:
    import psutil

    found: dict[str, float] = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        name = _role(process)
        found[name] = round(found.get(name, 0) + figure(process), 3)
    return found


def _role(process: "Process") -> str:
    words: Sequence[str] = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
