"""Every way of deciding on every law, what is claimed of some, and what presets bring.

    python -m benchmarks.modes [--device cpu|gpu] [--laws chat,code] [--save]
    python -m benchmarks.modes --page

The first runs for about five minutes and prints a table per law; `--page` writes docs/scheduling.md
anew from the last lines that were saved. The same numbers come out on every machine.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

from benchmarks.modes import claims, page
from benchmarks.modes.costs import DEVICES
from benchmarks.modes.figures import figures_of
from benchmarks.modes.laws import LAWS
from benchmarks.modes.model import Run
from benchmarks.modes.ways import PROMISES, WAYS, Knobs, configured
from benchmarks.recording import record

# Of the tables; presets were tuned with 1, 2 and 3, and are compared with others.
SEED = 0
HELD_OUT = (101, 102, 103, 104, 105)
SHOWN = ("ttft_p50", "gap_p99", "tokens_per_s", "plans_per_step")


def rounded(value: Any) -> Any:
    """Numbers to four digits, however deep they lie."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def run(
    law: str, knobs: Knobs, seed: int, device: str, count: int | None = None
) -> dict[str, float]:
    """One way on one law, of as many requests as it has or so many."""
    costs = DEVICES[device]
    jobs = dataclasses.replace(LAWS[law], count=count or LAWS[law].count).jobs(seed, costs)
    played = Run(costs, costs.spec(), configured(knobs), jobs).play()
    return dataclasses.asdict(figures_of(played))


def tables(laws: list[str], device: str, pool: Executor) -> dict[str, dict[str, Any]]:
    """By law and way its figures."""
    found: dict[str, dict[str, Any]] = {}
    for law in laws:
        print(f"\n{law}: {LAWS[law].says}")
        each = [pool.submit(run, law, knobs, SEED, device) for knobs in WAYS.values()]
        for way, one in zip(WAYS, each, strict=True):
            found.setdefault(law, {})[way] = one.result()
            print(f"  {way:32} {page.line(one.result())}", flush=True)
    return found


def presets(device: str, pool: Executor) -> dict[str, dict[str, Any]]:
    """By preset, what its own figure is of the default's on its own law, seed by seed, and the mean
    of some on every law.
    """
    every: dict[str, Knobs] = {"": {}} | {name: {"preset": name} for name in PROMISES}
    runs = {
        (name, law, seed): pool.submit(run, law, knobs, seed, device)
        for name, knobs in every.items()
        for law in LAWS
        for seed in HELD_OUT
    }

    def ratio(name: str, law: str, figure: str, seeds: Sequence[int] = HELD_OUT) -> float:
        ours, default = (
            sum(runs[who, law, seed].result()[figure] for seed in seeds) for who in (name, "")
        )
        return ours / default

    return {
        name: {
            "law": law,
            "metric": figure,
            "of_default": [ratio(name, law, figure, [seed]) for seed in HELD_OUT],
            "others": {law: {key: ratio(name, law, key) for key in SHOWN} for law in LAWS},
        }
        for name, (law, figure) in PROMISES.items()
    }


def claimed() -> dict[str, Any]:
    """Every claim's figures, on the CPU worker."""
    four = dict.fromkeys("abcd", 1)
    weights = {"a": 4, "b": 2, "c": 1, "d": 1}
    fair: Knobs = {"tenant_weights": ["a=4", "b=2"]}
    return {
        "stall_free": claims.stall_free(),
        "intervals": claims.intervals(),
        "equal_shares": claims.shares(four, {}),
        "weighted_shares": claims.shares(weights, fair),
        "neighbour": {
            "fcfs": claims.neighbour({"order": "fcfs"}),
            "fair": claims.neighbour({}),
            "fair, an eighth": claims.neighbour({}, tokens_max=claims.EIGHTH),
        },
        "prefixes": claims.prefixes(),
        "longest_waits": claims.longest_waits(),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--laws", default=",".join(LAWS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--page", action="store_true", help="write docs/scheduling.md anew")
    asked = parser.parse_args()
    if asked.page:
        page.write()
        return
    figures: dict[str, object] = {"device": asked.device, "seed": SEED}
    with ProcessPoolExecutor(asked.jobs) as pool:
        shown = pool.submit(claimed) if asked.device == "cpu" else None
        figures["laws"] = tables(asked.laws.split(","), asked.device, pool)
        figures["presets"] = presets(asked.device, pool)
        if shown is not None:
            figures["claims"] = shown.result()
    record("modes", rounded(figures), save=asked.save)


if __name__ == "__main__":
    main()
