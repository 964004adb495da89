"""A real supervisor over real stand-in processes: order, restarts, failed starts, no orphans."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kaiten.local import child as child_module
from kaiten.local.child import Child, ChildSpec, exit_text
from kaiten.local.supervisor import RESTART_S_MAX, death_of, restart_s
from tests.support.answers import until
from tests.support.toy_stack import NAMES, process_is_stopped, process_is_up
from tests.support.whole_stack import wait_until

ROOT = Path(__file__).parents[4]
WAIT_S = 120


class Run:
    """A supervisor in a process of its own, and what it says."""

    def __init__(self, folder: Path, modes: tuple[str, ...], before: tuple[str, ...]) -> None:
        self.folder = folder
        # Tests that run under `nohup` must not have it ignored there, too.
        ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.support.toy_stack", str(folder), *modes],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        signal.signal(signal.SIGHUP, ours)

    def until(self, wanted: str) -> str:
        """The next line that starts so. pytest's timeout ends a wait for what never comes."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line.strip())
            if line.startswith(wanted):
                return line.strip()
        raise AssertionError(f"{wanted!r} never came: {seen}")

    def turn_away(self) -> None:
        """Nobody reads what it says any more."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stdout = None

    def finish(self) -> tuple[int, list[str]]:
        # `communicate` passes over what was read ahead with the lines before.
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        return self.process.wait(WAIT_S), lines

    def child(self, name: str) -> psutil.Process:
        return psutil.Process(int((self.folder / f"{name}.pid").read_text()))

    def ended(self) -> list[str]:
        """Names of the stand-ins that ended politely, in that order."""
        path = self.folder / "ended"
        return path.read_text().split() if path.exists() else []


Start = Callable[..., AbstractContextManager[Run]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    @contextmanager
    def start(*modes: str, before: tuple[str, ...] = ()) -> Iterator[Run]:
        run = Run(tmp_path, modes, before)
        try:
            yield run
        finally:
            run.process.kill()
            run.process.communicate()

    return start


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_everything_stops_in_order(start: Start, numbers: list[signal.Signals]) -> None:
    with start() as run:
        run.until("ready|store")
        # Which it is before the services start.
        run.until("starting|scheduler")
        assert run.until("all-ready") == "|".join(("all-ready", *sorted(NAMES)))
        first, *others = numbers
        run.process.send_signal(first)
        told = [run.until("stopping|gateway")]
        for number in others:
            run.process.send_signal(number)
        code, lines = run.finish()
    lines = told + lines
    assert code == 0
    ended = run.ended()
    assert ended[:2] == ["gateway", "scheduler"]
    assert sorted(ended[2:4]) == ["worker-0", "worker-1"]
    assert ended[4:] == ["store"]
    # One group is down before the next is even asked.
    assert lines.index("stopped|gateway|True") < lines.index("stopping|scheduler")


def test_deaths_after_the_start_are_told_and_mended(start: Start) -> None:
    """Of one that is killed, of one that hangs, and in a row: then it waits longer. Of one that
    cannot be started, because a file is where the folder of logs was, the others hear nothing."""
    with start() as run:
        run.until("all-ready")
        for name in ("worker-0", "worker-1"):
            first = run.child(name)
            if name == "worker-0":
                first.kill()
                assert run.until("died") == "died|worker-0|signal SIGKILL|0.2"
            else:
                first.suspend()
                why = r"died\|worker-1\|stopped by a signal \d+ s ago\|0.2"
                assert re.fullmatch(why, run.until("died"))
            assert run.until("ready") == f"ready|{name}"
            assert run.child(name).pid != first.pid
        for wait in ("0.2", "0.4"):
            run.child("gateway").kill()
            assert run.until("died") == f"died|gateway|signal SIGKILL|{wait}"
            run.until("ready|gateway")
        logs = run.folder / "logs"
        logs.rename(run.folder / "moved")
        logs.touch()
        run.child("gateway").kill()
        assert run.until("died") == "died|gateway|signal SIGKILL|0.8"
        assert re.fullmatch(
            r"died\|gateway\|it cannot be started: .*/logs'\|1.6", run.until("died")
        )
        # Before it can be started again, which makes the folder.
        (run.folder / "files").rmdir()
        logs.unlink()
        run.until("ready|gateway")
        assert (run.folder / "files").is_dir()
        run.process.send_signal(signal.SIGTERM)
        code, _ = run.finish()
    assert code == 0
    assert sorted(run.ended()) == sorted(NAMES)


def test_who_has_gone_is_not_stopped(tmp_path: Path) -> None:
    """A supervisor hears of an end by a thread, and may ask before."""
    gone = subprocess.Popen((sys.executable, "-c", ""))
    gone.wait()
    (tmp_path / "a.pid").write_text(str(gone.pid))
    assert not process_is_stopped(tmp_path / "a.pid")


@pytest.mark.parametrize("late", ["gateway=never-ready", "asked=worker-0"])
def test_who_was_ready_and_dies_before_all_is_told_of_is_started_again(
    start: Start, late: str
) -> None:
    """While others start, and while they are asked what is to be told."""
    with start(late) as run:
        is_asked = late.startswith("asked")
        run.until("asking|worker-0" if is_asked else "ready|worker-0")
        first = run.child("worker-0")
        first.kill()
        assert run.until("died") == "died|worker-0|signal SIGKILL|0.2"
        # Who asks may see it before.
        run.until("all-ready" if is_asked else "ready|worker-0")
        run.process.send_signal(signal.SIGTERM)
        assert run.finish()[0] == 0
    assert left_alive(run) == []


def test_who_does_not_come_back_is_told_so(start: Start) -> None:
    with start("gateway=once", "idle=1") as run:
        run.until("all-ready")
        run.child("gateway").kill()
        assert run.until("died") == "died|gateway|signal SIGKILL|0.2"
        why = "gateway is not ready, and has done nothing for 1 s"
        assert run.until("died") == f"died|gateway|{why}|0.4"
        run.process.send_signal(signal.SIGTERM)
        assert run.finish()[0] == 0


def test_who_cannot_be_started_is_told_in_a_sentence(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with start() as run:
        code, lines = run.finish()
    assert code == 1
    assert lines[-1].startswith("error|store cannot be started: [Errno 17] File exists: ")
    assert left_alive(run) == []


async def test_where_no_thread_is_to_be_had_a_process_is_refused_as_by_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio waits for each by one: with few processes allowed it ended the supervisor."""

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    log = tmp_path / "a.log"
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    child = Child(ChildSpec(name="a", command=command, log_path=log, is_ready=asyncio.Future))
    before = {each.pid for each in psutil.Process().children()}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="can't start new thread"):
            await child.spawn()
    assert {each.pid for each in psutil.Process().children()} == before
    await child.spawn()
    assert await child.stop()


