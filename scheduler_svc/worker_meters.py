"""What a scheduler counts by worker, which are told apart by their addresses, so many of them."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from opentelemetry.metrics import Meter

from scheduler_svc.load import WORKERS_TOLD_MAX
from service_kit.metrics import Number, seen

COUNTS: Final = {
    "budget_tokens": "that first steps of a worker's plans might have computed",
    "budget_tokens_used": "of those, the ones that plans gave to somebody",
    "prefix_hit_tokens": "found in a worker's prefix cache by those who joined it",
    "kv_blocks_swapped_out": "cached blocks copied to a worker's host memory, as others took them",
    "kv_blocks_swapped_in": "of those, the ones that were found there and copied back",
}


class WorkerMeters:
    """Workers that are gone make room for others; beyond that, some are in the sums of all only."""

    def __init__(self, meter: Meter, here: Callable[[], Collection[str]]) -> None:
        """`here`: addresses of the workers that are there now."""
        self._here = here
        self._counts: dict[str, Counter[str]] = {}
        self._passed_over: dict[str, Counter[tuple[str, str]]] = {}
        counter = meter.create_observable_counter
        for name, what in COUNTS.items():
            counter(f"kaiten.worker_{name}", seen(self._reader(name), "worker"), "", what)
        read = seen(self._reasons, "worker", "stage", "reason")
        what = "times that somebody was not scheduled on a worker"
        counter("kaiten.worker_passed_over", read, "", what)

    def planned(self, worker: str, **counts: int) -> None:
        """A plan was made for the worker at this address; each of `COUNTS`."""
        if self._is_told(worker):
            self._counts[worker].update(counts)

    def passed_over(self, worker: str, stage: str, reason: str) -> None:
        """Somebody was, by a stage of its planner."""
        if self._is_told(worker):
            self._passed_over[worker][stage, reason] += 1

    def _is_told(self, worker: str) -> bool:
        if worker in self._counts:
            return True
        if len(self._counts) >= WORKERS_TOLD_MAX:
            here = self._here()
            if (gone := next((one for one in self._counts if one not in here), None)) is None:
                return False
            del self._counts[gone], self._passed_over[gone]
        self._counts[worker], self._passed_over[worker] = Counter(), Counter()
        return True

    def _reader(self, name: str) -> Callable[[], Mapping[str, Number]]:
        return lambda: {worker: counts[name] for worker, counts in list(self._counts.items())}

    def _reasons(self) -> Mapping[tuple[str, str, str], Number]:
        """Copies: this is another thread than the one that counts."""
        return {
            (worker, *why): count
            for worker, counts in list(self._passed_over.items())
            for why, count in list(counts.items())
        }
