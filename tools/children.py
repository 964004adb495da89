"""Child processes that never outlive who started them, however that ended."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kaiten.local import tether

ROOT: Final = Path(__file__).resolve().parents[1]


def tied(program: str, *words: str) -> list[str]:
    """A command that the kernel kills when this process ends; `program` is a path.

    No `preexec_fn`: with it Popen forks, and of a process that speaks gRPC one fork in fourteen
    was dead before it became anything.
    """
    return [
        sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), program, *words,
    ]  # fmt: skip


def tethered(*words: str) -> list[str]:
    """The same of this Python."""
    return tied(sys.executable, *words)


def environment(*folders: Path) -> dict[str, str]:
    """Of a child that imports from these folders first, then from here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that do nothing but burn a core, until the block ends."""
    loops = [subprocess.Popen(tethered("-c", "while True: pass")) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    limit_s: float | None = None,
) -> int | None:
    """The exit code, or None if it was killed at the time limit. What it prints goes to `log`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=file, stderr=file, start_new_session=True
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The group: whatever it started and did not end goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
