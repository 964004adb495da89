"""Programs of Python that begin with their dear imports done: forked from a process that has them.

    ended = warm_python.run("-c", CODE, "word", imports=TORCH)           as `python -P -c CODE word`
    ended = warm_python.run("-m", "tests.x", imports=TRANSFORMERS)       as `python -P -m tests.x`

A process of tests has one such process for each list of imports, from when it first asks on. What
is read when those are imported (an environment, say) a program cannot choose any more.
"""

import atexit
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
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from kaiten.local.tether import PR_SET_PDEATHSIG
from tools.children import ROOT, tethered

LIMIT_S: Final = 280
TORCH: Final = ("torch",)
TRANSFORMERS: Final = ("tests.support.uncompiled_transformers",)


class Ended(NamedTuple):
    """How it ended (None: it was killed, having taken too long), and what it wrote."""

    code: int | None
    out: str
    err: str


def run(
    *words: str,
    imports: Sequence[str],
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """To its end, in the folder of this project."""
    server = _server(tuple(imports))
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        streams[0].write_text(stdin)
        asked = {
            "words": words,
            "streams": list(map(str, streams)),
            "environ": os.environ | dict(environ or {}),
        }
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "nothing is imported any more: see the standard error of this process"
        return Ended(json.loads(answer), *(path.read_text() for path in streams[1:]))


@cache
def _server(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        tethered("-P", "-m", __name__, *imports),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # It ends when nobody can ask any more.
    atexit.register(server.communicate)
    return server


def _serve(imports: Sequence[str]) -> None:
    for name in imports:
        import_module(name)
    # Nobody copies what all have by looking whether it is garbage.
    gc.freeze()
    forking = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = forking.Process(target=_become, kwargs=json.loads(line))
        process.start()
        process.join(LIMIT_S)
        ended = process.exitcode
        process.kill()
        process.join()
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()


def _become(words: Sequence[str], streams: Sequence[str], environ: Mapping[str, str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environ)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    # A process of `multiprocessing` begins with another one.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    option, program, *rest = words
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _serve(sys.argv[1:])
