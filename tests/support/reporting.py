"""A pytest plugin: what a person needs to see of a run, beside the dots.

* What the services of a failed test wrote is printed with the failure: the end of every log below
  the run's scratch folders that grew while the test ran.
* A line with counts, seconds and the tests that run now, every few seconds on a terminal and every
  half minute elsewhere, so that a run that hangs says where.
"""

import os
import sys
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

LOG_TAIL_BYTES = 4000
LOGS_MAX = 12
TERMINAL_S, ELSEWHERE_S = 2.0, 30.0
SHOWN_MAX = 3

_started = pytest.StashKey[float]()


class FailureLogs:
    """Runs where the tests run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # File systems keep coarser times than clocks.
        item.stash[_started] = time.time() - 0.01

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and _started in item.stash:
            logs = map(_tail_of, self._grown_since(item.stash[_started]))
            report.sections += islice(filter(None, logs), LOGS_MAX)
            # Half of a surrogate pair in a failed comparison would end the whole run under xdist.
            text = str(report.longrepr)
            sendable = text.encode(errors="backslashreplace").decode()
            if sendable != text:
                report.longrepr = sendable
        return report

    def _grown_since(self, started_s: float) -> list[Path]:
        """Newest first."""
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        grown = dict[Path, float]()
        for path in factory.getbasetemp().rglob("*.log"):
            try:
                changed_s = path.stat().st_mtime
            except OSError:
                continue
            if changed_s >= started_s:
                grown[path] = changed_s
        return sorted(grown, key=grown.__getitem__, reverse=True)


def _tail_of(path: Path) -> tuple[str, str] | None:
    """A section of a report; none of a browser's databases, whose logs are not for people."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = log.read()
    if b"\0" in tail:
        return None
    return f"end of {path.parent.name}/{path.name}", tail.decode(errors="replace")


class Progress:
    """Runs in the process that reports; under xdist the tests run in others."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._begin_s = time.monotonic()
        self._every_s = TERMINAL_S if sys.stdout.isatty() else ELSEWHERE_S
        self._next_s = self._begin_s + self._every_s
        self._total = 0
        self._done = 0
        self._failed = 0
        self._running = dict[str, float]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._done += 1
        self._tell()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed += report.failed

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        slowest = sorted(self._running.items(), key=lambda pair: pair[1])[:SHOWN_MAX]
        running = ", ".join(
            f"{name.rpartition('/')[2]} {now_s - since_s:.0f} s" for name, since_s in slowest
        )
        line = f"{self._done}/{self._total} tests, {self._failed} failed, "
        line += f"{now_s - self._begin_s:.0f} s" + (f"; running: {running}" if running else "")
        self._reporter.ensure_newline()
        self._reporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and config.get_verbosity() <= 0:
            config.pluginmanager.register(Progress(reporter), "kaiten-progress")
    config.pluginmanager.register(FailureLogs(config), "kaiten-failure-logs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two per core: some tests compute, others wait. Three were slower (2026-11-22)."""
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
