"""Who waits for a seat, in the policy's order."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import itemgetter

from scheduler_svc.core.sequence import Sequence

Entry = tuple[tuple[int, ...], Sequence]
_key = itemgetter(0)


class WaitingQueue:
    """A sorted list.

    The order is a key function, its last part the serial, so that no two keys are equal.
    """

    def __init__(self, order: Callable[[Sequence], tuple[int, ...]]) -> None:
        self._order = order
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)}>"

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its key says."""
        insort(self._entries, (self._order(sequence), sequence), key=_key)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; False when it was not waiting."""
        index = bisect_left(self._entries, self._order(sequence), key=_key)
        if index < len(self._entries) and self._entries[index][1] is sequence:
            del self._entries[index]
            return True
        return False
