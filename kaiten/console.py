"""The terminal that commands write to."""

import re
import sys
from contextlib import suppress
from typing import Any, Final, TextIO

from rich.console import Console

COLUMNS_WHEN_PIPED: Final = 100
# All but a tab and the ends of lines.
CONTROLS: Final = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class _Unfailing:
    """A stream for who has more to do than to be read: what it cannot take is lost. A terminal that
    was closed, a reader of a pipe that has left and a full disk raise at every line. As services'
    logs have it, which no client imports.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def harmless(text: str) -> str:
    """For a terminal, which obeys control characters: with pictures in their place. A model, and
    whoever wrote what it repeats, could set its title, its clipboard or what was shown before.
    """
    return CONTROLS.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def say(text: str) -> None:
    """On standard output, at once; to a program as it is."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def shown_default(value: object) -> str | None:
    """In `--help`; None: nothing is said of it."""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return None if value is None or isinstance(value, bool) or value == "" else str(value)


def console(*, stderr: bool = True, is_unfailing: bool = False) -> Console:
    """A console that does not wrap at 80 columns in a log file. `is_unfailing`: who writes goes on
    when nothing can be written any more."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else COLUMNS_WHEN_PIPED
    if is_unfailing:
        file: Any = _Unfailing(stream)
        return Console(file=file, width=width)
    return Console(stderr=stderr, width=width)
