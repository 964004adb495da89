"""Whole life cycles of the core with faults, thousands of them, under two hash seeds.

    python -m benchmarks.faults.fault_seeds [--seeds 2000] [--save]

Seeds go round over the combinations of rules in which every allowed pair stands together
(`tests.support.combinations`); each is a run of `tests.sim.test_scheduler_sim`: requests, cancels,
deadlines, dead workers, late plans, rows that fail, one seed in four with several tokens per step
and a sliding window. A run that breaks an invariant, or decides otherwise under the other hash
seed, is named by its seed. Two processes, an hour of CPU for 20,000 seeds.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks.recording import ROOT, record
from tests.sim.test_scheduler_sim import COMBINATIONS, plain, simulate

HASH_SEEDS: Final = ("0", "1")
# Far from those that the tests take.
FIRST: Final = 1_000_000


def outcome_of(seed: int) -> tuple[str, int]:
    """A digest of all that was decided, and how much that is; or what was broken, and 0."""
    knobs = COMBINATIONS[seed % len(COMBINATIONS)]
    is_wide = seed // len(COMBINATIONS) % 4 == 3
    shape: dict[str, Any] = {"slot_tokens_max": 3, "windows": (None, 12)} if is_wide else {}
    try:
        trace = simulate(seed, knobs, **shape).trace
    except Exception as error:
        # The next seed is of use whatever became of this one.
        return f"{type(error).__name__}: {error}", 0
    return hashlib.sha256(repr(plain(trace)).encode()).hexdigest(), len(trace)


def run_here(seeds: int) -> None:
    """Prints a line of JSON: by seed its outcome, and the CPU time of all."""
    outcomes = [outcome_of(seed) for seed in range(FIRST, FIRST + seeds)]
    print(json.dumps([outcomes, resource.getrusage(resource.RUSAGE_SELF).ru_utime]))


def run_beside(seeds: int, hash_seed: str) -> tuple[list[tuple[str, int]], float]:
    """The same in a process with that hash seed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults.fault_seeds", "--here", "--seeds", str(seeds)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    outcomes, cpu_s = json.loads(done.stdout)
    return [(text, count) for text, count in outcomes], cpu_s


def compare(runs: list[list[tuple[str, int]]]) -> dict[str, object]:
    """What all runs say together."""
    each = list(zip(*runs, strict=True))
    broken = {FIRST + i: text for i, ((text, count), *_) in enumerate(each) if not count}
    return {
        "seeds": len(each),
        "combinations": len(COMBINATIONS),
        "hash_seeds": HASH_SEEDS,
        "decisions": sum(count for _, count in runs[0]),
        "digest": hashlib.sha256(repr(runs[0]).encode()).hexdigest()[:16],
        "broken": broken,
        "unequal": [FIRST + i for i, outcomes in enumerate(each) if len(set(outcomes)) > 1],
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        return run_here(asked.seeds)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda seed: run_beside(asked.seeds, seed), HASH_SEEDS))
    figures = compare([outcomes for outcomes, _ in done])
    figures["cpu_s"] = round(sum(cpu_s for _, cpu_s in done))
    record("fault_seeds", figures, save=asked.save)
    if figures["broken"] or figures["unequal"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
