"""Programs of Python that share their imports: each is forked when those are done.

    ended = run({"one": ["pytest", "-q", …]}, imports=["torch"], environ={}, limit_s=280)

A program is a module and its words, as behind `python -m`. All run at once, and end at the latest
with the process that forked them.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from kaiten.local.tether import PR_SET_PDEATHSIG
from service_kit.lifecycle import YOUNG_OBJECTS

ROOT: Final = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a program ended, and what it wrote to both streams."""

    code: int
    said: str


def run(
    programs: Mapping[str, Sequence[str]],
    *,
    imports: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float,
) -> dict[str, Ended]:
    """By name, each to its end. TimeoutExpired: they took longer; then none runs any more."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({"folder": folder, "imports": imports, "programs": programs}),
            cwd=ROOT,
            env=os.environ | dict(environ),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        codes = json.loads(done.stdout)
        return {name: Ended(codes[name], Path(folder, name).read_text()) for name in programs}


def _run_all(folder: str, imports: Sequence[str], programs: Mapping[str, Sequence[str]]) -> None:
    for name in imports:
        import_module(name)
    # Nobody copies what all have by looking whether it is garbage.
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    forking = multiprocessing.get_context("fork")
    running = {
        name: forking.Process(target=_become, args=(Path(folder, name), words))
        for name, words in programs.items()
    }
    for process in running.values():
        process.start()
    for process in running.values():
        process.join()
    json.dump({name: process.exitcode for name, process in running.items()}, sys.stdout)


def _become(target: Path, words: Sequence[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    said = os.open(target, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_all(**json.load(sys.stdin))
