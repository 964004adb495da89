"""Which tests catch which mistakes: mutants of the code, one at a time, each in a copy of the tree.

`make mutants`, or `python -m tools.mutants [--only TEXT] [--list] [--save]`. `tools/mutants.toml`
lists them: mends of the past taken back by hand, and places to draw others from. The tests named
for a mutant run first; if they all pass, the wider ones of its folder. A mutant is

* caught: a test failed (which one is said), or the time limit was over
* survived: all tests passed. Write the test that is missing, or say why nobody could tell
* equivalent: listed as one that nobody could tell, with the reason
* stale: its place or its tests are not there any more, so it says nothing. Mend the list

The working tree is never changed. The exit code is 1 if any survived or is stale.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from benchmarks.recording import record
from tools.children import ROOT, environment, run, tethered
from tools.mutation import Change, draw, sources

LIST: Final = "tools/mutants.toml"
CAUGHT, SURVIVED, EQUIVALENT, STALE = "caught", "survived", "equivalent", "stale"
# In place of the project's own addopts: one process per mutant, and the same examples every time.
PYTEST: Final = (
    *("-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-m", "not slow"),
    *("-x", "-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--timeout=120"),
    *("-p", "asyncio", "-p", "hypothesispytest", "-p", "timeout"),
)
# Those above and no others: what else is installed would be imported once per mutant.
NO_OTHER_PLUGINS: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PASSED, NOT_THERE = 0, (4, 5)
FIRST_CAUGHT: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`change` is None where the place is not there any more; `why_not` says what is wrong."""

    name: str
    tests: tuple[str, ...]
    wider: tuple[str, ...]
    change: Change | None
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`by`: the test that caught it, or why there is none."""

    name: str
    outcome: str
    by: str
    wall_s: float = 0.0


def listed(root: Path) -> tuple[list[Mutant], list[Verdict]]:
    """What is to be run, and what is known without: the equivalent ones."""
    told = tomllib.loads((root / LIST).read_text())
    mutants = [_reversal(root, entry, told["wider"]) for entry in told.get("reversal", [])]
    for entry in told.get("draw", []):
        drawn = draw(root, entry["where"], seed=told["seed"], count=entry["count"])
        mutants += [_drawn(root, change, entry, told["wider"]) for change in drawn]
    reasons = {entry["mutant"]: entry["why"] for entry in told.get("equivalent", [])}
    equal = [m for m in mutants if m.change is not None and m.change.name in reasons]
    known = [
        Verdict(name=m.name, outcome=EQUIVALENT, by=reasons[m.change.name])
        for m in equal
        if m.change
    ]
    return [mutant for mutant in mutants if mutant not in equal], known


def _drawn(root: Path, change: Change, entry: dict[str, Any], wider: dict[str, Any]) -> Mutant:
    name = f"{change.path}:{change.line(root)} {change.name}"
    return _mutant(root, name, entry, wider, change=change)


def _reversal(root: Path, entry: dict[str, Any], wider: dict[str, Any]) -> Mutant:
    """The snippet is looked for in a whole folder: a file may move, the mend must stand once."""
    old, new, name = entry["old"].encode(), entry["new"].encode(), f"{entry['of']} {entry['says']}"
    texts = {path: (root / path).read_bytes() for path in sources(root, entry["where"])}
    places = [path for path, text in texts.items() for _ in range(text.count(old))]
    if len(places) != 1:
        why = f"its place is there {len(places)} times in {entry['where']}"
        return _mutant(root, name, entry, wider, why_not=why)
    start = texts[places[0]].index(old)
    change = Change(
        path=places[0], kind="reversal", name=name, start=start, end=start + len(old), new=new
    )
    return _mutant(root, name, entry, wider, change=change)


def _mutant(
    root: Path,
    name: str,
    entry: dict[str, Any],
    wider: dict[str, Any],
    change: Change | None = None,
    why_not: str = "",
) -> Mutant:
    tests = tuple(entry["tests"])
    missing = [test for test in tests if not (root / test.partition("::")[0]).exists()]
    if missing:
        change, why_not = None, f"its tests are not there: {missing[0]}"
    folder = entry["where"].partition("/")[0]
    others = tuple(test for test in wider.get(folder, ()) if test not in tests)
    return Mutant(name=name, tests=tests, wider=others, change=change, why_not=why_not)


def copied(root: Path, target: Path) -> None:
    """What git tracks or would: the working tree as it is, without what is built."""
    names = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (root / name).is_file() and not (root / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


@contextlib.contextmanager
def mutated(change: Change, copy: Path) -> Iterator[None]:
    """The copy holds the mutant inside the block."""
    path = copy / change.path
    before = change.apply(copy)
    try:
        _forget(path)
        yield
    finally:
        path.write_bytes(before)
        _forget(path)
        # Hypothesis would try what failed with this mutant on the next one.
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)


def _forget(path: Path) -> None:
    """Python would take its bytecode for fresh: the change may keep size and second."""
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def judge(mutant: Mutant, copy: Path, limit_s: float) -> Verdict:
    """Run the tests named for it and, if those pass, the wider ones."""
    started = time.monotonic()

    def verdict(outcome: str, by: str) -> Verdict:
        seconds = round(time.monotonic() - started, 1)
        return Verdict(name=mutant.name, outcome=outcome, by=by, wall_s=seconds)

    if mutant.change is None:
        return verdict(STALE, mutant.why_not)
    with mutated(mutant.change, copy):
        for tests in filter(None, (mutant.tests, mutant.wider)):
            code, text = pytest(tests, copy, limit_s)
            if code in NOT_THERE:
                return verdict(STALE, f"pytest finds no test in {' '.join(tests)}")
            if code != PASSED:
                found = FIRST_CAUGHT.search(text)
                by = found[1] if found else f"exit {code}"
                return verdict(CAUGHT, by if code is not None else f"{limit_s:g} s were over")
    return verdict(SURVIVED, " ".join((*mutant.tests, *mutant.wider)))


def pytest(tests: Sequence[str], copy: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: killed at the limit) and what it printed, of these tests in that tree."""
    log = copy / "pytest.log"
    command = tethered(*PYTEST, f"--basetemp={copy / 'tmp'}", *tests)
    env = environment(copy) | NO_OTHER_PLUGINS
    code = run(command, cwd=copy, env=env, log=log, limit_s=limit_s)
    return code, log.read_text(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when each is caught or equivalent, 1 when not, 2 when tests fail without any mutant."""
    chosen = _parser().parse_args(argv)
    mutants, verdicts = listed(chosen.root)
    if chosen.only:
        mutants = [each for each in mutants if any(words in each.name for words in chosen.only)]
        verdicts = [each for each in verdicts if any(words in each.name for words in chosen.only)]
    if chosen.list:
        print(*(mutant.name for mutant in mutants), *(v.name for v in verdicts), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="kaiten-mutants-") as folder:
        copies = [Path(folder) / str(index) for index in range(chosen.jobs)]
        for copy in copies:
            copied(chosen.root, copy)
        if failing := _baseline(mutants, copies[0], chosen.limit_s):
            print(f"without any mutant: {failing}")
            return 2
        verdicts += _judged(mutants, copies, chosen.limit_s)
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{counts[each]} {each}" for each in (CAUGHT, SURVIVED, EQUIVALENT, STALE)))
    if chosen.save:
        record("mutants", {**counts, "mutants": [_row(verdict) for verdict in verdicts]}, save=True)
    return int(counts[SURVIVED] + counts[STALE] > 0)


def _baseline(mutants: Sequence[Mutant], copy: Path, limit_s: float) -> str:
    """What fails in the unchanged copy: then no mutant could be said to be caught."""
    alive = [mutant for mutant in mutants if mutant.change is not None]
    tests = dict.fromkeys(test for m in alive for test in (*m.tests, *m.wider))
    code, text = pytest(list(tests), copy, 10 * limit_s) if tests else (PASSED, "")
    return "" if code == PASSED else f"exit {code}\n{text[-2000:]}"


def _judged(mutants: Sequence[Mutant], copies: Sequence[Path], limit_s: float) -> list[Verdict]:
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            verdict = judge(mutant, copy, limit_s)
        finally:
            free.put(copy)
        print(f"{verdict.outcome:10} {verdict.name}\n{'':10} {verdict.by}", flush=True)
        return verdict

    with ThreadPoolExecutor(len(copies)) as threads:
        return list(threads.map(one, mutants))


def _row(verdict: Verdict) -> dict[str, Any]:
    return {"mutant": verdict.name, "outcome": verdict.outcome, "by": verdict.by}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="those whose line holds this; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="say which there are, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="for the tests of one mutant (default 300)"
    )
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the project")
    return parser


if __name__ == "__main__":
    sys.exit(main())
