"""Looks through the books of an idle core: at every block of every worker, so not often, and not
at once.
"""

from scheduler_svc.core.scheduler import Scheduler

CHECK_EVERY_NS = 60_000_000_000


class IdleCheck:
    """Once a minute at most, when a core has become idle, and one worker a turn."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._was_idle = False
        self._due_ns = 0
        # Whose books are to be looked through in the turns to come; None: the queue's.
        self._unchecked: list[str | None] = []

    def turn(self, now_ns: int) -> None:
        """AssertionError when the books do not balance."""
        was_idle, self._was_idle = self._was_idle, not self._core.live_count
        if not self._was_idle:
            return
        if not was_idle and now_ns >= self._due_ns:
            self._due_ns = now_ns + CHECK_EVERY_NS
            self._unchecked = [None, *self._core.workers]
        if self._unchecked:
            self._core.check(self._unchecked.pop())
