"""A scheduler that says at its end what its archive cost: CPU time in the loop and in the thread.

For `bench_archive`; started as a scheduler is. The figures lie beside the archive's folder.
"""

import json
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from time import thread_time_ns
from typing import Any

from ledger.archive import ArchiveWriter
from scheduler_svc import main as scheduler

FIGURES = "cost.json"


def timed(archive: type[ArchiveWriter]) -> None:
    """From now on every writer keeps count; the two looks at the clock are in its figures."""
    spent = {"loop_ns": 0, "thread_ns": 0}
    for name in ("request", "record"):
        setattr(archive, name, _counted(getattr(archive, name), spent))
    run = archive._run

    def run_and_say(self: ArchiveWriter) -> None:
        run(self)
        spent["thread_ns"] += thread_time_ns()
        (self._folder.parents[1] / FIGURES).write_text(json.dumps(spent))

    archive._run = run_and_say  # type: ignore[method-assign]


def _counted(call: Any, spent: dict[str, int]) -> Any:
    @wraps(call)
    def counted(*args: Any, **named: Any) -> None:
        started = thread_time_ns()
        call(*args, **named)
        spent["loop_ns"] += thread_time_ns() - started

    return counted


def cost_s(scratch: Path) -> float:
    """Of the scheduler that has ended there."""
    told: dict[str, int] = json.loads((scratch / FIGURES).read_text())
    return sum(told.values()) / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """As `scheduler_svc.main.main`."""
    timed(ArchiveWriter)
    return scheduler.main(argv)
