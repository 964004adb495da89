"""What a worker counts. docs/metrics.md says what each metric means.

All of it is plain numbers that the stream's side changes once per step, on the event loop's thread:
the compute thread knows nothing of it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.metrics import Meter

from gpu_worker.batch.plans import StepResult
from service_kit.metrics import Number, seen

COUNTS: Final = {
    "steps": ("", "steps computed"),
    "tokens": ("", "tokens computed: prompt chunks and decodes"),
    "draft_tokens": ("", "draft tokens, with --num-speculative-tokens"),
    "accepted_tokens": ("", "of the draft tokens, those that were right"),
    "row_errors": ("", "rows that could not be computed"),
    "forward_time": ("s", "time in the model's forward pass"),
    "sample_time": ("s", "time choosing tokens"),
    "wait_time": ("s", "time a step's inputs were complete and it had not begun"),
}

# The share of time that is told is of the last so many seconds.
BUSY_S: Final = 10
_NS_PER_S: Final = 1_000_000_000


class BusyShare:
    """Which part of the last whole seconds was spent in steps."""

    def __init__(self) -> None:
        # By second, of those in which a step ended: the newest, and as many before it as count.
        self._busy_us: deque[tuple[int, int]] = deque(maxlen=BUSY_S + 1)

    def add(self, busy_us: int, now_ns: int) -> None:
        """So long it was busy, until now."""
        second = now_ns // _NS_PER_S
        if self._busy_us and self._busy_us[-1][0] == second:
            busy_us += self._busy_us.pop()[1]
        self._busy_us.append((second, busy_us))

    def share(self, now_ns: int) -> float:
        """From 0 to 1."""
        second = now_ns // _NS_PER_S
        busy_us = sum(us for at, us in list(self._busy_us) if second - BUSY_S <= at < second)
        return min(1.0, busy_us / (BUSY_S * 1_000_000))


class Meters:
    """Of one worker process."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._counts = Counter[str]()
        self._rows = 0
        self._busy = BusyShare()
        for name, (unit, what) in COUNTS.items():
            scale = 1e-6 if unit else 1
            read = seen(self._reader(name, scale))
            meter.create_observable_counter(f"kaiten.worker.{name}", read, unit, what)
        self.gauge("rows", lambda: self._rows, "rows of the newest step")
        busy = "share of the last 10 seconds in which steps were computed, 0 to 1"
        self.gauge("device_busy", lambda: self._busy.share(time.monotonic_ns()), busy)

    def gauge(
        self,
        name: str,
        read: Callable[[], Number | Mapping[str, Number]],
        what: str,
        unit: str = "",
        *labels: str,
    ) -> None:
        """One more number to look at, or numbers by label; `read` is called on another thread."""
        read_all = seen(read, *labels)
        self._meter.create_observable_gauge(f"kaiten.worker.{name}", read_all, unit, what)

    def stepped(self, result: StepResult) -> None:
        """A step was computed."""
        counts, timings = self._counts, result.timings
        counts["steps"] += 1
        counts["tokens"] += timings.tokens_computed
        counts["draft_tokens"] += timings.drafted
        counts["accepted_tokens"] += len(given := result.outcome.slots) - len(set(given))
        counts["row_errors"] += len(result.outcome.errors)
        counts["forward_time"] += timings.forward_us
        counts["sample_time"] += timings.sample_us
        counts["wait_time"] += timings.wait_us
        self._rows = timings.rows
        self._busy.add(timings.forward_us + timings.sample_us, time.monotonic_ns())

    def _reader(self, name: str, scale: float) -> Callable[[], Number]:
        return lambda: self._counts[name] * scale
