"""pytest plugin: CPU seconds of every test, with those of all processes that it started.

    make test ARGS='tests/unit/kernels -p tools.cpu_plugin'          the most expensive at the end
    make test ARGS='-p tools.cpu_plugin --cpu-save cpu.jsonl'        and all of them, one a line

Unlike `--durations` it says the same on a loaded machine. What a shared service does for a test is
counted where it is done; who comes first to a shared fixture pays for it in its setup. What is left
of a process (imports, collection) is told as a sum. Linux only: it reads /proc.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

SHOWN: Final = 60
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
# Some tests put another in place of os.getpid.
_OWN: Final = os.getpid()


def cpu_s() -> float:
    """Of this process, its ended children, and its living descendants with theirs."""
    own_ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                # From the third on; the second is a name that may hold anything. Some tests put
                # another in place of Path.read_text, and what it says is counted after them.
                with open(Path(entry.path, "stat")) as stat:
                    fields = stat.read().rpartition(")")[2].split()
                parent = int(fields[1])
            except (OSError, ValueError, IndexError):
                # It is gone, or goes while it is read: then it may say anything.
                continue
            children[parent].append(int(entry.name))
            # utime, stime and both of its ended children: fields 14 to 17 of proc(5).
            own_ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    ticks, left = 0, [_OWN]
    while left:
        pid = left.pop()
        ticks += own_ticks.get(pid, 0)
        left += children[pid]
    return ticks / _TICKS_PER_S


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cpu")
    group.addoption("--cpu-save", default=None, help="file that gets a line per test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Bill(config.getoption("--cpu-save")))


class Meter:
    """Where the tests run: notes on each report what its phase has cost."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seen_s = 0.0
        self._tests_s = 0.0
        # Milliseconds a look, four times a test: most of what a small test would seem to cost.
        self._looking_s = 0.0

    def _now_s(self) -> float:
        """Without what looking has cost."""
        began_s = time.process_time()
        now_s = cpu_s() - self._looking_s
        self._looking_s += time.process_time() - began_s
        return now_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._seen_s = self._now_s()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        now_s = self._now_s()
        report = yield
        # A service that nobody waited for takes its seconds with it.
        cost_s = max(0.0, now_s - self._seen_s)
        vars(report)["cpu_s"] = cost_s
        self._tests_s += cost_s
        self._seen_s = now_s
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_besides_s"] = self._now_s() - self._tests_s


class Bill:
    """In the process that hears of all tests."""

    def __init__(self, target: str | None) -> None:
        self._target = target
        self._phases_s: dict[str, Counter[str]] = defaultdict(Counter)
        self._besides_s = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._phases_s[report.nodeid][report.when] += report.cpu_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._besides_s += getattr(node, "workeroutput", {}).get("cpu_besides_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        by_cost = sorted(self._phases_s.items(), key=lambda pair: -pair[1].total())
        total_s = sum(phases.total() for _, phases in by_cost)
        terminalreporter.section(f"CPU seconds: {total_s:.1f}, besides tests {self._besides_s:.1f}")
        for name, phases in by_cost[:SHOWN]:
            setup, call, down = (phases[when] for when in ("setup", "call", "teardown"))
            terminalreporter.write_line(f"{setup:7.2f} +{call:7.2f} +{down:6.2f}  {name}")
        if self._target is not None:
            lines = [json.dumps({"test": name, **phases}) for name, phases in by_cost]
            Path(self._target).write_text("\n".join(lines) + "\n")
