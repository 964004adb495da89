"""The GPU script, tried out on a CPU: interpreted kernels, tiny models, every phase."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.run import PHASES, _state, rendered, rows_of, table
from benchmarks.gpu.steps import busy

ROOT = Path(__file__).parents[3]
SECONDS_MAX = 900
WORDS = ("--device", "cpu", "--tiny", "--out")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_every_phase_runs_on_a_cpu(tmp_path: Path) -> None:
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
    states = {outcome["phase"]: outcome["state"] for outcome in found["phases"]}
    assert states == {phase.name: "done" for phase in PHASES}, done.stdout + str(found["phases"])
    assert not [row for row in found["rows"] if row["table"] == "failures"]
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
    assert "## crowd" in (tmp_path / "gpu.md").read_text()


def test_phases_fit_into_eight_minutes() -> None:
    assert sum(phase.seconds for phase in PHASES) <= 8 * 60


def test_rows_are_kept_of_a_process_that_was_stopped(tmp_path: Path) -> None:
    said = tmp_path / "phase.jsonl"
    assert rows_of(said) == []
    said.write_text('{"what": "a"}\n{"what": "b')
    assert rows_of(said) == [{"what": "a"}]


def test_a_phase_that_overruns_ends_with_what_it_started() -> None:
    """A grandchild, too: its end closes the pipe."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdin=subprocess.PIPE, stdout=write
    )
    os.close(write)
    assert _state(process, 0.5) == "stopped after 0 s"
    assert os.read(read, 1) == b""
    os.close(read)
    assert process.stdin is not None
    process.stdin.close()


def test_a_table_has_every_column_and_what_it_is_first() -> None:
    rows: list[dict[str, Any]] = [{"us": 1.23456, "what": "a"}, {"what": "b", "error": "no | way"}]
    assert table(rows) == [
        "| what | us | error |",
        "| --- | --- | --- |",
        "| a | 1.235 |  |",
        "| b |  | no / way |",
    ]


def test_a_page_tells_figures_by_kind_and_why_a_phase_failed() -> None:
    page = rendered(
        {
            "device": "a GPU",
            "commit": "abc",
            "day": "2026-01-01",
            "seconds": 1.0,
            "versions": {"torch": "2"},
            "phases": [{"phase": "floors", "state": "failed", "seconds": 1.0, "log": "boom"}],
            "rows": [{"table": "floors", "phase": "floors", "what": "read", "tb_per_s": 4.0}],
        }
    )
    assert "| read | 4 |" in page
    assert "## log of floors" in page
    assert "boom" in page


def test_busy_time_counts_overlaps_once() -> None:
    assert busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.7)]) == 4.0
    assert busy([]) == 0.0
