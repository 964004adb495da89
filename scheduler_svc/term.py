"""One leader's term: the loop between the ledger, the core and the workers.

Everything that happens calls one short method here, which tells the core and wakes the turn. A turn
asks the core for every plan it wants to make and hands them to the links. Nothing between reading
and writing core state awaits, so there are no locks. What the core says goes to the pump, which
commits it to the ledger in order; gateways show clients only what is committed.
"""

import asyncio
from itertools import islice

import structlog

from ledger import InboxEntry, Leader, Ledger, Recovered, StoreLost
from protos.kaiten.v1 import common_pb2
from protos.kaiten.v1.common_pb2 import WorkerDescription
from protos.kaiten.v1.ledger_pb2 import (
    CancelRecord,
    CellRecord,
    FullTenant,
    SubmitRecord,
    WorkerJoinedInput,
    WorkerLostInput,
)
from protos.kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from scheduler_svc import wire
from scheduler_svc.accepted import Accepted, AcceptedRequests
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Event, ResultRejected
from scheduler_svc.journal import Journal
from scheduler_svc.links import WorkerLink
from scheduler_svc.meters import Meters
from scheduler_svc.pump import CommitPump
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.tracing import Tracing
from service_kit.clock import Clock
from service_kit.errors import OutOfOrder, Unavailable

log = structlog.get_logger()

INBOX_BLOCK_MS = 1_000
INBOX_COUNT = 256
RETRY_S = 0.2
TICK_S_MAX = 0.25
# Of the queue, as gateways are told with every renewal: 3 KB at most.
WAITING_TOLD_MAX = 1024
TENANTS_TOLD_MAX = 256


