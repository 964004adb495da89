"""Everything that can be said of a GPU, in one run of at most eight minutes.

    python -m benchmarks.gpu.run [--parts attention.decode steps.idle] [--out FOLDER]
    python -m benchmarks.gpu.run --device cpu --tiny        the script itself, tried out anywhere

First, in a minute, whether anything runs at all; then, all at once, what is right or wrong, and the
kernels compiled; then what is timed, one after the other (`parts`). A part that fails or overruns
stops no other, and what it said before is kept. FOLDER gets gpu.json (everything, written again as
it grows), gpu.md (tables, first what was expected beside what came) and gpu.log; the tables are
printed last. Needs torch, triton, numpy, safetensors; for serving also grpcio and protobuf, beside
transformers also transformers. Nothing is installed, built with a compiler of C++, or fetched.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.gpu.page import logs, rendered
from benchmarks.gpu.parts import BESIDE, IN_ORDER, NAMES, SMOKE, STATES, Part

ROOT: Final = Path(__file__).resolve().parents[2]
TOTAL_S: Final = 8 * 60
# Of the budget, for a process until its first part begins; what it takes beyond that the last parts
# lack. The first one reads torch from a disk that may be cold.
START_S: Final = 20
COLD_START_S_MAX: Final = 150
START_S_MAX: Final = 60
# A part that has more than its own time, as others left theirs, ends at this many times its own.
_TIMES_MAX: Final = 2
# Interpreted kernels and a machine that others use take their time.
_CPU_TIMES: Final = 6
_LOOK_S: Final = 0.1
_LOG_KEPT: Final = 4000


def main() -> int:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    # Whoever ends this process ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory() as folder:
        report = Report(asked.out, {**machine(asked.device), "tiny": asked.tiny})
        times = _CPU_TIMES if asked.device == "cpu" else 1
        due = time.monotonic() + TOTAL_S * times
        chosen, start = asked.parts or NAMES, Start.of(asked, Path(folder), times)
        smoke, beside, in_order = (
            [part for part in parts if part.name in chosen] for parts in (SMOKE, BESIDE, IN_ORDER)
        )
        # A process after one that failed finds torch in memory.
        in_turn(smoke, replace(start, start_s_max=COLD_START_S_MAX), report, due)
        follow([Run([part], start) for part in beside], report, due)
        in_turn(in_order, start, report, due)
    report.write()
    sys.stdout.write(rendered(report.found))
    return 0 if all(part["state"] == "done" for part in report.found["parts"]) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--parts", nargs="*", choices=NAMES)
    return parser.parse_args()


class Report:
    """What was found so far, on the disk whenever it grows: a kill takes nothing with it."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        self._out = out
        self._started = time.monotonic()
        self.found: dict[str, Any] = {**about, "seconds": 0.0, "parts": [], "rows": []}
        (out / "gpu.log").write_text("")

    def add(self, rows: Sequence[dict[str, Any]], outcomes: Sequence[dict[str, Any]]) -> None:
        if not rows and not outcomes:
            return
        self.found["rows"] += rows
        self.found["parts"] += outcomes
        for outcome in outcomes:
            sys.stdout.write(f"{outcome['part']}: {outcome['state']}, {outcome['seconds']} s\n")
            sys.stdout.flush()
        self.write()

    def log(self, name: str, text: str) -> None:
        with (self._out / "gpu.log").open("a") as file:
            file.write(f"=== {name}\n{text}\n")

    def write(self) -> None:
        self.found["seconds"] = round(time.monotonic() - self._started, 1)
        (self._out / "gpu.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (self._out / "gpu.md").write_text(rendered(self.found) + logs(self.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a process is started that goes through parts, and where its words go."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    # Of what a part may take on a GPU.
    times: float
    # Until its first part has begun.
    start_s_max: float = START_S_MAX

    @classmethod
    def of(cls, asked: argparse.Namespace, folder: Path, times: float) -> Self:
        command = [sys.executable, "-m", "benchmarks.gpu.parts", "--device", asked.device]
        # Peers that look for kernels on the net must not wait for it.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        if asked.device == "cpu":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        return cls(
            command=[*command, *(["--tiny"] * asked.tiny)],
            environment=environment,
            folder=folder,
            times=times,
        )


