"""Where a live request stands in its cell's queue, and what it waits for. Pure."""

from dataclasses import dataclass
from typing import Final

from kaiten.v1.ledger_pb2 import CellRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """Where a live request stands. `position` is None once it runs."""

    position: int | None = None
    reason: str = ""


NOWHERE: Final = QueuePosition()


def queue_position_of(record: CellRecord | None, sequence_id: int, tenant: str) -> QueuePosition:
    """As of the leader's last word; None: it has not said any."""
    if record is None or sequence_id not in record.waiting_sequence_ids:
        return NOWHERE
    position = list(record.waiting_sequence_ids).index(sequence_id) + 1
    return QueuePosition(position=position, reason=_reason(record, position, tenant))


def _reason(record: CellRecord, position: int, tenant: str) -> str:
    if not record.workers_ready:
        return because("no worker is ready", record.problem)
    for full in record.full_tenants:
        if full.tenant == tenant:
            return (
                f"tenant {tenant} has {full.tokens_running} of {full.tokens_max} running tokens, "
                f"its next request needs {full.tokens_next}"
            )
    before = position - 1
    first = "1 request goes" if before == 1 else f"{before} requests go"
    return f"{first} first; {record.running} run now"


def because(problem: str, why: str) -> str:
    """A problem with its cause, as far as it is known."""
    return f"{problem}: {why}" if why else problem
