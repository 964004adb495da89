"""What watching costs: a look at the core, putting together what has changed, and reading that.

    python -m benchmarks.core.bench_watch [--rows 16,256,1024] [--load crowded] [--save]

CPU time, of a core alone under a load of `bench_scheduler`, with the collector of a service.
`look_ms` is on the event loop, where a step may wait for it; `changes_ms` is in a thread, between
two looks eight steps apart, with those steps, and `snapshot_ms` for who begins to watch.
`event_ms` is a gateway's: what it reads once and writes once for all who watch at `/v1/watch`.
`one_by_one_ms` is what it takes to tell who knows no columns, and `one_by_one_event_ms` to read
that. `share` is of the loop, at four looks a second: a look takes one twentieth at most, so larger
cells are looked at less often.
"""

import argparse
import gc
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time_ns
from typing import TypeVar

from benchmarks.core.bench_scheduler import Bench
from benchmarks.recording import record
from gateway.cell.operators import Told
from gateway.openai.operators.watch import told as event_of
from scheduler_svc.core.commands import Configured
from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.types import StepResult
from scheduler_svc.live_steps import LiveSteps, flight_of
from scheduler_svc.live_view import Moment, View, look
from scheduler_svc.live_view_wire import changes_to_proto
from scheduler_svc.watching import INTERVAL_MS
from service_kit.lifecycle import YOUNG_OBJECTS

STEPS_BETWEEN = 8
Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What it gives, and the milliseconds it took."""
    began_ns = thread_time_ns()
    result = work()
    return result, (thread_time_ns() - began_ns) / 1e6


class Watched(Bench):
    """A core whose steps are kept for those who watch."""

    def __init__(self, load: str, rows: int) -> None:
        super().__init__(load, rows, STEPS_BETWEEN)
        self.steps_seen, self._looks = LiveSteps(), 0
        self._configured = Configured(config=self.scheduler.config, policy="fcfs")
        self.run()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])

    def look(self, before: View | None) -> View:
        self._looks += 1
        moment = Moment(1, self._looks, 1, self._looks)
        return look(self.scheduler, moment, self._configured, {}, {}, before)

    def planned(self, plan: Plan) -> None:
        self.steps_seen.planned(self.scheduler.workers[plan.worker_id], plan, (), is_seen=True)

    def stepped(self, result: StepResult) -> None:
        flight = flight_of(self.scheduler.workers["w"], result.plan_id)
        assert flight is not None
        self.steps_seen.stepped(flight, result, 0)


def measure(load: str, rows: int, looks: int) -> dict[str, object]:
    bench, found = Watched(load, rows), defaultdict[str, list[float]](list)
    before, told = bench.look(None), bench.steps_seen.count

    def spent(name: str, work: Callable[[], Result]) -> Result:
        result, ms = timed(work)
        found[name].append(ms)
        return result

    for _ in range(looks):
        for _ in range(STEPS_BETWEEN):
            bench.step()
        now = spent("look_ms", partial(bench.look, before))
        steps, told = bench.steps_seen.between(told, bench.steps_seen.count), bench.steps_seen.count
        tell = partial(changes_to_proto, before, now, steps, 0)
        changes = spent("changes_ms", lambda: tell().SerializeToString())  # noqa: B023
        spent("event_ms", lambda: event_of(Told(changes)))  # noqa: B023
        plain = spent("one_by_one_ms", lambda: tell(takes_rows=False).SerializeToString())  # noqa: B023
        spent("one_by_one_event_ms", lambda: event_of(Told(plain)))  # noqa: B023
        snapshot = spent("snapshot_ms", lambda: changes_to_proto(None, now).SerializeToString())  # noqa: B023
        before = now
    return {
        "rows": rows,
        **{name: round(median(each), 3) for name, each in found.items()},
        "changes_bytes": len(changes),
        "one_by_one_bytes": len(plain),
        "snapshot_bytes": len(snapshot),
        "share": round(min(0.05, median(found["look_ms"]) / INTERVAL_MS), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="16,256,1024")
    parser.add_argument("--looks", type=int, default=20)
    parser.add_argument("--load", default="crowded", help="crowded, steady or mixed")
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    results = [measure(chosen.load, int(rows), chosen.looks) for rows in chosen.rows.split(",")]
    record("watch", {"load": chosen.load, "results": results}, save=chosen.save)


if __name__ == "__main__":
    main()
