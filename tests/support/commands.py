"""`kaiten` commands as real processes that start in a tenth of a second.

    code, out, err = kaiten("watch", "--once", "--address", address)    one that ends by itself
    Command("batch", str(path)).kill()                                  and one that does not

Forked as services are (`tests/support/processes.py`) from a server that has imported what they
import. That a shell can start them, others show: tests/unit/kaiten/cli/test_command_line.py.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.support.processes import forked

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


class Ended(NamedTuple):
    """How it ended, and what it wrote to each stream."""

    code: int
    out: str
    err: str


class Command:
    """One that runs, in the folder of this project."""

    def __init__(
        self, *words: str, stdin: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        self._folder = TemporaryDirectory(prefix="kaiten-command-")
        folder = Path(self._folder.name)
        self._streams = [folder / name for name in ("in", "out", "err")]
        self._streams[0].write_text(stdin)
        environ = os.environ | {"COLUMNS": "100"} | dict(environ or {})
        self._process = forked(_enter, words, self._streams, environ)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """As a crash, and wait until it is gone."""
        self._process.kill()
        self._process.join(WAIT_S)
        self._folder.cleanup()

    def ends(self) -> Ended:
        """Wait for it."""
        self._process.join(WAIT_S)
        code = self._process.exitcode
        out, err = (path.read_text() for path in self._streams[1:])
        if code is None:
            self.kill()
        self._folder.cleanup()
        assert code is not None, f"it has not ended: {out}{err}"
        assert "Traceback" not in out + err, out + err
        return Ended(code, out, err)


def kaiten(*words: str, stdin: str = "", environ: Mapping[str, str] | None = None) -> Ended:
    """Run it to its end."""
    return Command(*words, stdin=stdin, environ=environ).ends()


def said_by(*words: str, stdin: str = "", **environ: str) -> tuple[int, str]:
    """Exit code and everything written. Words are joined, because boxes wrap them."""
    code, out, err = kaiten(*words, stdin=stdin, environ=environ)
    return code, _joined(out + err)


def here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The same without a process: for many cases of one kind, of which one has a process."""
    from kaiten.cli import app

    with pytest.raises(SystemExit) as left:
        app.main(words)
    assert isinstance(left.value.code, int)
    return left.value.code, _joined("".join(capsys.readouterr()))


def _joined(text: str) -> str:
    return re.sub(r"[\s│]+", " ", text)


def _enter(words: tuple[str, ...], streams: list[Path], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    # A process of `multiprocessing` begins with another one.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.argv = ["kaiten", *words]
    from kaiten.cli import main

    main()
