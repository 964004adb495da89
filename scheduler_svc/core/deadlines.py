"""When time is over for whom: for the requests themselves, and for those who wait for a worker."""

import heapq
from collections.abc import Iterator

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.prospects import first_token_ns, why_misfit
from scheduler_svc.core.requests import LiveRequest
from scheduler_svc.core.types import SequenceId


class Deadlines:
    """The earliest first. One of a request whose time goes on after all does no harm."""

    def __init__(self, cell: CellState) -> None:
        self._cell = cell
        self._heap: list[tuple[int, SequenceId]] = []

    def __len__(self) -> int:
        return len(self._heap)

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

    def await_fit(self, now_ns: int) -> None:
        """Whom none of the workers known can hold waits a while for one that can."""
        for live in self._cell.live.values():
            if live.misfit_ns is None and why_misfit(self._cell.workers.values(), live) is not None:
                live.misfit_ns = now_ns + self._cell.config.misfit_wait_ns
                self._add(live.misfit_ns, live)

    def worker_left(self, now_ns: int) -> None:
        """If it was the last, everybody waits for one no longer than they may."""
        self.await_fit(now_ns)
        for live in self._cell.live.values():
            self._await_worker(live, now_ns)

    def worker_came(self, now_ns: int) -> None:
        """Who fits none of those known waits a while, for a leader meets unlike workers in any
        order. Nobody waits for just any, and until when is forgotten: where workers come and go,
        the next one goes long before.
        """
        for live in self._cell.live.values():
            if why_misfit(self._cell.workers.values(), live) is None:
                live.misfit_ns = None
        self.await_fit(now_ns)
        over: set[tuple[int, SequenceId]] = set()
        for live in self._cell.live.values():
            if live.workerless_ns is not None:
                over.add((live.workerless_ns, live.request.sequence_id))
                live.workerless_ns = None
        if not over:
            return
        heap, self._heap = self._heap, []
        for entry in heap:
            # Once each: its time may be over in that very nanosecond for another reason.
            if entry in over:
                over.remove(entry)
            else:
                self._heap.append(entry)
        heapq.heapify(self._heap)

    def _await_worker(self, live: LiveRequest, now_ns: int) -> None:
        wait_ns = live.request.worker_wait_ns
        if self._cell.workers or wait_ns is None or live.workerless_ns is not None:
            return
        live.workerless_ns = now_ns + wait_ns
        self._add(live.workerless_ns, live)

    def _add(self, deadline_ns: int, live: LiveRequest) -> None:
        heapq.heappush(self._heap, (deadline_ns, live.request.sequence_id))
        # Most requests end long before: forget theirs, or the heap grows with the traffic.
        if len(self._heap) > 4 * len(self._cell.live):
            self._heap = [entry for entry in self._heap if entry[1] in self._cell.live]
            heapq.heapify(self._heap)
