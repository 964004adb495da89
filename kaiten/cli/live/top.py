"""`kaiten top`: the batch of a cell in a terminal, live, by keyboard."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import ClassVar, Final

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from kaiten.cli.complaint import complain
from kaiten.cli.live.cell_view import (
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
from kaiten.cli.watch import responses
from kaiten.client.errors import ApiError
from kaiten.client.live_core import LiveCore
from kaiten.tls import TLS
from kaiten.v1.watch_pb2 import WatchResponse

# Shown of a table; a terminal that scrolls through more shows no more.
ROWS_MAX: Final = 512
TABLES: Final = {
    "workers": WORKER_COLUMNS,
    "running": RUNNING_COLUMNS,
    "queue": QUEUE_COLUMNS,
}


def top(
    gateways: Sequence[tuple[str, TLS | None]], *, api_key: str | None, interval_ms: int
) -> int:
    """Until `q`; the exit code."""
    shown = Top(lambda: responses(gateways, api_key, interval_ms))
    shown.run()
    if shown.error is not None:
        return complain(shown.error, ", ".join(address for address, _ in gateways))
    return shown.return_code or 0


class Top(App[None]):
    """`told` begins to watch; it is called, and its answers awaited, on a thread of its own."""

    CSS = """
    #headline { height: 1; text-style: bold; }
    DataTable { height: auto; max-height: 40%; }
    #running { height: 1fr; }
    #blocks { height: auto; max-height: 40%; overflow-y: auto; display: none; }
    """
    TITLE = "kaiten top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("space", "hold", "Hold"),
        ("b", "blocks", "KV blocks"),
        ("w", "table('workers')", "Workers"),
        ("r", "table('running')", "Running"),
        ("u", "table('queue')", "Queue"),
    ]

    def __init__(self, told: Callable[[], Iterator[WatchResponse]]) -> None:
        super().__init__()
        # Why nothing is told any more; that ends it.
        self.error: ApiError | None = None
        self._told = told
        self._core = LiveCore()
        self._before: LiveCore | None = None
        self._is_held = False

    def compose(self) -> ComposeResult:
        yield Static("nothing was told yet", id="headline", markup=False)
        for name, columns in TABLES.items():
            table: DataTable[str] = DataTable(id=name, cursor_type="row", zebra_stripes=True)
            for index, column in enumerate(columns):
                table.add_column(column, key=str(index))
            yield table
        yield Static("", id="blocks", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.run_worker(self._follow, thread=True, exit_on_error=False)
        self.query_one("#running").focus()

    def _follow(self) -> None:
        """On its thread: hand every response over, as long as anybody looks."""
        here = get_current_worker()
        try:
            for response in self._told():
                if here.is_cancelled:
                    return
                self.call_from_thread(self.take, response)
        except ApiError as error:
            self.error = error
            self.call_from_thread(self.exit, return_code=1)

    def take(self, response: WatchResponse) -> None:
        """One more response; while held, what it says is kept and not shown."""
        before = copy(self._core)
        before.sequences = {key: copy(one) for key, one in self._core.sequences.items()}
        self._core.take(response)
        self._before = before
        if not self._is_held:
            self._show()

    def action_hold(self) -> None:
        """Stand still, or go on."""
        self._is_held = not self._is_held
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
        core, shown = self._core, list(choices(self._core))
        held = "HELD  " if self._is_held else ""
        self.query_one("#headline", Static).update(held + headline(core, rates(self._before, core)))
        self._fill("workers", worker_rows(core))
        self._fill("running", running_rows(shown))
        self._fill("queue", queue_rows(shown))
        blocks = self.query_one("#blocks", Static)
        if blocks.display:
            width = max(8, self.size.width - 2)
            maps = [block_map(core, worker, width) for worker in core.workers.values()]
            blocks.update("\n".join(maps))

    def _fill(self, name: str, rows: Iterator[Row]) -> None:
        """Rows that stay are changed in place: the cursor and the scroll stay where they are."""
        table: DataTable[str] = self.query_one(f"#{name}", DataTable)
        wanted = {row.key: row.cells for row, _ in zip(rows, range(ROWS_MAX), strict=False)}
        known = [str(row.key.value) for row in table.ordered_rows]
        at = table.cursor_row
        if known != list(wanted)[: len(known)]:
            table.clear()
            known = []
        for key in known:
            for index, cell in enumerate(wanted[key]):
                if table.get_cell(key, str(index)) != cell:
                    table.update_cell(key, str(index), cell, update_width=True)
        for key in list(wanted)[len(known) :]:
            table.add_row(*wanted[key], key=key)
        table.move_cursor(row=min(at, max(0, len(wanted) - 1)))
