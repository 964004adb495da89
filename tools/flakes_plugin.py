"""pytest plugin of `make flakes`: keeps the tests that start a process or wait, in another order.

Which those are is a rule: the test is a coroutine, or its module or a fixture of it reaches,
through modules of the tests, one of those in `WAITING`. New tests are found without a list.
"""

import ast
import gc
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

# Modules by which a test starts processes or threads, talks to a socket, or looks at the clock.
WAITING: Final = frozenset(
    (
        *("asyncio", "concurrent", "grpc", "httpx", "multiprocessing", "psutil", "redis"),
        *("select", "signal", "socket", "subprocess", "threading", "time"),
    )
)
REPORTS: Final = "failed.jsonl"
COUNT: Final = "tests"
# Of a module, which then says why: its tests tell one story, and only the story is moved about.
IN_ORDER: Final = "IN_ORDER"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flakes")
    group.addoption("--flakes-seed", type=int, default=0, help="seed of the order")
    group.addoption("--flakes-folder", default=None, help="where reports of failures go")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--flakes-folder")
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports(Path(folder)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if isinstance(item, pytest.Function) and is_timed(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = shuffled(kept, config.getoption("--flakes-seed"))


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """The collector complains of what a test left open in whichever test runs when it is found."""
    yield
    gc.collect()


def shuffled(items: list[pytest.Function], seed: int) -> list[pytest.Item]:
    """Modules in another order, and the tests within each: a module's fixtures start once."""
    modules: dict[Path, list[pytest.Function]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    rng = random.Random(seed)
    groups = list(modules.values())
    rng.shuffle(groups)
    for group in groups:
        if not hasattr(group[0].module, IN_ORDER):
            rng.shuffle(group)
    return [item for group in groups for item in group]


def is_timed(item: pytest.Function) -> bool:
    """Whether the test starts a process, or waits."""
    root = item.config.rootpath
    if inspect.iscoroutinefunction(item.function) or reaches_waiting(item.path, root):
        return True
    fixtures = (each for found in item._fixtureinfo.name2fixturedefs.values() for each in found)
    return any(reaches_waiting(path, root) for each in fixtures for path in _used_by(each.func))


def _used_by(function: Any) -> Iterator[Path]:
    """Files of what a fixture names: a conftest.py has fixtures that wait and others."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    for name in code.co_names if code else ():
        module = sys.modules.get(getattr(function.__globals__.get(name), "__module__", ""))
        if path := getattr(module, "__file__", None):
            yield Path(path)


@cache
def reaches_waiting(path: Path, root: Path) -> bool:
    """Whether a file of the tests imports one of WAITING, or a file of the tests that does."""
    seen: set[Path] = set()
    left = [path]
    while left:
        path = left.pop()
        if path in seen or not path.is_relative_to(root / "tests"):
            continue
        seen.add(path)
        for name in _imports(path):
            if name.partition(".")[0] in WAITING:
                return True
            left.append(root / f"{name.replace('.', '/')}.py")
    return False


@cache
def _imports(path: Path) -> frozenset[str]:
    """Modules a file names; of `from tests.support import relay` also tests.support.relay."""
    if not path.exists():
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


class Reports:
    """In the process that hears of all tests: one file per failure, and a line that names it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tests: set[str] = set()
        self._failures = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests.add(report.nodeid)
        if report.failed:
            self._keep(report, report.when)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._keep(report, "collect")

    def pytest_sessionfinish(self) -> None:
        (self._folder / COUNT).write_text(str(len(self._tests)))

    def _keep(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        self._failures += 1
        slug = re.sub(r"\W+", "-", report.nodeid)[-80:].strip("-")
        path = self._folder / f"{self._failures:03d}-{slug}.txt"
        worker = getattr(report, "worker_id", "")
        sections = [f"--- {title}\n{text}" for title, text in report.sections]
        head = f"{report.nodeid} ({when}{worker and ', worker '}{worker})"
        path.write_text("\n".join([head, report.longreprtext, *sections]))
        line = json.dumps({"test": report.nodeid, "when": when, "report": path.name})
        with (self._folder / REPORTS).open("a") as file:
            file.write(line + "\n")
