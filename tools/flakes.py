"""Which tests fail sometimes: every test that starts a process or waits, again and again.

`make flakes`, or `python -m tools.flakes --runs 20 [--select EXPRESSION] [-- PYTEST ARGUMENTS]`.
Each round runs the tests in another order; every second one beside two processes that burn a core
each. Rounds are appended to a file of JSON lines as they end, so a rerun on the same commit goes on
where the last one stopped. The folder of a round that failed is kept: a report per failure, what
pytest said, and the tests' own folders with the logs of the services they started.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, TypedDict

from benchmarks.recording import RESULTS, SCHEMA_VERSION, commit, cpu_model, versions
from tools.children import ROOT, busy_loops, environment, run, tethered
from tools.flakes_plugin import COUNT, REPORTS

BUSY_LOOPS: Final = 2
PLUGIN: Final = "tools.flakes_plugin"
# What pytest calls a run in which every test passed, and one in which some did not.
PASSED, FAILED, NOTHING_COLLECTED = 0, 1, 5
THE_RUN: Final = "(the run itself)"


class Failure(TypedDict):
    """One test of one round."""

    test: str
    when: str
    report: str


class Round(TypedDict):
    """One line of the file. `select` and `args` with the commit say what it was a round of."""

    commit: str
    select: str
    args: list[str]
    round: int
    seed: int
    busy: bool
    tests: int
    wall_s: float
    logs: str
    failed: list[Failure]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when no test failed in any of the rounds, 1 when one did, 2 when there is no test."""
    chosen = _parser().parse_args(argv)
    what = {"commit": commit(), "select": chosen.select, "args": chosen.pytest}
    rounds = recorded(chosen.out, what)[: chosen.runs]
    if rounds:
        print(f"{len(rounds)} of {chosen.runs} rounds of this commit are in {chosen.out}")
    give_up_at = time.monotonic() + chosen.hours_max * 3600
    for number in range(len(rounds) + 1, chosen.runs + 1):
        if time.monotonic() > give_up_at:
            print(f"{chosen.hours_max:g} hours are over; run again for the rest")
            break
        played = play(chosen, number, what)
        if not played["tests"] and not played["failed"]:
            print("no test is selected")
            return 2
        rounds.append(played)
        keep(chosen.out, played)
        print(_line(played, chosen.runs), flush=True)
    print(summary(rounds))
    return int(any(each["failed"] for each in rounds))


def play(chosen: argparse.Namespace, number: int, what: dict[str, Any]) -> Round:
    """One round; its number is the seed of its order."""
    is_busy = number % 2 == 0 if chosen.busy is None else chosen.busy
    folder: Path = chosen.logs / f"{time.strftime('%m%d-%H%M%S')}-round-{number}"
    folder.mkdir(parents=True)
    command = tethered("-m", "pytest", *pytest_arguments(chosen, number, folder))
    started = time.monotonic()
    with busy_loops(BUSY_LOOPS) if is_busy else nullcontext():
        code = run(
            command, cwd=chosen.root, env=environment(chosen.root), log=folder / "pytest.txt"
        )
    failed = failures(folder, code)
    count = folder / COUNT
    tests = int(count.read_text()) if count.exists() else 0
    if not failed:
        shutil.rmtree(folder)
    return {
        **what,  # type: ignore[typeddict-item]
        "round": number,
        "seed": number,
        "busy": is_busy,
        "tests": tests,
        "wall_s": round(time.monotonic() - started, 1),
        "logs": os.path.relpath(folder, chosen.root) if failed else "",
        "failed": failed,
    }


def pytest_arguments(chosen: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """Of the round with this seed. Folders of tests that passed are not kept."""
    own = ["-p", PLUGIN, f"--flakes-seed={seed}", f"--flakes-folder={folder}", "-p"]
    own += ["no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    own += ["-o", "tmp_path_retention_policy=failed"]
    return [*own, *(["-k", chosen.select] if chosen.select else []), *chosen.pytest]


def failures(folder: Path, code: int | None) -> list[Failure]:
    """What failed; a run that broke off without naming a test has failed itself."""
    path = folder / REPORTS
    lines = path.read_text().splitlines() if path.exists() else []
    found: list[Failure] = [json.loads(line) for line in lines]
    if not found and code not in (PASSED, NOTHING_COLLECTED):
        found.append({"test": THE_RUN, "when": f"exit {code}", "report": "pytest.txt"})
    return found


def recorded(path: Path, what: dict[str, Any]) -> list[Round]:
    """The rounds of this commit and selection that the file holds."""
    lines = path.read_text().splitlines() if path.exists() else []
    rounds: list[Round] = [json.loads(line) for line in lines]
    return [each for each in rounds if all(each.get(key) == what[key] for key in what)]


def keep(path: Path, played: Round) -> None:
    """Append a round, with what is needed to compare it with another machine's."""
    head = {"schema": SCHEMA_VERSION, "benchmark": "flakes", "day": time.strftime("%Y-%m-%d")}
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**head, **machine, **played}) + "\n")


def _line(played: Round, runs: int) -> str:
    names = sorted({failure["test"] for failure in played["failed"]})
    busy = ", beside busy loops" if played["busy"] else ""
    outcome = f"FAILED {len(names)}: {', '.join(names)}" if names else "passed"
    head = f"round {played['round']} of {runs}: {played['tests']} tests in {played['wall_s']:.0f} s"
    return f"{head}{busy}: {outcome}"


def summary(rounds: Sequence[Round]) -> str:
    """Each test that failed: how often, and for every round the seed and its report."""
    places: dict[str, dict[int, str]] = {}
    for each in rounds:
        for failure in each["failed"]:
            busy = ", busy" if each["busy"] else ""
            where = f"seed {each['seed']}{busy}: {each['logs']}/{failure['report']}"
            places.setdefault(failure["test"], {}).setdefault(each["round"], where)
    tests = sum(each["tests"] for each in rounds)
    lines = [f"{len(rounds)} rounds, {tests} runs of tests, {len(places)} tests failed"]
    for test, found in sorted(places.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(found)} of {len(rounds)}: {test}")
        lines += [f"    {where}" for where in found.values()]
    if places:
        lines.append("one round again, in its order:")
        words = ["python", "-m", "pytest", "-p", PLUGIN, "--flakes-seed=SEED", *rounds[0]["args"]]
        lines.append("    " + shlex.join(words))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.flakes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=20, help="rounds in all (default 20)")
    parser.add_argument("--select", default="", help="only tests that match (pytest's -k)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "flakes.jsonl", help="where rounds are appended"
    )
    parser.add_argument(
        "--logs", type=Path, default=ROOT / ".kaiten" / "flakes", help="folders of rounds that fail"
    )
    parser.add_argument(
        "--busy",
        action=argparse.BooleanOptionalAction,
        help="every round beside busy loops, or none (default: every second one)",
    )
    parser.add_argument(
        "--hours-max", type=float, default=12.0, help="begin no round after so long (default 12)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the project")
    parser.add_argument("pytest", nargs="*", help="after --: what pytest is given as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
