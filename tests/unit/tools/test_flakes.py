"""`make flakes` on a project of four files: what it runs, finds, keeps and goes on with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.whole_stack import wait_until
from tools.children import ROOT, environment
from tools.flakes_plugin import shuffled

CONFTEST = """
import pathlib, pytest
from tests.support.peer import Peer

@pytest.fixture(autouse=True)
def noted(request):
    with pathlib.Path("order.txt").open("a") as file:
        file.write(request.node.name + "\\n")

@pytest.fixture
def peer(): return Peer()

@pytest.fixture
def plain(): return 1
"""
FLAKY = """
import time, pathlib

def test_every_third_time(tmp_path):
    runs = pathlib.Path("runs.txt")
    count = int(runs.read_text()) + 1 if runs.exists() else 1
    runs.write_text(str(count))
    (tmp_path / "service.log").write_text("started")
    assert count % 3, "the third time"

def test_a(): pass
def test_b(): pass
def test_c(): pass
def test_d(): pass
"""
PURE = """
def test_with_a_peer(peer): pass
def test_without(plain): assert False, "nobody runs this"
"""
LEAVING = """
import socket

class Holder: pass

def test_leaves_a_socket():
    holder = Holder()
    holder.itself, holder.socket = holder, socket.socket()
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A project with a flaky test, one that waits by its fixture, and one that does not wait."""
    root = tmp_path / "toy"
    files = {
        "pytest.ini": "[pytest]\npythonpath = .\n",
        "tests/conftest.py": CONFTEST,
        "tests/support/peer.py": "import subprocess\nclass Peer: pass\n",
        "tests/test_flaky.py": FLAKY,
        "tests/test_pure.py": PURE,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def flakes(toy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ["--root", toy, "--out", toy / "out.jsonl", "--logs", toy / "logs"]
    command = [sys.executable, "-m", "tools.flakes", *map(str, places), *arguments]
    # Of no use to the toy, and dearer than its tests.
    env = environment(toy) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def rounds(toy: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (toy / "out.jsonl").read_text().splitlines()]


def test_a_flaky_test_is_found_with_its_seed_and_logs_and_a_rerun_goes_on(toy: Path) -> None:
    assert flakes(toy, "--runs", "2").returncode == 0
    assert [each["busy"] for each in rounds(toy)] == [False, True]
    assert not list((toy / "logs").iterdir()), "only what failed is kept"

    again = flakes(toy, "--runs", "3")
    assert again.returncode == 1, again.stderr
    assert "1 of 3: tests/test_flaky.py::test_every_third_time" in again.stdout
    assert "seed 3:" in again.stdout
    assert (toy / "runs.txt").read_text() == "3", "two rounds were not played again"
    third = rounds(toy)[2]
    (failure,) = third["failed"]
    report = (toy / third["logs"] / failure["report"]).read_text()
    assert "the third time" in report
    assert [path.read_text() for path in (toy / third["logs"]).rglob("service.log")] == ["started"]

    # Nothing is left to do, and what was found still counts.
    assert flakes(toy, "--runs", "3").returncode == 1
    assert (toy / "runs.txt").read_text() == "3"


def test_what_waits_is_run_and_nothing_else_in_another_order_each_round(toy: Path) -> None:
    assert flakes(toy, "--runs", "2", "--no-busy").returncode == 0
    assert [each["tests"] for each in rounds(toy)] == [6, 6]
    names = (toy / "order.txt").read_text().split()
    first, second = names[:6], names[6:]
    assert sorted(first) == sorted(second)
    assert "test_with_a_peer" in first
    assert "test_without" not in first
    assert first != second


def test_what_is_left_to_the_collector_is_found_in_its_own_test(toy: Path) -> None:
    (toy / "tests" / "test_leaving.py").write_text(LEAVING)
    (toy / "pytest.ini").write_text("[pytest]\npythonpath = .\nfilterwarnings = error\n")
    done = flakes(toy, "--runs", "1", "--no-busy")
    assert "1 of 1: tests/test_leaving.py::test_leaves_a_socket" in done.stdout
    assert len(rounds(toy)[0]["failed"]) == 1


def test_a_story_keeps_its_order() -> None:
    def items(name: str, **told: str) -> list[Any]:
        module = SimpleNamespace(**told)
        return [SimpleNamespace(path=Path(name), module=module, at=at) for at in range(9)]

    for seed in range(5):
        ordered: list[Any] = shuffled(items("story", IN_ORDER="why") + items("any"), seed)
        places = {
            name: [one.at for one in ordered if one.path.name == name] for name in ("story", "any")
        }
        assert places["story"] == list(range(9))
        assert sorted(places["any"]) == list(range(9)) != places["any"]


def test_a_run_that_breaks_off_has_failed(toy: Path) -> None:
    (toy / "tests" / "test_flaky.py").write_text("import os, time\ndef test_x(): os._exit(9)\n")
    done = flakes(toy, "--runs", "1")
    assert done.returncode == 1
    assert "1 of 1: (the run itself)" in done.stdout


def test_no_test_at_all_is_not_success(toy: Path) -> None:
    done = flakes(toy, "--runs", "1", "--select", "no_such_name")
    assert done.returncode == 2
    assert "no test is selected" in done.stdout


def test_busy_loops_end_with_who_started_them() -> None:
    code = (
        "import signal\nfrom tools.children import busy_loops\n"
        "with busy_loops(2) as loops:\n"
        "    print(*[loop.pid for loop in loops], flush=True)\n    signal.pause()\n"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    with tool:
        assert tool.stdout is not None
        loops = [psutil.Process(int(pid)) for pid in tool.stdout.readline().split()]
        assert len(loops) == 2
        wait_until(lambda: all(sum(loop.cpu_times()[:2]) > 0.1 for loop in loops), "they burn")
        os.kill(tool.pid, signal.SIGKILL)
    wait_until(lambda: not any(_runs(loop) for loop in loops), "both have ended")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
