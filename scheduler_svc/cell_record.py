"""What gateways are told of a cell with every renewal of its lease."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from kaiten.v1.ledger_pb2 import CellRecord
from scheduler_svc.command_wire import handover_to_proto
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links import WorkerLink
from scheduler_svc.load import kv_share
from scheduler_svc.wire import full_to_proto

# Of the queue: 3 KB at most.
WAITING_TOLD_MAX = 1024
TENANTS_TOLD_MAX = 256


def describe_cell(
    core: Scheduler,
    links: Iterable[WorkerLink],
    *,
    stalled_ms: int,
    weights_digest: str,
    standby_addresses: Iterable[str] = (),
    queue_time_forecast_s: float = 0.0,
) -> CellRecord:
    """Workers, load, who is next, and which tenants wait for nobody but themselves."""
    links = list(links)
    head = islice(core.waiting, WAITING_TOLD_MAX)
    full = (tenant for tenant in core.waiting.tenants.values() if tenant.is_throttled)
    record = CellRecord(
        workers_ready=sum(link.is_ready for link in links),
        waiting=len(core.waiting),
        running=core.running_count,
        stalled_ms=stalled_ms,
        # Each request once, whoever of its choices waits.
        waiting_sequence_ids=dict.fromkeys(s.live.request.sequence_id for s in head),
        full_tenants=[full_to_proto(tenant) for tenant in islice(full, TENANTS_TOLD_MAX)],
        weights_digest=weights_digest,
        worker_addresses=[link.address for link in links],
        handover=handover_to_proto(core.handover()),
        standby_addresses=standby_addresses,
        problem=problem_of(core, links),
        queue_time_forecast_s=queue_time_forecast_s,
        kv_cache_usage=kv_share(core.workers.values()),
    )
    if links:
        record.model.CopyFrom(links[0].worker)
        # Gateways refuse only what no worker can do.
        told = {feature for link in links for feature in link.worker.capabilities.features}
        del record.model.capabilities.features[:]
        record.model.capabilities.features.extend(sorted(told))
    return record


def problem_of(core: Scheduler, links: Sequence[WorkerLink]) -> str:
    """What keeps a cell from getting on; empty: nothing that is known here."""
    if not links:
        return "none is registered"
    if not any(link.is_ready for link in links):
        return ", ".join(dict.fromkeys(link.problem for link in links))
    if core.is_store_behind:
        return "the store has not acknowledged what was decided"
    is_late = any(worker.is_late for worker in core.workers.values())
    return "a step of a worker is overdue" if is_late else ""


def expect_workers(record: CellRecord, addresses: Collection[str], before: CellRecord) -> None:
    """A new leader has yet to reach those at these addresses: what is accepted meanwhile waits for
    them, and a leader after it must know of them too. `before`: what the one before it said last.
    """
    if not addresses:
        return
    record.workers_expected = len(addresses)
    known = [one for one in addresses if one not in record.worker_addresses]
    record.worker_addresses.extend(known)
    if not record.HasField("model") and before.HasField("model"):
        record.model.CopyFrom(before.model)
