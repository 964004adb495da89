"""`kaiten top`: the batch of a cell in a terminal, live, by keyboard."""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import ClassVar, Final

from rich.markup import escape
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from kaiten.cli.complaint import complain
from kaiten.cli.live.cell_view import (
    NO_RATES,
    QUEUE_COLUMNS,
    RUNNING_COLUMNS,
    WORKER_COLUMNS,
    Row,
    block_map,
    choices,
    headline,
    queue_rows,
    rates,
    running_rows,
    worker_rows,
)
from kaiten.cli.live.watch import Watching
from kaiten.client.errors import ApiError
from kaiten.client.live_core import LiveCore
from kaiten.tls import TLS
from kaiten.v1.watch_pb2 import WatchResponse

# Shown of a table; a terminal that scrolls through more shows no more.
ROWS_MAX: Final = 512
# Intervals without a word, and seconds, before what is shown is called old.
SILENT_MIN: Final = 3
SILENT_S: Final = 2.0
NOT_YET: Final = "nothing was told yet"
TABLES: Final = {
    "workers": WORKER_COLUMNS,
    "running": RUNNING_COLUMNS,
    "queue": QUEUE_COLUMNS,
}


def top(
    gateways: Sequence[tuple[str, TLS | None]], *, api_key: str | None, interval_ms: int
) -> int:
    """Until `q`; the exit code."""
    watching = Watching(gateways, api_key, interval_ms, resume_s=math.inf)
    silent_s = max(SILENT_S, SILENT_MIN * interval_ms / 1e3)
    shown = Top(watching, watching.close, silent_s=silent_s)
    shown.run()
    if shown.error is not None:
        return complain(shown.error, ", ".join(address for address, _ in gateways))
    return shown.return_code or 0


class Top(App[None]):
    """`told` is read on a thread of its own, until `leave` ends it. Of a server that hangs, or
    is started again, nothing comes: after `silent_s` it is said how old that is what is shown.
    """

    CSS = """
    #headline { height: auto; text-style: bold; }
    DataTable { height: auto; max-height: 40%; }
    #running { height: 1fr; min-height: 3; }
    #blocks { height: auto; max-height: 40%; overflow-y: auto; display: none; }
    """
    TITLE = "kaiten top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        ("space", "hold", "Hold"),
        ("b", "blocks", "KV blocks"),
        ("w", "table('workers')", "Workers"),
        ("r", "table('running')", "Running"),
        ("u", "table('queue')", "Queue"),
    ]

    def __init__(
        self, told: Iterable[WatchResponse], leave: Callable[[], None], *, silent_s: float
    ) -> None:
        super().__init__()
        # Why nothing is told any more; that ends it.
        self.error: ApiError | None = None
        self._told, self._leave, self._silent_s = told, leave, silent_s
        # As it is, and as it is shown: held, it stays as it was then.
        self._core = self._seen = LiveCore()
        self._newest: WatchResponse | None = None
        self._rates, self._line = NO_RATES, NOT_YET
        self._headline = Static(NOT_YET, id="headline", markup=False)
        self._heard_s = time.monotonic()
        self._is_held = False

    def compose(self) -> ComposeResult:
        yield self._headline
        for name, columns in TABLES.items():
            table: DataTable[str] = DataTable(id=name, cursor_type="row", zebra_stripes=True)
            for index, column in enumerate(columns):
                table.add_column(column, key=str(index))
            yield table
        yield Static("", id="blocks", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        # From elsewhere. Else the terminal would be left as it is now.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        self.run_worker(self._follow, thread=True)
        self.set_interval(1.0, self._say)
        self.query_one("#running").focus()

    def on_resize(self) -> None:
        # Textual itself looks at the new size after this.
        self.call_after_refresh(self._show)

    def on_unmount(self) -> None:
        self._leave()

    def _follow(self) -> None:
        """On its thread: hand every response over, as long as anybody looks."""
        here = get_current_worker()
        try:
            for response in self._told:
                if here.is_cancelled:
                    return
                self.call_from_thread(self.take, response)
        except ApiError as error:
            self.error = error
            self.call_from_thread(self.exit, return_code=1)

    def take(self, response: WatchResponse) -> None:
        """One more response; while held, what it says is kept and not shown."""
        rate = rates(self._newest, response)
        self._core.take(response)
        self._newest, self._heard_s = response, time.monotonic()
        if not self._is_held:
            self._rates = rate
            self._show()

    def action_hold(self) -> None:
        """Stand still, or go on."""
        self._is_held = not self._is_held
        self._seen = deepcopy(self._core) if self._is_held else self._core
        self.sub_title = "held" if self._is_held else ""
        self._show()

    def action_blocks(self) -> None:
        """Show the KV map, or hide it."""
        blocks = self.query_one("#blocks")
        blocks.display = not blocks.display
        self._show()

    def action_table(self, name: str) -> None:
        """Move to a table."""
        self.query_one(f"#{name}").focus()

    def _show(self) -> None:
        core, shown = self._seen, list(choices(self._seen))
        if core.epoch:
            self._line = headline(core, self._rates)
        self._say()
        self._fill("workers", worker_rows(core))
        self._fill("running", running_rows(shown))
        self._fill("queue", queue_rows(shown))
        blocks = self.query_one("#blocks", Static)
        if blocks.display:
            width = max(8, self.size.width - 2)
            maps = [block_map(core, worker, width) for worker in core.workers.values()]
            blocks.update("\n".join(maps))

    def _say(self) -> None:
        """The headline, and how old it is if it is."""
        silent_s = time.monotonic() - self._heard_s
        is_old = self._newest is not None and silent_s > self._silent_s
        said = ["HELD"] * self._is_held + [f"NOTHING TOLD FOR {silent_s:.0f} s"] * is_old
        self._headline.update("  ".join([*said, self._line]))

    def _fill(self, name: str, rows: Iterator[Row]) -> None:
        """In place, line by line: the cursor and the scroll stay where they are."""
        table: DataTable[str] = self.query_one(f"#{name}", DataTable)
        # An address of IPv6 is written as a style is.
        wanted = [(*map(escape, row),) for row in islice(rows, ROWS_MAX)]
        for line in reversed(range(len(wanted), table.row_count)):
            table.remove_row(str(line))
        # Of a cell that is narrower than its column all of the column would be measured.
        widest = [column.index(max(column, key=len)) for column in zip(*wanted, strict=True)]
        known = table.row_count
        for line, row in enumerate(wanted[:known]):
            for index, cell in enumerate(row):
                if table.get_cell(str(line), str(index)) != cell:
                    is_widest = line == widest[index]
                    table.update_cell(str(line), str(index), cell, update_width=is_widest)
        for line, row in enumerate(wanted[known:], known):
            table.add_row(*row, key=str(line))
