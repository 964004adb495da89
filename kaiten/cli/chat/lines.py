"""What the user types: edited, remembered across runs, of several lines when asked for."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

from kaiten.cli.chat.state import WORDS

QUOTES: Final = '"""'
HISTORY_LINES: Final = 1000
FIRST: Final = "› "
NEXT: Final = "… "


def history_file() -> Path:
    """Where programs of this user keep what they remember (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "kaiten" / "chat_history"


@contextmanager
def on_interrupt(do: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """What Ctrl-C does here, and whether it came. Raised just anywhere it would leave a mess."""
    came = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        do()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def _raise() -> None:
    raise KeyboardInterrupt


class LineReader:
    """A context manager around a conversation. Without a terminal: plain lines, no memory."""

    def __init__(self, history: Path) -> None:
        self._history = history
        self._is_terminal = sys.stdin.isatty()
        self._remembers = False
        self._remembered = 0

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._remember()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if not self._remembers:
            return
        import readline

        # Another chat may have written meanwhile: add to it.
        said = readline.get_current_history_length() - self._remembered
        try:
            self._history.touch(mode=0o600)
            readline.append_history_file(max(0, said), str(self._history))
        except OSError:
            return

    def read(self) -> str | None:
        """What is said next; None at the end of input."""
        try:
            line = self._line(FIRST)
            if line.startswith(QUOTES):
                return self._until_quotes(line.removeprefix(QUOTES))
            while line.endswith("\\") and (more := self._next()) is not None:
                line = f"{line[:-1]}\n{more}"
        except EOFError:
            if self._is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            print(" (Ctrl-D leaves)")
            return ""
        return line

    def _until_quotes(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES) and (more := self._next()) is not None:
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def _next(self) -> str | None:
        """Of a text of several lines. None: a pipe has no more. EOFError: at a terminal its user
        has left."""
        try:
            return self._line(NEXT)
        except EOFError:
            if self._is_terminal:
                raise
            return None

    def _line(self, prompt: str) -> str:
        with on_interrupt(_raise):
            return input(prompt if self._is_terminal else "")

    def _remember(self) -> None:
        """History and completion, where Python was built with them."""
        try:
            import readline
        except ModuleNotFoundError:
            return
        # The current folder is nobody's home: ~ stays as it is for a user who has none.
        self._remembers = self._history.is_absolute()
        if self._remembers:
            with suppress(OSError):
                self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                readline.read_history_file(str(self._history))
        readline.set_history_length(HISTORY_LINES)
        self._remembered = readline.get_current_history_length()
        readline.set_completer_delims(" ")
        readline.set_completer(_completed)
        readline.parse_and_bind("tab: complete")


def _completed(begun: str, index: int) -> str | None:
    """The index-th command that begins so."""
    found = [word for word in WORDS if begun and word.startswith(begun)]
    return f"{found[index]} " if index < len(found) else None