async def test_an_exit_code_is_left_to_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ended between two signals was told with exit code 255."""

    def poll(_process: object) -> None:
        raise AssertionError("who polls takes it")

    monkeypatch.setattr(subprocess.Popen, "poll", poll)
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    log = tmp_path / "a.log"
    child = Child(ChildSpec(name="a", command=command, log_path=log, is_ready=asyncio.Future))
    await child.spawn()
    assert await child.stop()
    assert child.exit_code == -signal.SIGTERM


def test_a_death_names_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds no room for its files has none for its last words."""
    child = Child(
        ChildSpec(name="a", command=(), log_path=tmp_path / "a.log", is_ready=asyncio.Future)
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    assert death_of(child) == f"exit code None; the disk of {tmp_path} is full"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert death_of(child) == "exit code None"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            "terminate called …\n  what():  std::bad_alloc\n",
            "signal SIGABRT: what():  std::bad_alloc",
        ),
        ('free(): invalid\n{"event": "worker.ready"}\n', "signal SIGABRT"),
        ("", "signal SIGABRT"),
    ],
)
def test_what_a_process_says_that_aborts(log: str, told: str, tmp_path: Path) -> None:
    child = Child(
        ChildSpec(name="a", command=(), log_path=tmp_path / "a.log", is_ready=asyncio.Future)
    )
    child.spec.log_path.write_text(log)
    aborted: Any = SimpleNamespace(pid=1, returncode=-signal.SIGABRT)
    child._process = aborted
    assert death_of(child) == told


def test_whom_its_terminal_leaves_goes_on_under_nohup_and_stops_in_order(start: Start) -> None:
    with start("display=terminal", before=("nohup",)) as run:
        run.until("all-ready")
        run.turn_away()
        run.process.send_signal(signal.SIGHUP)
        first = run.child("worker-0")
        first.kill()
        first.wait(WAIT_S)
        wait_until(lambda: process_is_up(run.folder / "worker-0.pid"), "another worker is up")
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(WAIT_S)
    assert sorted(run.ended()) == sorted(NAMES)


