"""How long records stay in the journal after they are folded. Pure.

A follower that is away for less than this goes on where it was; one that is away for longer has to
read what it missed from the folded output (`ledger/shared_history.py`).
"""

from collections import deque
from typing import NamedTuple


class _Batch(NamedTuple):
    """Records between two folds: the last one, when it was put, and the bytes of all."""

    seq: int
    put_ns: int
    size: int


class JournalWindow:
    """Told of every record that is put, and asked at every fold."""

    def __init__(self, *, keep_ns: int, bytes_max: int, first_seq: int, now_ns: int) -> None:
        """What is there when a leadership begins is as old as it."""
        self._keep_ns, self._bytes_max = keep_ns, bytes_max
        self._batches = deque([_Batch(first_seq, now_ns, 0)])
        self._seq, self._size, self._total = first_seq, 0, 0
        self._trim_seq = 0

    def put(self, seq: int, size: int) -> None:
        """The next record."""
        self._seq = seq
        self._size += size
        self._total += size

    def trim_seq(self, through_seq: int, now_ns: int) -> int:
        """Records up to this one, of those folded through `through_seq`, need not be kept."""
        self._batches.append(_Batch(self._seq, now_ns, self._size))
        self._size = 0
        while self._batches and self._batches[0].seq <= through_seq:
            is_old = now_ns - self._batches[0].put_ns >= self._keep_ns
            if not is_old and self._total <= self._bytes_max:
                break
            batch = self._batches.popleft()
            self._total -= batch.size
            self._trim_seq = batch.seq
        return self._trim_seq
