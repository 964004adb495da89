"""When time is over for whom: for the requests themselves, and for those who wait for a worker."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.prospects import first_token_ns, why_misfit
from scheduler_svc.core.requests import LiveRequest
from scheduler_svc.core.types import SequenceId
from scheduler_svc.core.workers import Worker


class Deadlines:
    """The earliest first. One of a request whose time goes on after all does no harm."""

    def __init__(self, cell: CellState) -> None:
        self._cell = cell
        self._heap: list[tuple[int, SequenceId]] = []
        # Since those of requests that are over were forgotten.
        self._num_added = 0

    def next_ns(self) -> int | None:
        """None: nobody's time is ever over."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int) -> Iterator[LiveRequest]:
        """Whose time may be over. They are forgotten here."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, sequence_id = heapq.heappop(self._heap)
            if (live := self._cell.live.get(sequence_id)) is not None:
                yield live

    def submitted(self, live: LiveRequest, now_ns: int) -> None:
        """It has a deadline, before which its prompt takes some time; and a worker may be there."""
        deadline_ns = live.request.deadline_ns
        if deadline_ns is not None:
            self._add(deadline_ns, live)
            if least_ns := first_token_ns(self._cell.workers.values(), live):
                self._add(deadline_ns - least_ns, live)
        self._await_worker(live, now_ns)

    def await_fit(self, lives: Iterable[LiveRequest], now_ns: int) -> None:
        """Whom of these none of the workers known can hold waits a while for one that can."""
        misfits, workers = self._cell.misfits, self._cell.workers.values()
        for live in lives:
            sequence_id = live.request.sequence_id
            if sequence_id not in misfits and why_misfit(workers, live) is not None:
                misfits[sequence_id] = now_ns + self._cell.config.misfit_wait_ns
                self._add(misfits[sequence_id], live)

    def worker_left(self, worker: Worker, now_ns: int) -> None:
        """Nobody waits for one like it where another can hold all that it could. If it was the
        last, everybody waits for one no longer than they may.
        """
        places_max, features = worker.kv.places_max, worker.spec.features
        rest = self._cell.workers.values()
        if any(w.kv.places_max >= places_max and w.spec.features >= features for w in rest):
            return
        self.await_fit(self._cell.live.values(), now_ns)
        for live in self._cell.live.values():
            self._await_worker(live, now_ns)

    def worker_came(self, now_ns: int) -> None:
        """Nobody waits for just any. Who fits none of those known waits a while, for a leader meets
        unlike workers in any order; all do that fit none before.
        """
        if len(self._cell.workers) == 1:
            self._forget(self._cell.workerless, [*self._cell.workerless])
            self.await_fit(self._cell.live.values(), now_ns)
        self.end_fit_waits()

    def end_fit_waits(self) -> None:
        """Of those whom a worker can hold by now."""
        live, misfits, workers = self._cell.live, self._cell.misfits, self._cell.workers.values()
        self._forget(misfits, [one for one in misfits if why_misfit(workers, live[one]) is None])

    def _await_worker(self, live: LiveRequest, now_ns: int) -> None:
        wait_ns, sequence_id = live.request.worker_wait_ns, live.request.sequence_id
        if not (self._cell.workers or wait_ns is None or sequence_id in self._cell.workerless):
            self._cell.workerless[sequence_id] = now_ns + wait_ns
            self._add(now_ns + wait_ns, live)

    def _add(self, deadline_ns: int, live: LiveRequest) -> None:
        heapq.heappush(self._heap, (deadline_ns, live.request.sequence_id))
        self._num_added += 1
        # Most requests end long before: forget theirs, or the heap grows with the traffic. A look
        # at all of it is worth as many that came since.
        if len(self._heap) > 4 * len(self._cell.live) and 2 * self._num_added > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1] in self._cell.live]
            heapq.heapify(self._heap)
            self._num_added = 0

    def _forget(self, waits: dict[SequenceId, int], over: list[SequenceId]) -> None:
        """Where workers come and go, the next one goes long before: waits would heap up."""
        if over:
            # Once each: its time may be over in that very nanosecond for another reason.
            left = Counter(self._heap)
            left.subtract((waits.pop(sequence_id), sequence_id) for sequence_id in over)
            self._heap = sorted(left.elements())
