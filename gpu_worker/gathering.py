"""Which results may wait a moment, so that several go out in one message. Pure.

Every message costs the worker, the scheduler, the store, the gateway and the client about as much
for one token as for four. Where they share their cores with the device, that is tokens per second.
"""

from typing import Final

from gpu_worker.plans import StepResult

# Where nobody says otherwise, on a CPU: 20 messages a second to each of a crowd, and a token at a
# time to the few, who are read by somebody.
CROWD_GATHER_S: Final = 0.05
CROWD_ROWS: Final = 8


class Gathering:
    """Holds a lease's plain results back, never longer than `gather_s` after the last report.

    A result that somebody waits for takes everything before it along at once: the last of a lease,
    one in which a row has ended or failed, and one with a prompt in it, whose stream may begin.
    """

    def __init__(self, gather_s: float = 0.0, rows_min: int = 1) -> None:
        """Steps of fewer than `rows_min` rows are reported as they end."""
        self._gather_s = gather_s
        self._rows_min = rows_min
        self._held: list[StepResult] = []
        self._reported_s = self._added_s = float("-inf")

    def add(self, result: StepResult, now_s: float) -> list[StepResult]:
        """What is to be reported now, in order; nothing while the next result will be in time."""
        step_s, self._added_s = now_s - self._added_s, now_s
        self._held.append(result)
        is_crowd = result.timings.rows >= self._rows_min
        is_in_time = now_s + step_s <= self._reported_s + self._gather_s
        if is_crowd and is_in_time and not _is_awaited(result):
            return []
        due, self._held = self._held, []
        self._reported_s = now_s
        return due


def gathering_for(gather_ms: float | None, *, shares_cores: bool) -> Gathering:
    """As `--gather-ms` says; without it a crowd's results are gathered where the device computes on
    the cores that the services need.
    """
    if gather_ms is not None:
        return Gathering(gather_ms / 1000)
    return Gathering(CROWD_GATHER_S, CROWD_ROWS) if shares_cores else Gathering()


def _is_awaited(result: StepResult) -> bool:
    outcome, timings = result.outcome, result.timings
    has_ends = bool(outcome.finished or outcome.errors)
    return result.is_last or has_ends or timings.tokens_computed > timings.rows
