"""How loaded a cell is, as one value: who is full, who waits, and for how long. Pure.

It is put together on the event loop, once a second while somebody reads metrics, so that whoever
reads them, on a thread of their own, sees one moment and never a core that changes.

**The forecast** is how long a request that came now would wait for its slot, were nobody added. A
worker that is full frees a slot whenever a sequence ends, which is every

    decode_us(rows) * output tokens / rows + prefill_us(prompt tokens)

by what its steps took of late (`core.cost`), with the output that requests had of late, and the
prompts of those who wait. Who comes now stands behind all who wait. What is not known yet (no step
of a worker was answered, no request has ended, or there is no worker) is not guessed: then it is
how long the longest has waited already.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from scheduler_svc.core.requests import Sequence, Tenant
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers import Worker

# Labels of metrics: the first so many; others are only in sums.
WORKERS_TOLD_MAX: Final = 256
TENANTS_TOLD_MAX: Final = 256


class WorkerLoad(NamedTuple):
    """Of one worker. `kv_tokens` may be more than blocks hold: sequences share some."""

    slots: int
    slots_used: int
    kv_places: int
    kv_places_held: int
    kv_tokens: int
    host_kv_blocks: int
    host_kv_blocks_used: int
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of a cell, at one moment."""

    queue_time_forecast_s: float = 0.0
    # Of the oldest record that the ledger has not acknowledged; 0: it has all.
    journal_lag_s: float = 0.0
    # Tokens of those who wait: to be computed, but for what is cached.
    queued_tokens: int = 0
    # By tenant; the largest, if there are too many.
    tenant_queued_tokens: Mapping[str, int] = field(default_factory=dict)
    tenant_running_tokens: Mapping[str, int] = field(default_factory=dict)
    # By address.
    workers: Mapping[str, WorkerLoad] = field(default_factory=dict)


NO_LOAD: Final = Load()


def look(
    core: Scheduler,
    *,
    silent_ns: Mapping[str, tuple[str, int]],
    output_tokens: float,
    journal_lag_ns: int,
    now_ns: int,
) -> Load:
    """The core as it is. `silent_ns`: by worker, its address and how long nothing came from it."""
    tenants = list(core.waiting.tenants.values())
    queued = {tenant.name: _queued_tokens(tenant) for tenant in tenants}
    return Load(
        queue_time_forecast_s=queue_time_s(core, output_tokens=output_tokens, now_ns=now_ns),
        journal_lag_s=journal_lag_ns / 1e9,
        queued_tokens=sum(queued.values()),
        tenant_queued_tokens=_largest(queued),
        tenant_running_tokens=_largest({t.name: t.tokens_running for t in tenants}),
        workers=dict(islice(_workers(core.workers, silent_ns), WORKERS_TOLD_MAX)),
    )


def queue_time_s(core: Scheduler, *, output_tokens: float, now_ns: int) -> float:
    """How long a request that came now, and is not flex, would wait for its slot."""
    ahead = [s for tenant in core.waiting.tenants.values() for s in _ahead(tenant)]
    workers = [worker for worker in core.workers.values() if not worker.is_draining]
    # Flex sequences give their slots to whoever is none.
    has_room = any(worker.is_open or (worker.flex and not worker.is_late) for worker in workers)
    if has_room and not ahead:
        return 0.0
    prompts = [len(sequence.tokens) for sequence in ahead]
    per_s = sum(_ends_per_s(w, _mean(prompts), output_tokens) for w in workers)
    if not per_s:
        oldest_ns = min((s.live.request.arrived_ns for s in ahead), default=now_ns)
        return max(0, now_ns - oldest_ns) / 1e9
    return (len(ahead) + (not has_room)) / per_s


def has_work(core: Scheduler) -> bool:
    """Somebody is on a worker, or waits and fits one that is here. It may be asked from another
    thread than the one that changes the core.
    """
    workers = list(core.workers.values())
    if not workers or any(worker.running or worker.retiring for worker in workers):
        return bool(workers)
    waiting = (sequence for t in list(core.waiting.tenants.values()) for _, sequence in [*t.queue])
    return any(worker.can_hold(sequence) for sequence in waiting for worker in workers)


def kv_share(workers: Collection[Worker]) -> float:
    """Of all blocks of all workers, those that live sequences hold: 0 to 1."""
    blocks = sum(worker.kv.block_count for worker in workers)
    return 1 - sum(worker.kv.free_count for worker in workers) / blocks if blocks else 0.0


def _ahead(tenant: Tenant) -> Iterator[Sequence]:
    """Who of them a newcomer waits for: not those over their own bound, nor those who give way."""
    if tenant.head is not None:
        yield from (sequence for _, sequence in tenant.queue if not sequence.is_flex)


def _ends_per_s(worker: Worker, prompt_tokens: float, output_tokens: float) -> float:
    """Sequences that end, and begin, each second while it is full; 0: nobody knows yet."""
    tokens = prompt_tokens + output_tokens
    blocks = max(1, -(-int(tokens) // worker.spec.block_size))
    more = min(len(worker.slots_free), worker.kv.free_count // blocks)
    rows = max(1, len(worker.running) + more)
    step_us = worker.cost.decode_us(rows)
    if not step_us or not output_tokens or worker.is_late:
        return 0.0
    prefill_us = worker.cost.prefill_us(int(prompt_tokens))
    return 1e6 / (step_us * max(1.0, output_tokens) / rows + prefill_us)


def _workers(
    workers: Mapping[str, Worker], silent_ns: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[str, WorkerLoad]]:
    for worker_id, worker in workers.items():
        address, silent = silent_ns.get(worker_id, (worker_id, 0))
        kv, size = worker.kv, worker.spec.block_size
        yield (
            address,
            WorkerLoad(
                slots=worker.spec.slots_max,
                slots_used=len(worker.running),
                kv_places=kv.block_count * size,
                kv_places_held=(kv.block_count - kv.free_count) * size,
                kv_tokens=sum(s.num_computed_tokens for s in worker.members),
                host_kv_blocks=worker.spec.host_block_count,
                host_kv_blocks_used=worker.kv.host_used,
                heartbeat_age_s=silent / 1e9,
            ),
        )


def _queued_tokens(tenant: Tenant) -> int:
    return sum(len(sequence.tokens) for _, sequence in tenant.queue)


def _mean(values: Iterable[int]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _largest(counts: Mapping[str, int]) -> Mapping[str, int]:
    if len(counts) <= TENANTS_TOLD_MAX:
        return counts
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:TENANTS_TOLD_MAX])
