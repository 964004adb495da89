"""One leader's session: the loop between the ledger, the core and the workers.

Everything that happens calls one short method here, which tells the core and asks for a turn. A
turn asks the core for every plan it wants to make and hands them to the links. Nothing between
reading and writing core state awaits, so there are no locks. What the core says goes to the commit
queue, and from there to the ledger in order; gateways show clients only what is committed.

An error of our own, wherever it happens, ends the leadership: the core may be half changed. The
lease is renewed only behind a turn, so a leader that decides nothing any more is replaced.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from ledger import InboxEntry, Leader, Ledger, Recovered, StoreLost
from protos.kaiten.v1 import common_pb2
from protos.kaiten.v1.common_pb2 import WorkerDescription
from protos.kaiten.v1.ledger_pb2 import CellRecord, SubmitRecord
from protos.kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from scheduler_svc import wire
from scheduler_svc.archiving import Archive
from scheduler_svc.cell_record import describe_cell
from scheduler_svc.command_wire import cancel_from_proto
from scheduler_svc.commit_queue import CommitQueue
from scheduler_svc.core.commands import (
    Cancel,
    Command,
    Expire,
    MakePlan,
    StepDone,
    Submit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLate,
    WorkerLost,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason, ResultRejected
from scheduler_svc.idle_check import IdleCheck
from scheduler_svc.inbox import entries_behind
from scheduler_svc.journal import Journal
from scheduler_svc.links import WorkerLink
from scheduler_svc.membership import refuse_change, refuse_stranger
from scheduler_svc.meters import Meters
from scheduler_svc.request_book import BookedRequest, RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.tracing import Tracing
from scheduler_svc.worker_watch import Finding, look_at
from service_kit.clock import Clock
from service_kit.errors import OutOfOrder, Unavailable

log = structlog.get_logger()

RETRY_S = 0.2
TICK_S_MAX = 0.25
# A tick that comes later than this was held up by us, and so was whatever the workers said.
TICK_NS_COUNTED_MAX = 500_000_000


class LeaderSession:
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
        archive: Archive | None = None,
    ) -> None:
        self.leader, self.settings = leader, settings
        self.links: dict[str, WorkerLink] = {}
        self.core = Scheduler()
        self._leader = common_pb2.Leader(epoch=leader.epoch, nonce=leader.nonce)
        self._ledger, self._tracing = ledger, tracing
        self._clock, self._meters = clock, meters
        self._requests = RequestBook(archive)
        self._commits = CommitQueue(ledger, leader, settings, clock, self._on_commit, archive)
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        # Everything up to here is in the pieces that the next fold will take.
        self._fold_seq = leader.journal_seq
        self._turn_asked = asyncio.Event()
        self._turn_taken = asyncio.Event()
        # Of our own, in a call that nobody but its caller would hear of.
        self._error: Exception | None = None
        # Of the workers for which the live requests were accepted; empty: not known. And the same
        # as the ledger has it.
        self._weights_digest = self._told_digest = ""
        self._renewing = asyncio.Lock()
        # Workers that may need a plan, as the core said.
        self._concerned: dict[str, None] = {}
        # Some were not asked in the last turn because too much is uncommitted.
        self._is_held_back = self._is_stopping = False
        self._idle_since_ns = clock.monotonic_ns()
        self._idle_check = IdleCheck(self.core)

    def __repr__(self) -> str:
        return f"<LeaderSession epoch={self.leader.epoch} {self.core} {self._commits}>"

    # Life

    async def recover(self) -> None:
        """Take over every live request. Workers may register only afterwards."""
        self._clock_offset_ns = await self._ledger.now_ns() - self._clock.monotonic_ns()
        recovered = await self._ledger.recover(self.leader)
        if (before := (await self._ledger.cell()).record) is not None:
            self._weights_digest = self._told_digest = before.weights_digest
        self._journal = Journal(
            self._requests, epoch=self.leader.epoch, journal_seq=recovered.journal_seq
        )
        self._tell(self.settings.configured)
        for entry in recovered.entries:
            if isinstance(entry.record, SubmitRecord):
                self._resume(entry, entry.record, recovered)
            else:
                self._tell(cancel_from_proto(entry.record))
        self._cursor = recovered.cursor
        log.info("leadership.started", epoch=self.leader.epoch, resumed=self.core.live_count)

    async def run(self) -> None:
        """Lead. Raises OutOfOrder when somebody else leads, StoreLost, or cancels."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._take_turns(), name="turns")
            tasks.create_task(self._commits.run(), name="commits")
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
        await self._commits.flushed()
        await self._ledger.resign(self.leader)

    @property
    def journal_seq(self) -> int:
        """The newest record the ledger has acknowledged."""
        return self._commits.committed_seq

    @property
    def commit_backlog(self) -> int:
        """Records that the ledger has not acknowledged yet."""
        return self._commits.backlog

    def now_ns(self) -> int:
        """The ledger's clock, carried on by our own monotonic one: no node's wall clock matters."""
        return self._clock.monotonic_ns() + self._clock_offset_ns

    # What happens

    def configure(self, settings: SchedulerSettings) -> None:
        """Decide by this from now on, as long as this leader leads; its journal says so."""
        self._tell(settings.configured)
        self.settings = settings

    def register(self, address: str, worker: WorkerDescription) -> None:
        """A worker announced itself. OutOfOrder when it serves something else than the cell."""
        known = self.links.get(worker.boot_id)
        if known is not None and known.address == address:
            known.silent_ns = 0
            self._describe(known, worker)
            return
        others = [link.worker for link in self.links.values()]
        refuse_stranger(worker, others, self.core.live_count, self._weights_digest)
        self._weights_digest = worker.weights_digest or self._weights_digest
        if known is not None:
            self.forget(worker.boot_id, "its address changed", is_crash=False)
        for link in list(self.links.values()):
            if link.address == address and not link.is_open:
                self.forget(link.worker_id, "another process has its address")
        self._start(WorkerLink(address=address, worker=worker, leader=self._leader, owner=self))
        log.info("worker.registered", worker_id=worker.boot_id, address=address)

    def _describe(self, link: WorkerLink, worker: WorkerDescription) -> None:
        """The same process again; what it can do in a step may be something else now."""
        refuse_change(link.worker, worker)
        spec, before = wire.spec_from_proto(worker), wire.spec_from_proto(link.worker)
        link.describe(worker)
        if spec != before and link.worker_id in self.core.workers:
            log.info("worker.changed", worker_id=link.worker_id)
            self._tell(WorkerChanged(worker_id=link.worker_id, spec=spec))

    def _start(self, link: WorkerLink, after: "asyncio.Task[None] | None" = None) -> None:
        """Dial it, and again whenever the stream ends. `after`: once that one has let it go."""
        assert self._tasks is not None
        dialling = self._run_link(link, after)
        try:
            self._link_tasks[link.worker_id] = self._tasks.create_task(dialling)
        except RuntimeError:
            dialling.close()
            raise OutOfOrder("this leadership is just ending") from None
        self.links[link.worker_id] = link

    async def _run_link(self, link: WorkerLink, after: "asyncio.Task[None] | None") -> None:
        """Nothing is computed with other weights before a successor of this leader would know."""
        if after is not None:
            await asyncio.wait({after})
        while self._told_digest != self._weights_digest and not await self._tell_cell():
            await self._clock.sleep(RETRY_S)
        await link.run()

    def heartbeat(self, boot_id: str, *, is_draining: bool) -> bool | None:
        """None: unknown, register again. Otherwise whether nothing of the worker is left."""
        link = self.links.get(boot_id)
        if link is None:
            return None
        link.silent_ns = 0
        if not is_draining:
            return False
        link.is_draining = True
        if boot_id not in self.core.workers:
            return True
        if not self.core.workers[boot_id].is_draining:
            self._tell(WorkerDraining(worker_id=boot_id))
        return self.core.is_drained(boot_id)

    def forget(self, worker_id: str, reason: str, *, is_crash: bool = True) -> None:
        """The worker is gone for good; if it comes back it registers again."""
        link = self.links.pop(worker_id)
        self._link_tasks.pop(worker_id).cancel()
        log.info("worker.forgotten", worker_id=worker_id, reason=reason)
        if worker_id in self.core.workers or link.broke:
            is_crash = is_crash and not link.is_draining
            self._lose(link, link.broke or reason, is_crash=is_crash)

    def link_opened(self, link: WorkerLink) -> None:
        spec = wire.spec_from_proto(link.worker)
        self._tell(WorkerJoined(worker_id=link.worker_id, spec=spec))
        log.info("worker.joined", worker_id=link.worker_id, address=link.address)

    def link_closed(self, link: WorkerLink, reason: str, *, is_crash: bool | None) -> None:
        if link.worker_id in self.core.workers:
            self._lose(link, reason, is_crash=is_crash)

    def step_arrived(self, link: WorkerLink, result: StepMessage) -> None:
        # As good as a heartbeat, and a busy worker's may be late.
        link.silent_ns = 0
        link.answered(result.timings)
        now_ns = self.now_ns()
        try:
            if result.boot_id != link.worker_id:
                raise ResultRejected(f"boot_id {result.boot_id!r} is another worker's")
            wire.check_values(
                result, rows_max=link.worker.slots_max, tokens_max=link.step_tokens_max
            )
            self._check_logprobs(link, result)
            step = wire.step_from_proto(link.worker_id, result)
            command = StepDone(result=step)
            outcome = self.core.apply(command, now_ns)
        except ResultRejected as error:
            log.error("step.rejected", worker_id=link.worker_id, reason=str(error))
            link.reject(str(error))
            return
        assert outcome.tokens is not None
        self._concerned |= dict.fromkeys(outcome.workers)
        self._meters.stepped(len(outcome.tokens.tokens), result.timings)
        self._meters.ended(outcome.events)
        if self._tracing is not None:
            of = self._requests.traceparent
            self._tracing.stepped(link.worker_id, result, outcome.tokens, of, now_ns)
            self._tracing.ended(outcome.events, of, now_ns)
        self._commits.put(self._journal.step(command, result, outcome, now_ns))
        self._wake()

    def _check_logprobs(self, link: WorkerLink, result: StepMessage) -> None:
        """Only where there are some, or some are due: a look at every row costs."""
        if result.logprobs or result.prompt_logprobs or self._requests.has_logprobs:
            rows = self.core.workers[link.worker_id].sequences_of(result.plan_id)
            asked = {slot: self._requests.asked(sequence_id) for slot, sequence_id in rows.items()}
            wire.check_logprobs(result, asked, link.worker.vocab_size)

    # The turn

    def _wake(self) -> None:
        """Take a turn soon; however often this is called, once."""
        self._turn_asked.set()

    def _on_commit(self) -> None:
        """The ledger has acknowledged something; a turn has nothing new to find in most of it."""
        if self._is_held_back:
            self._wake()

    async def _take_turns(self) -> None:
        """The loop. Whatever a turn raises ends the leadership."""
        while True:
            await self._turn_asked.wait()
            self._turn_asked.clear()
            if self._error is not None:
                raise self._error
            self._turn()
            self._turn_taken.set()

    @contextmanager
    def called(self) -> "Iterator[LeaderSession]":
        """For calls from outside: what we get wrong in one ends the leadership, as in a turn."""
        try:
            yield self
        except OutOfOrder:
            raise
        except Exception as error:
            self._error = error
            self._wake()
            raise

    def _turn(self) -> None:
        now_ns = self.now_ns()
        self._expire(now_ns)
        self._plan(now_ns)
        self._commits.put(self._journal.overdue(now_ns))
        self._fold()
        if not self.core.live_count:
            self._idle_since_ns = self._clock.monotonic_ns()
        self._idle_check.turn(self._clock.monotonic_ns())

    def _expire(self, now_ns: int) -> None:
        deadline_ns = self.core.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= now_ns:
            self._tell(Expire())

    def _plan(self, now_ns: int) -> None:
        """Ask for the plans of all workers that the core named, until it names none."""
        self._is_held_back = False
        while self._concerned and not self._is_stopping:
            self._is_held_back = self._commits.backlog >= self.settings.uncommitted_steps_max
            if self._is_held_back:
                return
            worker_id = next(iter(self._concerned))
            del self._concerned[worker_id]
            link = self.links.get(worker_id)
            if link is not None and link.is_open and worker_id in self.core.workers:
                self._plan_one(link, now_ns)

    def _plan_one(self, link: WorkerLink, now_ns: int) -> None:
        outcome = self.core.apply(MakePlan(worker_id=link.worker_id), now_ns)
        if (plan := outcome.plan) is None:
            return
        self._concerned |= dict.fromkeys(outcome.workers)
        samplings = [self._requests.sampling(join.sequence_id) for join in plan.joins]
        trace = self._tracing.planned(plan, now_ns) if self._tracing is not None else ""
        most = self.core.workers[link.worker_id].spec.slot_tokens_max
        message = wire.plan_to_proto(
            plan, self._leader, samplings, slot_tokens_max=most, traceparent=trace
        )
        tokens = plan.chunk_tokens + plan.decode_rows * most
        message.expected_step_us = link.expected_step_us(tokens)
        self._journal.planned(plan, message, now_ns)
        link.send(message)
        self._meters.planned(plan)

    def _fold(self) -> None:
        if self._journal.seq - self._fold_seq >= self.settings.fold_records:
            self._commits.put_fold(self._fold_seq, self._requests.next_fold())
            self._fold_seq = self._journal.seq

    # Requests

    def _submit(self, entry: InboxEntry, record: SubmitRecord) -> None:
        """Take a new request in. Recovery may have seen the entry already."""
        if entry.sequence_id in self._requests:
            return
        self._requests.add(BookedRequest(entry=entry, record=record))
        request = wire.request_from_proto(entry, record)
        self._meters.took_in(len(request.prompt), is_new=True)
        self._tell(Submit(request=request))

    def _resume(self, entry: InboxEntry, record: SubmitRecord, recovered: Recovered) -> None:
        """Take a request in with whatever an earlier leader committed of it."""
        outputs = self._requests.resume(BookedRequest(entry=entry, record=record), recovered)
        prompt_logprobs_from = recovered.prompt_logprobs_from.get(entry.sequence_id, 1)
        request = wire.request_from_proto(entry, record, outputs, prompt_logprobs_from)
        self._meters.took_in(len(request.prompt), is_new=False)
        self._tell(Submit(request=request))
        sequence_ids = range(entry.sequence_id, entry.sequence_id + record.n)
        if damages := [recovered.damaged[s] for s in sequence_ids if s in recovered.damaged]:
            # One request that cannot go on must not keep the others of its cell from it.
            log.error("request.damaged", sequence_id=entry.sequence_id, reason=damages[0])
            error = f"the ledger is damaged, this request cannot go on: {damages[0]}"
            self._tell(Cancel(sequence_id=entry.sequence_id, reason=Reason.ERROR, error=error))

    def _tell(self, command: Command) -> None:
        """Apply a command, write it down, and say what ended by it."""
        now_ns = self.now_ns()
        outcome = self.core.apply(command, now_ns)
        self._concerned |= dict.fromkeys(outcome.workers)
        self._journal.told(command, now_ns)
        self._meters.ended(outcome.events)
        if self._tracing is not None:
            self._tracing.ended(outcome.events, self._requests.traceparent, now_ns)
        self._commits.put(self._journal.ended(outcome.events, now_ns))
        self._wake()

    def _lose(self, link: WorkerLink, reason: str, *, is_crash: bool | None) -> None:
        """Tell the core: of a worker that it has lost already, what became of its process."""
        is_here = link.worker_id in self.core.workers
        event = "worker.lost" if is_here else "worker.judged"
        log.warning(event, worker_id=link.worker_id, reason=reason, is_crash=is_crash)
        if is_here or is_crash:
            self._meters.lost_worker(is_crash=is_crash)
        if self._tracing is not None:
            self._tracing.lost(link.worker_id)
        self._tell(WorkerLost(worker_id=link.worker_id, is_crash=is_crash, reason=reason))

    # Tasks

    async def _read_inbox(self) -> None:
        async for entry in entries_behind(self._ledger, self._cursor, self._clock):
            if isinstance(entry.record, SubmitRecord):
                self._submit(entry, entry.record)
            else:
                self._tell(cancel_from_proto(entry.record))

    async def _renew(self) -> None:
        """Say that this leader decides: each time after a turn taken since the time before."""
        while True:
            self._turn_taken.clear()
            self._wake()
            await self._turn_taken.wait()
            await self._tell_cell()
            await self._clock.sleep(self.settings.lease_ttl_s / 6)

    async def _tell_cell(self) -> bool:
        """Renew once. One at a time: an older record must not come last."""
        async with self._renewing:
            record = self.cell()
            try:
                await self._ledger.renew(self.leader, record)
            except StoreLost:
                raise
            except Unavailable as error:
                log.warning("lease.not_renewed", reason=str(error))
                return False
            self._told_digest = record.weights_digest
        return True

    async def _tick(self) -> None:
        """Deadlines, and workers that went silent: only what we could have heard is silence."""
        ticked_ns = self._clock.monotonic_ns()
        while True:
            deadline_ns = self.core.next_deadline_ns()
            wait_s = TICK_S_MAX
            if deadline_ns is not None:
                wait_s = min(wait_s, max(0.001, (deadline_ns - self.now_ns()) / 1e9))
            await self._clock.sleep(wait_s)
            before_ns, ticked_ns = ticked_ns, self._clock.monotonic_ns()
            self._count_silence(min(ticked_ns - before_ns, TICK_NS_COUNTED_MAX))
            self._wake()

    def _count_silence(self, passed_ns: int) -> None:
        timeout_ns = self.settings.worker_timeout_ms * 1_000_000
        links, workers = list(self.links.values()), self.core.workers
        for link, finding in look_at(links, workers, passed_ns=passed_ns, timeout_ns=timeout_ns):
            match finding:
                case Finding.LATE:
                    log.warning("worker.late", worker_id=link.worker_id, waited_ns=link.waited_ns)
                    self._tell(WorkerLate(worker_id=link.worker_id))
                case Finding.HUNG:
                    self._give_up(link)
                case Finding.SILENT:
                    self.forget(link.worker_id, finding.value)
                case Finding.APART:
                    self._lose(link, link.broke, is_crash=link.is_hung and not link.is_draining)
                    link.broke, link.broken_ns = "", 0

    def _give_up(self, link: WorkerLink) -> None:
        """Its sequences go on elsewhere; it is dialled anew, and joins when its step has ended."""
        link.give_up(f"a step has not ended for {link.waited_ns / 1e9:.0f} s")
        stream = self._link_tasks[link.worker_id]
        stream.cancel()
        self._lose(link, link.broke, is_crash=None)
        self._start(link, after=stream)

    def cell(self) -> CellRecord:
        """What gateways are told with every renewal."""
        return describe_cell(
            self.core,
            self.links.values(),
            stalled_ms=self.stalled_ms,
            weights_digest=self._weights_digest,
        )

    @property
    def stalled_ms(self) -> int:
        """How long work has been runnable, on a worker that answers, without a commit."""
        if not self.core.live_count or not self.core.workers:
            return 0
        since_ns = max(self._idle_since_ns, self._commits.committed_ns)
        return max(0, (self._clock.monotonic_ns() - since_ns) // 1_000_000)
