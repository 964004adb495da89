"""`kaiten top` and `kaiten ps` of a real core: what they show, and what keys do."""

import json
import queue
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from re import findall
from typing import Any

import pytest

from kaiten.cli.live import cell_view, explain, ps, watch
from kaiten.cli.live.cell_view import (
    FREE,
    HELD,
    NO_RATES,
    SHARED,
    Rates,
    choices,
    full_name_of,
    headline,
    rates,
    worker_rows,
)
from kaiten.cli.live.reasons import WORDS
from kaiten.client.errors import ApiError, UnavailableError
from kaiten.client.live_core import LiveCore
from kaiten.v1.common_pb2 import WhyPassedOver
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval
from kaiten.v1.watch_pb2 import PassedOver, WatchedStep, WatchedSteps, WatchResponse
from scheduler_svc.core.commands import Command, Configured, MakePlan
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import WorkerSpec
from scheduler_svc.live_view import Moment, View, look
from scheduler_svc.live_view_wire import changes_to_proto
from tests.support.cell import Cell, spec

pytest.importorskip("textual", reason="kaiten[top] is not installed")
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from kaiten.cli.live.top import Top

SECOND = 1_000_000_000
ROOT = Path(__file__).parents[4]


class Told(Cell):
    """A cell of tenant acme that tells what has changed, as a leader does."""

    def __init__(self, *specs: WorkerSpec, **options: Any) -> None:
        self.looks: dict[Any, Any] = {}
        self.view: View | None = None
        self.seq = 8
        self.addresses = {"w1": "host:1", "w2": "host:2"}
        super().__init__(*specs, **options)

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        if isinstance(command, MakePlan) and outcome.passed_over:
            self.looks[self.worker(command.worker_id)] = outcome.passed_over
        return outcome

    def tell(self) -> WatchResponse:
        """A second later."""
        self.now_ns += SECOND
        self.seq += 1
        moment = Moment(epoch=7, seq=self.seq, committed_seq=self.seq - 1, unix_ns=self.now_ns)
        configured = Configured(config=self.scheduler.config, policy="fair")
        view = look(self.scheduler, moment, configured, self.looks, self.addresses)
        told, self.view = changes_to_proto(self.view, view), view
        for one in told.sequences:
            if one.HasField("identity"):
                one.identity.id = f"acme:{one.identity.id}"
        return told


def crowded() -> Told:
    """Two slots, two who wait, and a sequence that has come far enough to be seen."""
    cell = Told(spec(slots=2, blocks=40, block_size=4))
    cell.now_ns = SECOND
    for _ in range(4):
        cell.submit(6, 50)
    cell.turns(4)
    return cell


def seen(cell: Told) -> LiveCore:
    core = LiveCore()
    core.take(cell.tell())
    return core


def test_ps_lists_who_runs_and_why_others_wait() -> None:
    cell = crowded()
    lines = list(ps.lines_of(seen(cell)))
    assert " ".join(lines[0].split()) == "REQUEST TENANT STATE TOKENS OF AGE WHERE, OR WHY IT WAITS"
    assert [line.split()[0] for line in lines[1:]] == ["r1", "r2", "r3", "r4"]
    assert lines[1].split()[1:3] == ["acme", "running"]
    assert lines[1].endswith("host:1 slot 0")
    assert "1.0 s" in lines[3]
    assert "waiting" in lines[3]
    # Of who waits for what all wait for nothing is said by itself.
    assert lines[3].endswith("every slot is taken")
    assert lines[4].endswith("every slot is taken")


def test_who_waits_is_always_told_why() -> None:
    core = seen(crowded())
    (worker,) = core.workers.values()
    first = core.queue[0]

    def whys() -> list[str]:
        return [one.why for one in choices(core) if one.position]

    del worker.passed_over[:]
    assert whys() == ["its turn has not come", "behind those before it"]
    worker.passed_over.add(stage="lease", why=WhyPassedOver.WHY_PASSED_OVER_PREFILL)
    (row,) = worker_rows(core)
    assert row[-2] == "takes more, short plans: a prefill goes on"
    assert whys() == ["its turn has not come", "behind those before it"]
    worker.is_late = True
    assert whys() == ["a step of the worker is overdue"] * 2
    newer = PassedOver(worker_id=worker.worker_id, stage="admit", why=99)  # type: ignore[arg-type]
    core.sequences[first].passed_over = [newer]
    assert whys()[0] == "reason 99", "of a newer leader"
    core.workers.clear()
    del core.sequences[first].passed_over[:]
    assert whys() == ["no worker is here"] * 2


