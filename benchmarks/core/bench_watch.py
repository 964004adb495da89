"""What watching costs the scheduler: a look at the core, and putting together what has changed.

    python -m benchmarks.core.bench_watch [--rows 16,256,1024] [--looks 20] [--save]

CPU time, of a core alone under the crowded load of `bench_scheduler`. `look_ms` is on the event
loop, where a step may wait for it; `changes_ms` is in a thread, between two looks eight steps
apart, and `snapshot_ms` for who begins to watch. `share` is of the loop, at four looks a second:
a look takes one twentieth at most, so larger cells are looked at less often.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from typing import TypeVar

from benchmarks.core.bench_scheduler import Bench
from benchmarks.recording import record
from scheduler_svc.core.commands import Configured
from scheduler_svc.live_view import Moment, View, look
from scheduler_svc.live_view_wire import changes_to_proto
from scheduler_svc.watching import INTERVAL_MS

STEPS_BETWEEN = 8
Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What it gives, and the milliseconds it took."""
    began_ns = thread_time_ns()
    result = work()
    return result, (thread_time_ns() - began_ns) / 1e6


def measure(rows: int, looks: int) -> dict[str, object]:
    bench = Bench("crowded", rows, STEPS_BETWEEN)
    configured = Configured(config=bench.scheduler.config, policy="fcfs")

    def seen() -> View:
        return look(bench.scheduler, Moment(1, 1, 1, 1), configured, {}, {})

    bench.run()
    before, looked, changed, started = seen(), [], [], []
    for _ in range(looks):
        for _ in range(STEPS_BETWEEN):
            bench.step()
        now, look_ms = timed(seen)
        changes, changes_ms = timed(lambda: changes_to_proto(before, now).SerializeToString())  # noqa: B023
        snapshot, snapshot_ms = timed(lambda: changes_to_proto(None, now).SerializeToString())  # noqa: B023
        before = now
        looked.append(look_ms)
        changed.append(changes_ms)
        started.append(snapshot_ms)
    return {
        "rows": rows,
        "look_ms": round(median(looked), 3),
        "changes_ms": round(median(changed), 3),
        "snapshot_ms": round(median(started), 3),
        "changes_bytes": len(changes),
        "snapshot_bytes": len(snapshot),
        "share": round(min(0.05, median(looked) / INTERVAL_MS), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="16,256,1024")
    parser.add_argument("--looks", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    results = [measure(int(rows), chosen.looks) for rows in chosen.rows.split(",")]
    record("watch", {"results": results}, save=chosen.save)


if __name__ == "__main__":
    main()
