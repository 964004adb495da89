"""What a worker counts. docs/operating.md says what each metric means.

All of it is plain numbers that the stream's side changes once per step, on the event loop's thread:
the compute thread knows nothing of it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from opentelemetry.metrics import Meter

from gpu_worker.batch.plans import StepResult
from service_kit.metrics import Number, seen

COUNTS: Final = {
    "steps": ("", "steps computed"),
    "tokens": ("", "tokens computed: prompt chunks and decodes"),
    "row_errors": ("", "rows that could not be computed"),
    "forward_time": ("s", "time in the model's forward pass"),
    "sample_time": ("s", "time choosing tokens"),
    "wait_time": ("s", "time a step's inputs were complete and it had not begun"),
}


class Meters:
    """Of one worker process."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._counts = Counter[str]()
        self._rows = 0
        for name, (unit, what) in COUNTS.items():
            scale = 1e-6 if unit else 1
            read = seen(self._reader(name, scale))
            meter.create_observable_counter(f"kaiten.worker.{name}", read, unit, what)
        self.gauge("rows", lambda: self._rows, "rows of the newest step")

    def gauge(self, name: str, read: Callable[[], Number], what: str) -> None:
        """One more number to look at; `read` is called on another thread."""
        self._meter.create_observable_gauge(f"kaiten.worker.{name}", seen(read), "", what)

    def stepped(self, result: StepResult) -> None:
        """A step was computed."""
        counts, timings = self._counts, result.timings
        counts["steps"] += 1
        counts["tokens"] += timings.tokens_computed
        counts["row_errors"] += len(result.outcome.errors)
        counts["forward_time"] += timings.forward_us
        counts["sample_time"] += timings.sample_us
        counts["wait_time"] += timings.wait_us
        self._rows = timings.rows

    def _reader(self, name: str, scale: float) -> Callable[[], Number]:
        return lambda: self._counts[name] * scale