def test_a_cell_that_cannot_get_on_says_so_though_nobody_waits() -> None:
    """Whoever looks because all are refused sees why, at every terminal."""
    cell = Told(spec(slots=2), spec(slots=2))
    core = seen(cell)

    def said() -> list[str]:
        lines = [
            headline(core, NO_RATES),
            next(watch.lines_of(core)),
            [*ps.lines_of(core)][-1],
        ]
        return [line.split("  ")[-1] for line in lines]

    healthy = said()
    one, other = core.workers.values()
    one.is_late = True
    assert said() == healthy, "the other takes them"
    other.is_draining = True
    why = "a step of the worker is overdue, the worker is draining"
    assert said() == [why] * 3
    core.workers.clear()
    assert said() == ["no worker is here"] * 3


def test_people_read_the_planners_own_words() -> None:
    """At a terminal and on the dashboard's page."""
    said = {why.name: why.value for why in Why}
    assert said == WORDS
    page = (ROOT / "gateway/openai/pages/dashboard/panels.js").read_text()
    table = page.partition("const WHYS = {")[2].partition("};")[0]
    assert {name.upper(): words for name, words in findall(r'(\w+): "([^"]*)"', table)} == said


def test_ps_gives_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = crowded().tell()
    monkeypatch.setattr(ps, "Watching", lambda *_: [told])
    assert ps.ps([("here", None)], api_key=None, as_json=True) == 0
    first, *_, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["id"], first["tenant"], first["state"], first["slot"]) == (
        "r1",
        "acme",
        "running",
        0,
    )
    assert (first["worker"], first["worker_id"]) == ("host:1", told.workers[0].worker_id)
    assert (last["id"], last["state"], last["position"]) == ("r4", "waiting", 2)


