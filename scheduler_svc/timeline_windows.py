"""Times in which nothing could be planned for some, and why. Pure."""

from collections import OrderedDict, deque
from typing import Final, NamedTuple

# Of the store, of a worker, of a tenant.
WINDOWS_MAX: Final = 512


class Window(NamedTuple):
    """A time in which nothing could be planned for those whom it concerns."""

    start_ns: int
    end_ns: int
    why: str


class Windows:
    """One after the other; the last may be open."""

    def __init__(self) -> None:
        self._closed: deque[Window] = deque(maxlen=WINDOWS_MAX)
        self._open: tuple[int, str] | None = None

    @property
    def is_open(self) -> bool:
        """It is so by now."""
        return self._open is not None

    @property
    def since_ns(self) -> int:
        """Since when it is so; 0: it is not."""
        return self._open[0] if self._open is not None else 0

    @property
    def why(self) -> str:
        """It is so by now; empty: it is not."""
        return self._open[1] if self._open is not None else ""

    def begin(self, lost_ns: int, since_ns: int, why: str) -> None:
        """It is so by now (0: it is not), and of the time behind `lost_ns` nothing is known."""
        self.set(lost_ns, "")
        if since_ns:
            self.set(max(lost_ns, since_ns), why)

    def set(self, now_ns: int, why: str) -> None:
        """From here on it is so, for this reason; empty: it is not."""
        if self._open is not None:
            start_ns, before = self._open
            if before == why:
                return
            self.add(Window(start_ns, now_ns, before))
        self._open = (now_ns, why) if why else None

    def add(self, window: Window) -> None:
        """One that has ended. What it has in common with the one before is that one's."""
        start_ns = max(window.start_ns, self._closed[-1].end_ns if self._closed else 0)
        if start_ns < window.end_ns:
            self._closed.append(window._replace(start_ns=start_ns))

    def until(self, now_ns: int) -> list[Window]:
        """In order, none of them in another."""
        found = [*self._closed]
        if self._open is not None and self._open[0] < now_ns:
            found.append(Window(self._open[0], now_ns, self._open[1]))
        return found


def windows_of(known: OrderedDict[str, Windows], name: str, most: int) -> Windows:
    """Those of this name. Where there are too many, the oldest are forgotten that are over: of who
    is late, or throttled, by now it will be told when that ends.
    """
    if name not in known:
        over = [each for each, windows in known.items() if not windows.is_open]
        for each in over[: max(0, len(known) + 1 - most)]:
            del known[each]
        known[name] = Windows()
    return known[name]