def test_what_is_known_of_a_death_without_its_log_or_a_name_and_after_a_cut(tmp_path: Path) -> None:
    child = Child(
        ChildSpec(name="a", command=(), log_path=tmp_path / "none", is_ready=asyncio.Future)
    )
    assert child.log_text() == ""
    # What was there before it began is not its; what comes after the file was cut is.
    child._log_from = 6
    child.spec.log_path.write_text("before")
    assert child.log_text() == ""
    child.spec.log_path.write_text("why")
    assert child.log_text() == "why"
    assert exit_text(-signal.SIGRTMIN - 1) == f"exit code {-signal.SIGRTMIN - 1}"


def test_a_failed_start_names_the_cause_and_stops_the_others(start: Start) -> None:
    with start("worker-1=broken") as run:
        code, lines = run.finish()
    assert code == 1
    (error,) = [line for line in lines if line.startswith("error")]
    _, cause, fix = error.split("|")
    assert cause == "worker-1 ended with exit code 1: the model is unreadable"
    assert str(run.folder / "logs" / "worker-1.log") in fix
    assert not [line for line in lines if line.startswith("all-ready")]
    assert left_alive(run) == []


def test_a_signal_during_the_start_stops_what_runs(start: Start) -> None:
    with start("worker-0=never-ready") as run:
        for _ in range(2):
            run.until("ready")  # the store and one other
        run.process.send_signal(signal.SIGINT)
        code, _ = run.finish()
    assert code == 0
    assert left_alive(run) == []


async def test_a_log_that_is_too_long_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its process runs, which writes on."""
    monkeypatch.setattr(child_module, "LOG_BYTES_MAX", 100)
    monkeypatch.setattr(child_module, "PING_EVERY_S", 0.01)
    write = "import sys, time\nwhile True: print('x' * 50, flush=True); time.sleep(0.01)"
    log = tmp_path / "a.log"
    log.write_text("of a former run\n" * 10)
    child = Child(
        ChildSpec(
            name="a",
            command=(sys.executable, "-c", write),
            log_path=log,
            is_ready=lives,
            is_alive=lives,
        )
    )
    await child.spawn()
    before = log.with_name("a.log.1")
    assert before.read_text() == "of a former run\n" * 10
    watching = asyncio.create_task(child.ended_or_hung())
    await until(lambda: before.read_text().startswith("xxx"), "a log that was turned")
    await until(lambda: child.log_text().startswith("xxx"), "a log that goes on")
    child.kill()
    assert await watching == ""


async def lives() -> bool:
    return True


def test_who_was_stopped_by_a_signal_ends_politely_too(start: Start) -> None:
    with start() as run:
        run.until("all-ready")
        run.child("store").suspend()
        run.process.send_signal(signal.SIGTERM)
        code, lines = run.finish()
    assert code == 0
    assert lines[-1] == "stopped|store|True"
    assert run.ended()[-1] == "store"


def test_the_second_signal_kills(start: Start) -> None:
    with start("gateway=stubborn") as run:
        run.until("all-ready")
        run.process.send_signal(signal.SIGTERM)
        run.until("stopping|gateway")
        run.process.send_signal(signal.SIGTERM)
        code, lines = run.finish()
    assert code == 1
    assert lines[0] == "stopped|gateway|True"
    assert run.ended() == []
    assert left_alive(run) == []


def test_no_orphan_survives_a_killed_supervisor(start: Start) -> None:
    with start("gateway=stubborn") as run:
        run.until("all-ready")
        children = [run.child(name) for name in NAMES]
        run.process.kill()
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []
    assert run.ended() == []


def left_alive(run: Run) -> list[str]:
    """Stand-ins of this run that still exist."""
    return [
        str(process)
        for process in psutil.process_iter(["cmdline"])
        if str(run.folder) in (process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize(
    ("deaths", "wait_s"),
    [(1, 0.2), (2, 0.4), (3, 0.8), (5, 3.2), (6, RESTART_S_MAX), (99, 5.0), (100_000, 5.0)],
)
def test_the_wait_doubles_up_to_a_limit(deaths: int, wait_s: float) -> None:
    assert restart_s(deaths) == pytest.approx(wait_s)
