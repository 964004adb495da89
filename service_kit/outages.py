"""What is away: told when it begins, ever more seldom while it lasts, and when it is over."""

from typing import Final

import structlog

log = structlog.get_logger()

PAUSE_NS_FIRST: Final = 1_000_000_000
PAUSE_NS_MAX: Final = 60_000_000_000


class Outage:
    """Of one thing that is tried again and again: `event` is logged at the first failure and after
    pauses that double from a second to a minute, `over` at the next success. Times are ns of the
    caller's monotonic clock. What is not tried any more is told as `….given_up`.
    """

    def __init__(self, event: str, *, over: str) -> None:
        self._event, self._over = event, over
        # Failures in a row; none: it is not away.
        self._tries = 0
        self._began_ns = self._due_ns = self._pause_ns = 0

    def __repr__(self) -> str:
        return f"Outage({self._event}, tries={self._tries})"

    def failed(self, now_ns: int, **fields: object) -> None:
        """Another try failed; `fields` are those of the line, if there is one."""
        if not self._tries:
            self._began_ns = self._due_ns = now_ns
            self._pause_ns = PAUSE_NS_FIRST
        self._tries += 1
        if now_ns >= self._due_ns:
            log.warning(self._event, lasts_s=self._s(now_ns), tries=self._tries, **fields)
            self._due_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, PAUSE_NS_MAX)

    def ended(self, now_ns: int, **fields: object) -> None:
        """A try did not fail."""
        if self._tries:
            log.info(self._over, lasted_s=self._s(now_ns), tries=self._tries, **fields)
            self._tries = 0

    def given_up(self, now_ns: int) -> None:
        """There will be no other try."""
        if self._tries:
            event = f"{self._event.partition('.')[0]}.given_up"
            log.info(event, lasted_s=self._s(now_ns), tries=self._tries)
            self._tries = 0

    def _s(self, now_ns: int) -> float:
        return round((now_ns - self._began_ns) / 1e9, 1)