class Term:
    """Leads one cell until it is fenced, told to stop, or the store is lost."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        leader: Leader,
        settings: SchedulerSettings,
        clock: Clock,
        meters: Meters,
        tracing: Tracing | None = None,
    ) -> None:
        self.leader = leader
        self.links: dict[str, WorkerLink] = {}
        self.core = Scheduler(settings.core, POLICIES[settings.policy])
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._meters = meters
        self._tracing = tracing
        self._accepted = AcceptedRequests()
        self._pump = CommitPump(ledger, leader, clock, self._on_commit)
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        # Everything up to here is in the pieces that the next fold will take.
        self._fold_seq = leader.journal_seq
        self._turn_is_due = False
        # No plan was asked for in the last turn because too much is uncommitted.
        self._is_held_back = False
        self._is_stopping = False
        self._idle_since_ns = clock.monotonic_ns()
        # Whether nothing was live at the end of the last turn.
        self._is_idle = False

    def __repr__(self) -> str:
        return f"<Term epoch={self.leader.epoch} {self.core} {self._pump}>"

    # Life

    async def recover(self) -> None:
        """Take over every live request. Workers may register only afterwards."""
        self._clock_offset_ns = await self._ledger.now_ns() - self._clock.monotonic_ns()
        recovered = await self._ledger.recover(self.leader)
        self._journal = Journal(
            self._accepted, epoch=self.leader.epoch, journal_seq=recovered.journal_seq
        )
        for entry in recovered.entries:
            if isinstance(entry.record, SubmitRecord):
                self._resume(entry, entry.record, recovered)
            else:
                self._cancel(entry.record)
        self._cursor = recovered.cursor
        log.info("term.started", epoch=self.leader.epoch, resumed=self.core.live_count)

    async def run(self) -> None:
        """Lead. Raises OutOfOrder when somebody else leads, StoreLost, or cancels."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._pump.run(), name="pump")
            tasks.create_task(self._read_inbox(), name="inbox")
            tasks.create_task(self._renew(), name="renew")
            tasks.create_task(self._tick(), name="tick")
            if self._tracing is not None:
                tasks.create_task(self._tracing.run(), name="tracing")

    async def drain(self) -> None:
        """Plan nothing new, commit what is in flight, and let a standby take over at once."""
        self._is_stopping = True
        while any(worker.flights for worker in self.core.workers.values()):
            await self._clock.sleep(0.01)
        await self._pump.flushed()
        await self._ledger.resign(self.leader)

    @property
    def journal_seq(self) -> int:
        """The newest record the ledger has acknowledged."""
        return self._pump.committed_seq

    @property
    def commit_backlog(self) -> int:
        """Records that the ledger has not acknowledged yet."""
        return self._pump.backlog

    def now_ns(self) -> int:
        """The ledger's clock, carried on by our own monotonic one: no node's wall clock matters."""
        return self._clock.monotonic_ns() + self._clock_offset_ns

    # What happens

    def register(self, address: str, worker: WorkerDescription) -> None:
        """A worker announced itself. OutOfOrder when it serves something else than the cell."""
        known = self.links.get(worker.boot_id)
        if known is not None and known.address == address:
            known.heard_ns = self._clock.monotonic_ns()
            return
        self._refuse_stranger(worker)
        if known is not None:
            self.forget(worker.boot_id, "its address changed")
        leader = common_pb2.Leader(epoch=self.leader.epoch, nonce=self.leader.nonce)
        link = WorkerLink(address=address, worker=worker, leader=leader, owner=self)
        link.heard_ns = self._clock.monotonic_ns()
        self.links[link.worker_id] = link
        assert self._tasks is not None
        self._link_tasks[link.worker_id] = self._tasks.create_task(link.run())
        log.info("worker.registered", worker_id=link.worker_id, address=address)

    def _refuse_stranger(self, worker: WorkerDescription) -> None:
        for link in self.links.values():
            if link.worker.fingerprint != worker.fingerprint:
                raise OutOfOrder(
                    f"fingerprint {worker.fingerprint[:12]} of {worker.model!r} differs from "
                    f"{link.worker.fingerprint[:12]} of {link.worker.model!r}: the workers of a "
                    "cell need the same weights, config, dtype and KV dtype"
                )

    def heartbeat(self, boot_id: str, *, is_draining: bool) -> bool | None:
        """None: unknown, register again. Otherwise whether nothing of the worker is left."""
        link = self.links.get(boot_id)
        if link is None:
            return None
        link.heard_ns = self._clock.monotonic_ns()
        if not is_draining:
            return False
        link.is_draining = True
        if boot_id not in self.core.workers:
            return True
        if not self.core.workers[boot_id].is_draining:
            self._journal.worker_draining(boot_id, self.now_ns())
        is_drained = self.core.worker_draining(boot_id)
        self._wake()
        return is_drained

    def forget(self, worker_id: str, reason: str) -> None:
        """The worker is gone for good; if it comes back it registers again."""
        link = self.links.pop(worker_id)
        self._link_tasks.pop(worker_id).cancel()
        log.info("worker.forgotten", worker_id=worker_id, reason=reason)
        if worker_id in self.core.workers:
            self._lose(link, reason, is_crash=not link.is_draining)

    def link_opened(self, link: WorkerLink) -> None:
        now_ns = self.now_ns()
        joined = WorkerJoinedInput(worker_id=link.worker_id, worker=link.worker)
        self._journal.worker_joined(joined, now_ns)
        spec = wire.spec_from_proto(link.worker)
        self._publish(self.core.worker_joined(link.worker_id, spec, now_ns=now_ns))
        log.info("worker.joined", worker_id=link.worker_id, address=link.address)

    def link_closed(self, link: WorkerLink, reason: str, *, is_crash: bool) -> None:
        if link.worker_id in self.core.workers:
            self._lose(link, reason, is_crash=is_crash)

    def step_arrived(self, link: WorkerLink, result: StepMessage) -> None:
        now_ns = self.now_ns()
        try:
            if result.boot_id != link.worker_id:
                raise ResultRejected(f"boot_id {result.boot_id!r} is another worker's")
            wire.check_values(result)
            step = wire.step_from_proto(link.worker_id, result)
            committed = self.core.commit(step, now_ns=now_ns)
        except ResultRejected as error:
            log.error("step.rejected", worker_id=link.worker_id, reason=str(error))
            link.reject(str(error))
            return
        self._meters.stepped(len(committed.tokens), result.timings)
        self._meters.ended(committed.events)
        if self._tracing is not None:
            of = self._accepted.traceparent
            self._tracing.stepped(link.worker_id, result, committed, of, now_ns)
            self._tracing.ended(committed.events, of, now_ns)
        self._pump.put(self._journal.step(link.worker_id, result, committed, now_ns))
        self._wake()

    # The turn

    def _wake(self) -> None:
        """Take a turn soon; however often this is called, once."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _on_commit(self) -> None:
        """The ledger has acknowledged something; a turn has nothing new to find in most of it."""
        if self._is_held_back:
            self._wake()

    def _turn(self) -> None:
        self._turn_is_due = False
        now_ns = self.now_ns()
        self._expire(now_ns)
        self._is_held_back = self._pump.backlog >= self._settings.uncommitted_steps_max
        if not self._is_stopping:
            for link in list(self.links.values()):
                self._plan(link, now_ns)
        self._fold()
        was_idle, self._is_idle = self._is_idle, not self.core.live_count
        if self._is_idle:
            self._idle_since_ns = self._clock.monotonic_ns()
            if not was_idle:
                # Looks at every block: once, not with every tick.
                self.core.check()

    def _expire(self, now_ns: int) -> None:
        deadline_ns = self.core.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= now_ns:
            self._journal.expired(now_ns)
            self._publish(self.core.expire(now_ns=now_ns))

    def _plan(self, link: WorkerLink, now_ns: int) -> None:
        while link.is_open and self._pump.backlog < self._settings.uncommitted_steps_max:
            plan = self.core.plan(link.worker_id, now_ns=now_ns)
            if plan is None:
                return
            samplings = [self._accepted.sampling(join.serial) for join in plan.joins]
            leader = common_pb2.Leader(epoch=self.leader.epoch, nonce=self.leader.nonce)
            trace = self._tracing.planned(plan, now_ns) if self._tracing is not None else ""
            message = wire.plan_to_proto(plan, leader, samplings, trace)
            self._journal.planned(plan, message, now_ns)
            link.send(message)
            self._meters.planned(plan)

    def _fold(self) -> None:
        if self._journal.seq - self._fold_seq >= self._settings.fold_records:
            self._pump.put_fold(self._fold_seq, self._accepted.next_fold())
            self._fold_seq = self._journal.seq

    # Requests

    def _submit(self, entry: InboxEntry, record: SubmitRecord) -> None:
        """Take a new request in. Recovery may have seen the entry already."""
        if entry.serial in self._accepted:
            return
        now_ns = self.now_ns()
        self._accepted.add(Accepted(entry=entry, record=record))
        request = wire.request_from_proto(entry, record)
        self._meters.took_in(len(request.prompt), is_new=True)
        self._journal.submitted(request, now_ns)
        self._publish(self.core.submit(request, now_ns=now_ns))

    def _resume(self, entry: InboxEntry, record: SubmitRecord, recovered: Recovered) -> None:
        """Take a request in with whatever an earlier leader committed of it."""
        now_ns = self.now_ns()
        accepted = Accepted(entry=entry, record=record)
        self._accepted.add(accepted)
        outputs: list[tuple[int, ...] | None] = []
        for serial in range(entry.serial, entry.serial + record.n):
            output = recovered.tokens[serial]
            self._accepted.recovered(serial, output, recovered.folded_counts[serial])
            if serial in recovered.finished:
                accepted.ended_before[serial] = (output, recovered.finished[serial])
            outputs.append(None if serial in recovered.finished else tuple(output.token_ids))
        explained = recovered.explained.get(entry.serial, 1)
        request = wire.request_from_proto(entry, record, tuple(outputs), explained)
        self._meters.took_in(len(request.prompt), is_new=False)
        self._journal.submitted(request, now_ns)
        self._publish(self.core.submit(request, now_ns=now_ns))
        self._end_if_damaged(entry, record, recovered)

    def _end_if_damaged(
        self, entry: InboxEntry, record: SubmitRecord, recovered: Recovered
    ) -> None:
        """One request that cannot go on must not keep the others of its cell from it."""
        for serial in range(entry.serial, entry.serial + record.n):
            if (damage := recovered.damaged.get(serial)) is not None:
                log.error("request.damaged", serial=entry.serial, reason=damage)
                error = f"the ledger is damaged, this request cannot go on: {damage}"
                self._cancel(
                    CancelRecord(
                        id=record.id,
                        serial=entry.serial,
                        n=record.n,
                        reason=common_pb2.FINISH_REASON_ERROR,
                        error=error,
                    )
                )
                return

    def _cancel(self, record: CancelRecord) -> None:
        now_ns = self.now_ns()
        self._journal.cancelled(record, now_ns)
        cut = wire.cut_from_proto(record)
        self._publish(self.core.cancel(record.serial, now_ns=now_ns, **cut))

    def _publish(self, events: list[Event]) -> None:
        """Endings that no step brought."""
        now_ns = self.now_ns()
        self._meters.ended(events)
        if self._tracing is not None:
            self._tracing.ended(events, self._accepted.traceparent, now_ns)
        self._pump.put(self._journal.ended(events, now_ns))
        self._wake()

    def _lose(self, link: WorkerLink, reason: str, *, is_crash: bool) -> None:
        log.warning("worker.lost", worker_id=link.worker_id, reason=reason, is_crash=is_crash)
        self._meters.lost_worker(is_crash=is_crash)
        if self._tracing is not None:
            self._tracing.lost(link.worker_id)
        now_ns = self.now_ns()
        lost = WorkerLostInput(worker_id=link.worker_id, is_crash=is_crash, reason=reason)
        self._journal.worker_lost(lost, now_ns)
        events = self.core.worker_lost(
            link.worker_id, now_ns=now_ns, is_crash=is_crash, reason=reason
        )
        self._publish(events)

    # Tasks

    async def _read_inbox(self) -> None:
        while True:
            try:
                entries = await self._ledger.inbox_read(
                    self._cursor, block_ms=INBOX_BLOCK_MS, count=INBOX_COUNT
                )
            except StoreLost:
                raise
            except Unavailable:
                await self._clock.sleep(RETRY_S)
                continue
            for entry in entries:
                self._cursor = entry.entry_id
                if isinstance(entry.record, SubmitRecord):
                    self._submit(entry, entry.record)
                else:
                    self._cancel(entry.record)

    async def _renew(self) -> None:
        """Say that this leader lives, from the loop that does the work: a stuck loop does not."""
        while True:
            try:
                await self._ledger.renew(self.leader, self.cell())
            except StoreLost:
                raise
            except Unavailable as error:
                log.warning("lease.not_renewed", reason=str(error))
            await self._clock.sleep(self._settings.lease_ttl_s / 6)

    async def _tick(self) -> None:
        """Deadlines, and workers that went silent."""
        while True:
            deadline_ns = self.core.next_deadline_ns()
            wait_s = TICK_S_MAX
            if deadline_ns is not None:
                wait_s = min(wait_s, max(0.001, (deadline_ns - self.now_ns()) / 1e9))
            await self._clock.sleep(wait_s)
            silent_ns = self._clock.monotonic_ns() - self._settings.worker_timeout_ms * 1_000_000
            for link in [link for link in self.links.values() if link.heard_ns < silent_ns]:
                self.forget(link.worker_id, "no heartbeat")
            self._wake()

    def cell(self) -> CellRecord:
        """What gateways are told with every renewal."""
        open_links = [link for link in self.links.values() if link.is_open]
        record = CellRecord(
            workers_ready=len(open_links),
            waiting=len(self.core.waiting),
            running=self.core.running_count,
            stalled_ms=self.stalled_ms,
            waiting_serials=self._waiting_serials(),
            full_tenants=self._full_tenants(),
        )
        if self.links:
            record.model.CopyFrom(next(iter(self.links.values())).worker)
        return record

    def _waiting_serials(self) -> list[int]:
        """Who is next, for clients that ask: the head of the queue, each request once."""
        head = islice(self.core.waiting, WAITING_TOLD_MAX)
        return list(dict.fromkeys(sequence.life.request.serial for sequence in head))

    def _full_tenants(self) -> list[FullTenant]:
        """Who waits for nobody but itself."""
        full = (tenant for tenant in self.core.waiting.tenants.values() if tenant.is_full)
        return [wire.full_to_proto(tenant) for tenant in islice(full, TENANTS_TOLD_MAX)]

    @property
    def stalled_ms(self) -> int:
        """How long work has been runnable, on a worker that answers, without a commit."""
        if not self.core.live_count or not self.core.workers:
            return 0
        since_ns = max(self._idle_since_ns, self._pump.committed_ns)
        return max(0, (self._clock.monotonic_ns() - since_ns) // 1_000_000)
