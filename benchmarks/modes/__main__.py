"""Every way of deciding on every law, what is claimed of some, and what presets bring.

    python -m benchmarks.modes [--device cpu|gpu] [--laws chat,code] [--save]
    python -m benchmarks.modes --page

The first runs for about five minutes and prints a table per law; `--page` writes docs/scheduling.md
anew from the last lines that were saved. The same numbers come out on every machine.
"""

import argparse
import dataclasses
import json
from typing import Any

from benchmarks.modes import claims, page
from benchmarks.modes.costs import DEVICES, Costs
from benchmarks.modes.figures import Figures, figures_of
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


def run(law: str, knobs: Knobs, seed: int, costs: Costs) -> Figures:
    """One way on one law."""
    jobs = LAWS[law].jobs(seed, costs)
    return figures_of(Run(costs, costs.spec(), configured(knobs), jobs).play())


def tables(laws: list[str], costs: Costs) -> dict[str, dict[str, Any]]:
    """By law and way its figures."""
    found: dict[str, dict[str, Any]] = {}
    for law in laws:
        print(f"\n{law}: {LAWS[law].says}")
        for way, knobs in WAYS.items():
            one = run(law, knobs, SEED, costs)
            found.setdefault(law, {})[way] = dataclasses.asdict(one)
            print(f"  {way:32} {page.line(found[law][way])}", flush=True)
    return found


def presets(costs: Costs) -> dict[str, dict[str, Any]]:
    """By preset, what its own metric is of the default's on its own law, seed by seed, and the mean
    of some others on every law.
    """
    laws, seeds = list(LAWS), HELD_OUT
    default = {law: [run(law, {}, seed, costs) for seed in seeds] for law in laws}
    found: dict[str, dict[str, Any]] = {}
    for name, (own, metric) in PROMISES.items():
        ours = {law: [run(law, {"preset": name}, seed, costs) for seed in seeds] for law in laws}
        found[name] = {
            "law": own,
            "metric": metric,
            "of_default": [
                _ratio(metric, *pair) for pair in zip(ours[own], default[own], strict=True)
            ],
            "others": {
                law: {key: _mean(key, ours[law]) / _mean(key, default[law]) for key in SHOWN}
                for law in laws
            },
        }
        print(name, json.dumps(rounded(found[name])), flush=True)
    return found


def _ratio(metric: str, ours: Figures, default: Figures) -> float:
    return getattr(ours, metric) / getattr(default, metric)  # type: ignore[no-any-return]


def _mean(metric: str, each: list[Figures]) -> float:
    return sum(getattr(one, metric) for one in each) / len(each)


def claimed() -> dict[str, Any]:
    """Every claim's figures, on the CPU worker."""
    four = dict.fromkeys("abcd", 1)
    weights = {"a": 4, "b": 2, "c": 1, "d": 1}
    fair: Knobs = {"tenant_weights": ["a=4", "b=2"]}
    eighth = claims.EIGHTH
    return {
        "stall_free": claims.stall_free(),
        "intervals": claims.intervals(),
        "equal_shares": claims.shares(four, {}),
        "weighted_shares": claims.shares(weights, fair),
        "neighbour": {
            "fcfs": claims.neighbour({"order": "fcfs"}),
            "fair": claims.neighbour({}),
            "fair, an eighth": claims.neighbour({}, tokens_max=eighth),
            "fair, a quarter": claims.neighbour({}, tokens_max=2 * eighth),
        },
        "prefixes": claims.prefixes(),
        "longest_waits": claims.longest_waits(),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--laws", default=",".join(LAWS))
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--page", action="store_true", help="write docs/scheduling.md anew")
    asked = parser.parse_args()
    if asked.page:
        page.write()
        return
    costs = DEVICES[asked.device]
    figures: dict[str, object] = {
        "device": asked.device,
        "seed": SEED,
        "laws": tables(asked.laws.split(","), costs),
        "presets": presets(costs),
    }
    if asked.device == "cpu":
        figures["claims"] = claimed()
    record("modes", rounded(figures), save=asked.save)


if __name__ == "__main__":
    main()