@pytest.mark.parametrize("as_json", [False, True])
def test_ps_says_how_many_it_does_not_list(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = crowded().tell()
    told.queue.length += 3000
    monkeypatch.setattr(ps, "Watching", lambda *_: [told])
    assert ps.ps([("here", None)], api_key=None, as_json=as_json) == 0
    out, err = capsys.readouterr()
    assert (err if as_json else out).endswith("and 3000 more that wait\n")
    assert len(out.splitlines()) == 4 + 2 * (not as_json)


def test_ps_says_that_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    screen.told.put(UnavailableError("nobody is there"))
    monkeypatch.setattr(ps, "Watching", lambda *_: screen)
    assert ps.ps([("here:1", None)], api_key=None, as_json=False) == 1
    assert "nobody is there" in capsys.readouterr().err


def test_rates_are_of_the_steps_between_two_responses_of_one_leader() -> None:
    """Also of requests that came and went between them, of which nothing else is told."""
    before = WatchResponse(epoch=7, seq=8, unix_ns=SECOND)
    steps = [
        WatchedSteps(worker_id="w1", steps=[WatchedStep(num_tokens=2), WatchedStep(num_tokens=4)]),
        WatchedSteps(worker_id="w2", steps=[WatchedStep(num_tokens=6)]),
    ]
    now = WatchResponse(epoch=7, seq=28, unix_ns=3 * SECOND, steps=steps)
    assert rates(before, now) == Rates(tokens_per_s=6, records_per_s=10)
    now.steps[0].num_skipped = 9
    assert rates(before, now).tokens_per_s == 24, "those that are not told were like these"
    now.epoch += 1
    assert rates(before, now) == rates(None, now) == Rates(0, 0)


def test_a_worker_behind_a_socket_is_called_by_its_name() -> None:
    """A whole path would be most of a terminal's width."""
    cell = Told(spec(), spec(), spec())
    cell.addresses = {
        "w1": "unix:/home/me/.kaiten/run/worker-0.sock",
        "w2": "unix:/one/worker-1.sock",
        "w3": "unix:/other/worker-1.sock",
    }
    names = ["worker-0", "unix:/one/worker-1.sock", "unix:/other/worker-1.sock"]
    core = seen(cell)
    assert [row[0] for row in worker_rows(core)] == names
    # Logs, metrics and archives have its id.
    ids = [*core.workers]
    assert [row[-1] for row in worker_rows(core)] == ids
    both = [f"{name} ({id})" for name, id in zip(names, ids, strict=True)]
    lines = [line for line in watch.lines_of(core) if line.startswith("worker ")]
    assert [line.split("  ")[0] for line in lines] == [f"worker {each}" for each in both]
    told = ChoiceTimeline(intervals=[TimelineInterval(worker_id=id) for id in (*ids, "gone", "")])
    _, _, *rows = explain.lines_of("r", told, partial(full_name_of, core))
    assert [row.partition("unknown")[2].strip() for row in rows] == [
        *(f"on {each}" for each in both), "on gone", "",
    ]  # fmt: skip


def test_a_block_map_says_whose_is_what() -> None:
    cell = Told(spec(slots=4, blocks=12, block_size=4))
    cell.submit(tuple(range(1, 9)), 4, n=2)
    cell.turns(2)
    core = seen(cell)
    (worker,) = core.workers.values()
    heading, *lines = cell_view.block_map(core, worker, 5).splitlines()
    assert heading.startswith("host:1")
    assert [len(line) for line in lines] == [5, 5, 2]
    signs = "".join(lines)
    assert signs.count(FREE) == worker.blocks_free
    assert signs.count(SHARED) == 2, "the whole blocks of the prompt"
    assert signs.count(HELD) == 12 - worker.blocks_free - 2


async def test_a_block_map_is_as_wide_as_the_terminal() -> None:
    """Also where nothing is told any more."""
    cell, screen = Told(spec(slots=4, blocks=200, block_size=4)), Screen()
    async with screen.app.run_test(size=(140, 50)) as pilot:
        screen.app.take(cell.tell())
        await pilot.press("b")
        for columns in (60, 100, 12):
            await pilot.resize_terminal(columns, 50)
            while len(screen.text("blocks").splitlines()[1]) != columns - 2:
                await pilot.pause(0.01)


def test_a_large_pool_has_several_blocks_to_a_sign() -> None:
    cell = Told(spec(slots=2, blocks=5000, block_size=4))
    (worker,) = seen(cell).workers.values()
    heading, *lines = cell_view.block_map(LiveCore(), worker, 80).splitlines()
    assert heading.endswith("one sign: 3 blocks")
    assert sum(map(len, lines)) == 1667


class Screen:
    """`kaiten top`, told by a test."""

    def __init__(self, *, silent_s: float = 3600) -> None:
        self.told: queue.Queue[WatchResponse | ApiError | None] = queue.Queue()
        self.has_left = False
        self.app = Top(self, self.leave, silent_s=silent_s)

    def leave(self) -> None:
        self.has_left = True
        self.told.put(None)

    def __iter__(self) -> Iterator[WatchResponse]:
        while (one := self.told.get()) is not None:
            if isinstance(one, ApiError):
                raise one
            yield one

    def rows(self, name: str) -> list[list[str]]:
        table: DataTable[str] = self.app.query_one(f"#{name}", DataTable)
        cells = (table.get_row_at(index) for index in range(table.row_count))
        # As a table shows a text.
        return [[Text.from_markup(cell).plain for cell in row] for row in cells]

    def text(self, name: str) -> str:
        return str(self.app.query_one(f"#{name}", Static).content)


async def shows(pilot: Pilot[None], screen: Screen, words: str) -> None:
    """Until the headline says so."""
    while words not in screen.text("headline"):
        await pilot.pause(0.01)


async def test_top_follows_what_is_told_and_keys_move_about() -> None:
    cell, screen = crowded(), Screen()
    async with screen.app.run_test(size=(140, 50)) as pilot:
        screen.told.put(cell.tell())
        await shows(pilot, screen, "2/2 running  2 waiting")
        assert "leader 7  fair" in screen.text("headline")
        (worker,) = screen.rows("workers")
        assert worker[:2] == ["host:1", "2/2"]
        assert worker[-2] == "every slot is taken"
        assert [row[1] for row in screen.rows("running")] == ["r1", "r2"]
        assert [row[:2] for row in screen.rows("queue")] == [["1", "r3"], ["2", "r4"]]

        await pilot.press("u")
        assert screen.app.focused is screen.app.query_one("#queue")
        await pilot.press("down")
        queue_table: DataTable[str] = screen.app.query_one("#queue", DataTable)
        assert queue_table.cursor_row == 1
        await pilot.press("w")
        assert screen.app.focused is screen.app.query_one("#workers")

        assert not screen.app.query_one("#blocks").display
        await pilot.press("b")
        assert HELD in screen.text("blocks")

        cell.cancel(1)
        cell.turns(3)
        screen.told.put(cell.tell())
        await shows(pilot, screen, "2/2 running  1 waiting")
        assert {row[1] for row in screen.rows("running")} == {"r2", "r3"}
        assert [row[1] for row in screen.rows("queue")] == ["r4"]
        assert queue_table.cursor_row == 0

        await pilot.press("space")
        assert screen.text("headline").startswith("HELD")
        cell.cancel(2)
        cell.turns(3)
        screen.told.put(cell.tell())
        cell.cancel(3)
        screen.told.put(cell.tell())
        while screen.told.qsize():
            await pilot.pause(0.01)
        assert "1 waiting" in screen.text("headline"), "it stands still"
        await pilot.press("space")
        await shows(pilot, screen, "0 waiting")


async def test_what_is_held_stays_whatever_is_shown_of_it() -> None:
    cell, screen = crowded(), Screen()
    tables = ("workers", "running", "queue")
    async with screen.app.run_test(size=(140, 50)) as pilot:
        screen.told.put(cell.tell())
        await shows(pilot, screen, "2 waiting")
        await pilot.press("space", "b")
        held = [screen.text("headline"), screen.text("blocks"), *map(screen.rows, tables)]
        cell.cancel(1)
        cell.turns(3)
        screen.app.take(cell.tell())
        await pilot.press("b", "b")
        assert held == [screen.text("headline"), screen.text("blocks"), *map(screen.rows, tables)]
        await pilot.press("space")
        assert "1 waiting" in screen.text("headline")


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_top_ends_though_nothing_is_told(key: str) -> None:
    """Its thread waits for the next response: of a server that hangs, none comes."""
    screen = Screen()
    async with screen.app.run_test() as pilot:
        await pilot.press(key)
        while screen.app.return_code is None:
            await pilot.pause(0.01)
    assert screen.app.return_code == 0
    assert screen.has_left


async def test_what_is_old_does_not_look_as_if_it_lived() -> None:
    cell, screen = crowded(), Screen(silent_s=0)
    async with screen.app.run_test() as pilot:
        await pilot.press("space", "space")
        assert screen.text("headline") == "nothing was told yet"
        screen.told.put(cell.tell())
        await shows(pilot, screen, "NOTHING TOLD FOR")
        assert "leader 7" in screen.text("headline")


async def test_an_address_of_ipv6_is_shown_whole() -> None:
    """In square brackets, as rich writes styles."""
    cell, screen = crowded(), Screen()
    cell.addresses = {"w1": "[fd00::1]:50061"}
    async with screen.app.run_test(size=(140, 50)) as pilot:
        screen.told.put(cell.tell())
        await shows(pilot, screen, "leader 7")
        for name in ("workers", "running"):
            assert "[fd00::1]:50061" in screen.rows(name)[0]


async def test_a_narrow_terminal_shows_all_of_the_headline() -> None:
    cell, screen = crowded(), Screen()
    response = cell.tell()
    response.workers[0].is_late = True
    async with screen.app.run_test(size=(40, 30)) as pilot:
        screen.told.put(response)
        await shows(pilot, screen, "1 uncommitted  a step of the worker is overdue")
        headline = screen.app.query_one("#headline")
        while headline.size.width * headline.size.height < len(screen.text("headline")):
            await pilot.pause(0.01)


async def test_top_ends_with_the_reason_when_nobody_tells_any_more() -> None:
    screen = Screen()
    async with screen.app.run_test() as pilot:
        screen.told.put(UnavailableError("nobody leads"))
        while screen.app.return_code is None:
            await pilot.pause(0.01)
    assert screen.app.return_code == 1
    assert str(screen.app.error) == "nobody leads"


async def test_a_long_queue_is_drawn_in_time_as_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each cell that is narrower than its column Textual measures all of the column, if asked
    to: 500 requests stood still for seconds.
    """
    asked, cell, screen = list[bool](), Told(spec(slots=1)), Screen()
    cell.now_ns = SECOND
    cell.submit(1, 9)
    # Its age is wider than those of the others.
    cell.now_ns += 6000 * SECOND
    for _ in range(100):
        cell.submit(1, 9)
    async with screen.app.run_test(size=(140, 50)):
        screen.app.take(cell.tell())
        with monkeypatch.context() as patch:
            patch.setattr(
                DataTable, "update_cell", lambda *_, update_width: asked.append(update_width)
            )
            screen.app.take(cell.tell())
    assert len(asked) >= 100
    assert sum(asked) <= 1


async def test_a_table_stays_where_it_was_scrolled_to_while_rows_come_and_go() -> None:
    """In a narrow terminal the reasons of a queue are to the right."""
    cell, screen = Told(spec(slots=1)), Screen()
    for _ in range(60):
        cell.submit(1, 9)
    async with screen.app.run_test(size=(60, 40)) as pilot:
        screen.app.take(cell.tell())
        table: DataTable[str] = screen.app.query_one("#queue", DataTable)
        while table.max_scroll_x < 7 or table.max_scroll_y < 20:
            await pilot.pause(0.01)
        table.scroll_to(x=7, y=20, animate=False, immediate=True)
        assert (table.scroll_x, table.scroll_y) == (7, 20)
        for id in (1, 2, 50):
            cell.cancel(id)
        screen.app.take(cell.tell())
        await pilot.pause()
        assert [row[1] for row in screen.rows("queue")[:2]] == ["r3", "r4"]
        assert table.row_count == 57
        assert (table.scroll_x, table.scroll_y) == (7, 20)
