"""What `kaiten serve` says: bars while things load, plain lines when nobody watches or later on."""

import math
import time
from types import TracebackType
from typing import Self

from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kaiten.console import console
from kaiten.local.log_reading import activity_of
from kaiten.start_error import StartError

WAIT_SHOWN_S = 5.0


def show_start_error(error: StartError) -> None:
    """The cause and the fix, framed."""
    text = Text(error.cause)
    if error.fix:
        text.append(f"\n\n{error.fix}", style="bold")
    console().print(Panel(text, title="cannot start", title_align="left", border_style="red"))


class TerminalDisplay:
    """One bar per starting child; a context manager around the whole run."""

    def __init__(self) -> None:
        self._console = console(is_unfailing=True)
        self._tasks: dict[str, TaskID] = {}
        self._waiting: dict[tuple[str, str], float] = {}
        self._has_served = False
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[activity]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def be_quiet(self) -> None:
        """Say nothing from now on."""
        self._console.quiet = True

    def all_ready(self) -> None:
        """Leave the finished bars where they are; from now on there are lines only."""
        self._bars.stop()
        self._tasks.clear()
        self._has_served = True

    def starting(self, name: str) -> None:
        self._tasks[name] = self._bars.add_task(name, total=None, activity="starting")

    def progress(self, name: str, log: str) -> None:
        activity = activity_of(log)
        if activity is None:
            return
        if activity.is_waiting and not self._console.is_terminal:
            self._waits(name, activity.event)
        self._bars.update(
            self._tasks[name],
            activity=activity.event,
            completed=activity.done,
            total=activity.total or None,
        )

    def ready(self, name: str, seconds: float) -> None:
        if name in self._tasks:
            self._bars.update(self._tasks[name], activity="ready", total=1, completed=1)
        if name not in self._tasks or not self._console.is_terminal:
            self._line(name, f"ready after {seconds:.1f} s")

    def died(self, name: str, why: str, restart_s: float) -> None:
        self._line(name, f"died ({why}); starting it again in {restart_s:g} s")

    def stopping(self, name: str) -> None:
        hint = "; what runs may end first, Ctrl-C again stops all at once" * self._has_served
        self._has_served = False
        self._line(name, f"stopping{hint}")

    def stopped(self, name: str, *, by_itself: bool) -> None:
        self._line(name, "stopped" if by_itself else "did not stop in time and was killed")

    def _waits(self, name: str, why: str) -> None:
        """Where nobody sees the bars: one line per reason, once it has stood for a while."""
        since_s = self._waiting.setdefault((name, why), time.monotonic())
        if time.monotonic() - since_s > WAIT_SHOWN_S:
            self._waiting[name, why] = math.inf
            self._line(name, why)

    def _line(self, name: str, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        self._console.print(Text(f"{clock} {name:10} {text}"), soft_wrap=True)