class Run:
    """A process that goes through parts, until one fails or overruns."""

    def __init__(self, parts: Sequence[Part], start: Start, left_over_s: float = 0.0) -> None:
        """`left_over_s`: of parts before these."""
        self.name = parts[0].name
        self.outcomes: list[dict[str, Any]] = []
        # Seconds that no part has used.
        self.left_over_s = left_over_s
        self._parts, self._times, self._start_s_max = parts, start.times, start.start_s_max
        self._said, self._log = (start.folder / f"{self.name}.{kind}" for kind in ("jsonl", "log"))
        self._read = 0
        self._current: Part | None = None
        # Whether it was asked where it is, as its time is up.
        self._is_asked = False
        self._began = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*start.command, "--said", str(self._said), *(part.name for part in parts)],
                cwd=ROOT, env=start.environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def _limit_s(self) -> float:
        if self._current is None:
            # Between two of its parts it does nothing.
            return self._times * self._start_s_max
        return limit_s(self._times * self._current.seconds, self.left_over_s)

    def look(self, due: float) -> tuple[list[dict[str, Any]], bool]:
        """(what it has said since, whether it goes on); ends it if it takes too long."""
        has_ended = self._process.poll() is not None
        rows = self._new_rows()
        figures = [row for row in rows if row["table"] != STATES]
        for row in rows:
            if row["table"] == STATES:
                self._note(row)
        most_s = min(due - self._began, self._limit_s)
        if not has_ended and time.monotonic() < self._began + most_s:
            return figures, True
        if not has_ended and self._current is not None and not self._is_asked:
            # It says so at once, and ends with the next look.
            self._is_asked = True
            os.kill(self._process.pid, signal.SIGUSR1)
            return figures, True
        is_late = self._is_asked or not has_ended
        self.end()
        # It ended because of the part that it has told of, now or a look ago.
        is_told = bool(self.outcomes) and self.outcomes[-1]["state"] == "failed"
        if is_told:
            # Its last words may have come after it told of its failure.
            self.outcomes[-1]["log"] = self._log_kept
        left = self._parts[len(self.outcomes) :]
        if left and not (is_told and self._current is None):
            why = f"stopped after {most_s:.0f} s" if is_late else "failed"
            self._close(left[0].name, why)
        return figures, False

    def _note(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if row["state"] == "begun":
            self._spend(self._times * START_S if not self.outcomes else 0.0, now)
            self._current = next(part for part in self._parts if part.name == row["part"])
            self._began = now
        else:
            self._close(row["part"], row["state"], row.get("error"))

    def _close(self, name: str, state: str, error: str | None = None) -> None:
        now = time.monotonic()
        outcome = {"part": name, "state": state, "seconds": round(now - self._began, 1)}
        if error:
            outcome["error"] = error
        if state != "done":
            outcome["log"] = self._log_kept
        self.outcomes.append(outcome)
        own_s = START_S if self._current is None else self._current.seconds
        self._spend(self._times * own_s, now)
        self._current, self._began, self._is_asked = None, now, False

    def _spend(self, own_s: float, now: float) -> None:
        """What was taken since it began, of what it had."""
        self.left_over_s = max(0.0, self.left_over_s + own_s - (now - self._began))

    def _new_rows(self) -> list[dict[str, Any]]:
        """Whole lines: a process that was ended may have left half of its last."""
        text = self._said.read_text() if self._said.exists() else ""
        whole = text[self._read : text.rfind("\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def _log_kept(self) -> str:
        return self.text()[-_LOG_KEPT:]

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        """With it goes everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def limit_s(own_s: float, left_over_s: float) -> float:
    """Of a part: nobody has less than its own time, and nobody takes all that others left."""
    return min(own_s + left_over_s, _TIMES_MAX * own_s)


def in_turn(parts: Sequence[Part], start: Start, report: Report, due: float) -> None:
    """One after the other, in a new process after one that did not end well."""
    own_s = start.times * (START_S + sum(part.seconds for part in parts))
    left_over_s = max(0.0, due - time.monotonic() - own_s) if parts else 0.0
    while parts and time.monotonic() < due:
        run = Run(parts, start, left_over_s)
        follow([run], report, due)
        parts, left_over_s = parts[len(run.outcomes) :], run.left_over_s
        start = replace(start, start_s_max=START_S_MAX)
    late = {"state": "no time left", "seconds": 0.0}
    report.add([], [{"part": part.name, **late} for part in parts])


def follow(runs: Sequence[Run], report: Report, due: float) -> None:
    """Until all of them have ended; none goes on beyond `due`."""
    left = list(runs)
    try:
        while left:
            # A part says what it found in a file, so that a kill takes nothing with it.
            time.sleep(_LOOK_S)
            for run in tuple(left):
                told = len(run.outcomes)
                figures, goes_on = run.look(due)
                report.add(figures, run.outcomes[told:])
                if not goes_on:
                    left.remove(run)
                    report.log(run.name, run.text())
                    report.write()
    finally:
        for run in left:
            run.end()


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    from benchmarks import recording

    found: dict[str, Any] = {
        "day": time.strftime("%Y-%m-%d"),
        "commit": recording.commit(),
        "versions": recording.versions(),
        "device": device,
    }
    if device == "cuda":
        words = (
            "nvidia-smi",
            "--query-gpu=name,driver_version,power.limit",
            "--format=csv,noheader",
        )
        with contextlib.suppress(OSError):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            found["device"] = done.stdout.strip() or device
    return found


if __name__ == "__main__":
    sys.exit(main())
