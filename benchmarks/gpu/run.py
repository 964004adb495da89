"""Everything that can be said of a GPU, in one run of at most eight minutes.

    python -m benchmarks.gpu.run [--phases kernels steps] [--out FOLDER]
    python -m benchmarks.gpu.run --device cpu --tiny        the script itself, tried out anywhere

Each phase is a process of its own with a budget: one that fails or overruns stops nobody else, and
what it said before is kept. FOLDER gets gpu.json (everything) and gpu.md (tables).
Needs torch, triton, numpy, safetensors; for serving also grpcio and protobuf, beside transformers
also transformers. Where structlog is missing a silent one stands in for it.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    module: str
    seconds: int


# Together seven and a half minutes, if every one of them used all it may.
PHASES = (
    Phase(name="floors", module="floors", seconds=30),
    Phase(name="correctness", module="correctness", seconds=80),
    Phase(name="kernels", module="attention", seconds=90),
    Phase(name="steps", module="steps", seconds=80),
    Phase(name="serving", module="serving", seconds=110),
    Phase(name="transformers", module="beside_transformers", seconds=60),
)
# Interpreted kernels and a machine that others use take their time.
CPU_SECONDS_TIMES = 6
# Of everything said, in this order.
COLUMNS_FIRST = ("what", "shape", "rows", "context")


def main() -> int:
    asked = arguments()
    if asked.phase:
        return run_phase(asked)
    asked.out.mkdir(parents=True, exist_ok=True)
    started = due = time.monotonic()
    found: dict[str, Any] = {**machine(asked.device), "tiny": asked.tiny}
    found |= {"phases": [], "rows": []}
    for phase in PHASES:
        if asked.phases and phase.name not in asked.phases:
            continue
        # What the phases before have left of theirs is there for this one.
        due += phase.seconds * (CPU_SECONDS_TIMES if asked.device == "cpu" else 1)
        outcome, said = run_apart(phase, asked, due - time.monotonic())
        found["phases"].append(outcome)
        found["rows"] += said
        found["seconds"] = round(time.monotonic() - started, 1)
        sys.stdout.write(f"{outcome['phase']}: {outcome['state']}, {outcome['seconds']} s\n")
        sys.stdout.flush()
        # After each: whoever ends this process keeps what there is.
        (asked.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (asked.out / "gpu.md").write_text(rendered(found))
    return 0 if all(outcome["state"] == "done" for outcome in found["phases"]) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--phases", nargs="*", choices=[phase.name for phase in PHASES])
    parser.add_argument("--phase", choices=[phase.name for phase in PHASES], help=argparse.SUPPRESS)
    return parser.parse_args()


def run_apart(
    phase: Phase, asked: argparse.Namespace, seconds: float
) -> tuple[dict[str, Any], list[Any]]:
    """(how it went, the rows it said)."""
    said, log = (asked.out / f"{phase.name}.{kind}" for kind in ("jsonl", "log"))
    said.unlink(missing_ok=True)
    words = ["--device", asked.device, "--phase", phase.name, "--out", str(said.resolve())]
    # Peers that look for kernels on the net must not wait for it.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if asked.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.run", *words, *(["--tiny"] * asked.tiny)],
            cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        state = _state(process, seconds)
    outcome = {
        "phase": phase.name,
        "state": state,
        "seconds": round(time.monotonic() - started, 1),
        "log": "" if state == "done" else log.read_text(errors="replace")[-3000:],
    }
    return outcome, [{"phase": phase.name, **row} for row in rows_of(said)]


def _state(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """How it ended; with it ends everything that it has started."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "failed" if code else "done"


def rows_of(said: Path) -> list[dict[str, Any]]:
    """Whole ones: a process that was stopped may have left half of its last."""
    rows = []
    for line in said.read_text().splitlines() if said.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def run_phase(asked: argparse.Namespace) -> int:
    """In the process of the phase. Its parts fail apart from each other too."""
    stand_in()
    import torch

    from benchmarks.gpu.bench import Bench

    name = next(phase.module for phase in PHASES if phase.name == asked.phase)
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    bench = Bench(
        device=torch.device(asked.device),
        is_tiny=asked.tiny,
        dtype=torch.float32 if asked.device == "cpu" else torch.bfloat16,
        out=asked.out,
    )
    failures = 0
    for part in module.PARTS:
        try:
            with torch.inference_mode():
                part(bench)
        except Exception as error:
            failures += 1
            traceback.print_exc()
            bench.row("failures", what=part.__name__, error=f"{type(error).__name__}: {error}")
        bench.free()
    return 1 if failures else 0


def stand_in() -> None:
    """A structlog that says nothing, where there is none."""
    if importlib.util.find_spec("structlog") is not None:
        return
    silent = type(sys)("structlog")
    logger = type("Silent", (), {"__getattr__": lambda self, name: lambda *a, **k: None})()
    silent.get_logger = lambda *a, **k: logger  # type: ignore[attr-defined]
    sys.modules["structlog"] = silent


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


def rendered(found: dict[str, Any]) -> str:
    """Markdown: the machine, how the phases went, and one table per kind of figure."""
    lines = [
        f"# {found['device']}",
        "",
        f"commit {found['commit']}, {found['day']}, {found['seconds']} s, "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "",
        *table([{k: v for k, v in phase.items() if k != "log"} for phase in found["phases"]]),
    ]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        figures = {key: value for key, value in row.items() if key not in ("table", "phase")}
        tables.setdefault(row["table"], []).append(figures)
    for name, rows in tables.items():
        lines += ["", f"## {name}", "", *table(rows)]
    for phase in found["phases"]:
        if phase["log"]:
            lines += ["", f"## log of {phase['phase']}", "", "```", phase["log"].strip(), "```"]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns.sort(key=lambda name: COLUMNS_FIRST.index(name) if name in COLUMNS_FIRST else 99)
    body = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
