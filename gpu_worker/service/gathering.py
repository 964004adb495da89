"""Which results may wait a moment, so that several go out in one message. Pure.

Every message costs the worker, the scheduler, the store, the gateway and the client about as much
for one token as for four. Where they share their cores with the device, that is tokens per second.
"""

from gpu_worker.batch.plans import StepResult


class Gathering:
    """Holds a lease's plain results while the next is due within `gather_s` of the last report.

    A result that somebody waits for takes everything before it along at once: the last of a lease,
    one in which a row has ended or failed, and one with a prompt in it, whose stream may begin.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._held: list[StepResult] = []
        self._reported_s = self._added_s = float("-inf")

    def add(self, result: StepResult, now_s: float) -> list[StepResult]:
        """What is to be reported now, in order; nothing while the next result will be in time."""
        step_s, self._added_s = now_s - self._added_s, now_s
        self._held.append(result)
        if not _is_awaited(result) and now_s + step_s <= self._reported_s + self._gather_s:
            return []
        due, self._held = self._held, []
        self._reported_s = now_s
        return due


def _is_awaited(result: StepResult) -> bool:
    outcome, timings = result.outcome, result.timings
    has_ends = bool(outcome.finished or outcome.errors)
    return result.is_last or has_ends or timings.tokens_computed - timings.drafted > timings.rows
