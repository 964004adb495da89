"""Find the first stop string in growing text, holding back nothing but a possible beginning of one.

Pure. The text that is certain to be shown is returned at once; the longest suffix that is a proper
prefix of some stop string waits. Nothing of a stop string, nor anything after it, is ever returned,
unless the stop string itself is asked for.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """What one piece of text led to: `shown` is certain; `is_stopped` means a stop is complete."""

    shown: str
    is_stopped: bool


class StopMatcher:
    """One output's matcher. Feed token by token: the token that completes a stop is the last."""

    __slots__ = ("_include_stop", "_starts", "_stops", "held")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._include_stop = include_stop
        self._stops = tuple(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self.held = ""

    def feed(self, text: str) -> Match:
        """Add text. Of several stops in it the one that begins first wins."""
        held = self.held + text
        found = [(begin, len(stop)) for stop in self._stops if (begin := held.find(stop)) >= 0]
        if found:
            self.held = ""
            begin, length = min(found)
            return Match(held[: begin + length if self._include_stop else begin], True)
        keep_from = self._hold_from(held)
        self.held = held[keep_from:]
        return Match(held[:keep_from], False)

    def flush(self) -> str:
        """The output ended without a stop: what was held back is text after all."""
        held, self.held = self.held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """Where the longest suffix that could still become a stop begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for begin in range(max(0, len(text) - longest), len(text)):
            if text[begin] in self._starts and self._could_begin(text[begin:]):
                return begin
        return len(text)

    def _could_begin(self, suffix: str) -> bool:
        return any(stop.startswith(suffix) for stop in self._stops)
