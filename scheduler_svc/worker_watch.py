"""What to think of workers from which nothing comes. Pure: time is told, conclusions are given.

    owes a step   longer than steps of late take           late: it is given nothing (`WorkerLate`)
                  so much longer that it must be hung      its sequences go on elsewhere
    says nothing  longer than the operator gives it        its process is gone
    has no stream and says that it lives                   only the connection broke; of one that
                                                           hung, it hangs still

Only what we could have heard is silence: a pause of ours is nobody's.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

from scheduler_svc.core.workers import Worker
from scheduler_svc.links import WorkerLink


class Finding(Enum):
    """What became of a worker, for all we know."""

    LATE = "a step is overdue"
    HUNG = "a step does not end"
    SILENT = "no heartbeat"
    APART = "it lives, without a stream"


def look_at(
    links: Iterable[WorkerLink], workers: Mapping[str, Worker], *, passed_ns: int, timeout_ns: int
) -> Iterator[tuple[WorkerLink, Finding]]:
    """So much time has passed, and nothing was heard in it."""
    for link in links:
        worker = workers.get(link.worker_id)
        link.pass_time(passed_ns, owes_a_step=worker is not None and bool(worker.flights))
        if worker is not None and link.is_overdue and not worker.is_late:
            yield link, Finding.LATE
        if link.silent_ns > timeout_ns:
            # Whatever else it is: with its process its connection is gone too.
            yield link, Finding.SILENT
        elif worker is not None and link.waited_ns > link.hung_ns(timeout_ns):
            yield link, Finding.HUNG
        elif link.broken_ns > 2 * timeout_ns:
            # Had it died, it would be forgotten by now.
            yield link, Finding.APART
