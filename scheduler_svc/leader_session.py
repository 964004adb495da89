"""One leader's session: the loop between the ledger, the core and the workers.

Everything that happens calls one short method here, which tells the core and asks for a turn. A
turn asks the core for every plan it wants to make and hands them to the links. Nothing between
reading and writing core state awaits, so there are no locks. What the core says goes to the commit
queue, and from there to the ledger in order; gateways show clients only what is committed.

An error of our own, wherever it happens, ends the leadership: the core may be half changed. The
lease is renewed only behind a turn, so a leader that decides nothing any more is replaced.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import structlog

from kaiten.v1 import common_pb2
from kaiten.v1.ledger_pb2 import CellRecord, SubmitRecord
from kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import Commit, InboxEntry, Leader, Ledger, Recovered
from scheduler_svc import load, wire
from scheduler_svc.archiving import Archive
from scheduler_svc.cell_record import describe_cell, expect_workers
from scheduler_svc.command_wire import cancel_from_proto, handed_over_from_proto
from scheduler_svc.commit_queue import CommitQueue
from scheduler_svc.core.commands import (
    Cancel,
    Command,
    Expire,
    MakePlan,
    StepDone,
    StoreBehind,
    Submit,
)
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason, ResultRejected
from scheduler_svc.idle_check import IdleCheck
from scheduler_svc.inbox import Inbox
from scheduler_svc.journal import Journal
from scheduler_svc.links import WorkerLink
from scheduler_svc.live_view import Looks, Moment, View, look
from scheduler_svc.meters import Meters
from scheduler_svc.renewal import Renewal
from scheduler_svc.request_book import BookedRequest, RequestBook
from scheduler_svc.roster import Roster
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.snapshots import Snapshots
from scheduler_svc.store_clock import clock_offset_ns
from scheduler_svc.timeline import Timelines
from scheduler_svc.tracing import Tracing
from scheduler_svc.watching import Watching
from service_kit.clock import Clock
from service_kit.errors import OutOfOrder
from service_kit.lifecycle import endless
from service_kit.peers import Peers

log = structlog.get_logger()

TICK_S_MAX = 0.25
# Between two looks at the load, for who reads metrics.
LOAD_NS = 1_000_000_000
# So long a turn makes plans before everything else has its own: links, the inbox, the lease.
PLAN_NS_MAX = 25_000_000


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
        peers: Peers | None = None,
        standby_addresses: Collection[str] = (),
    ) -> None:
        """`standby_addresses`: of those who stand by now."""
        self.leader, self.settings, self._ledger = leader, settings, ledger
        # Of the settings: made of many, and every look tells it.
        self._configured = settings.configured
        self._standby_addresses = standby_addresses
        # Of a leader that some worker takes for newer than us.
        self.seen_epoch = 0
        self.core = Scheduler()
        self._leader = common_pb2.Leader(epoch=leader.epoch, nonce=leader.nonce)
        self._clock, self._meters, self._tracing = clock, meters, tracing
        self.roster = Roster(
            self, self._leader, clock=clock, meters=meters, tracing=tracing, peers=peers or Peers()
        )
        self._requests, self.timelines = RequestBook(archive), Timelines()
        self.traceparent_of = self._requests.traceparent_told
        self._commits = CommitQueue(ledger, leader, settings, clock, self._on_commit, archive)
        self._snapshots = Snapshots(archive, self.timelines, self.core)
        # Everything up to here is in the pieces that the next fold will take.
        self._fold_seq = leader.journal_seq
        self._turn_asked, self._turn_taken = asyncio.Event(), asyncio.Event()
        # Of our own, in a call that nobody but its caller would hear of.
        self._error: Exception | None = None
        self.renewal = Renewal(ledger, leader, clock, settings.lease_ttl_s, self.cell, self.now_ns)
        # What the leader before said last.
        self._before = CellRecord()
        # Workers that may need a plan, as the core said.
        self._concerned: dict[str, None] = {}
        # Of those for whose next plan it was early, when to ask again.
        self._held: dict[str, asyncio.TimerHandle] = {}
        self._is_stopping, self._load_due_ns = False, 0
        self._idle_since_ns, self._idle_check = clock.monotonic_ns(), IdleCheck(self.core)
        self.watching = Watching(self._look, clock)

    def __repr__(self) -> str:
        return f"<LeaderSession epoch={self.leader.epoch} {self.core} {self._commits}>"

    # Life

    async def recover(self) -> None:
        """Take over every live request. Workers may register only afterwards."""
        self._clock_offset_ns = await clock_offset_ns(self._ledger.now_ns, self._clock)
        recovered = await self._ledger.recover(self.leader, self.renewal.if_due)
        self._before = before = (await self._ledger.cell()).record or CellRecord()
        if before.workers_ready:
            # It had somebody to plan for: its silence since then is its loss.
            self.timelines.leader_lost_at(recovered.decided_ns)
        self.roster.weights_digest = self.renewal.told_digest = before.weights_digest
        self.renewal.clock_step = before.clock_step
        self.roster.cell = f"{self._ledger.keys.cell} in store {await self._ledger.store_id()}"
        self._journal = Journal(self._requests, self.leader)
        self.tell(self._configured)
        # At once: whoever follows must hear of a leader, who may know less than the one before.
        self._commits.put(self._journal.opened(self.now_ns()))
        for entry in recovered.entries:
            await self.renewal.if_due()
            if isinstance(entry.record, SubmitRecord):
                self._resume(entry, entry.record, recovered)
            else:
                self.tell(cancel_from_proto(entry.record))
        if before.HasField("handover"):
            self.tell(handed_over_from_proto(before.handover))
        self._inbox = Inbox(self._ledger, recovered, self._clock, self._requests, self._commits)
        log.info("leadership.started", epoch=self.leader.epoch, resumed=self.core.live_count)

    async def run(self) -> None:
        """Lead. Raises OutOfOrder when somebody else leads, StoreLost, or cancels."""
        async with asyncio.TaskGroup() as tasks:
            self.roster.open(tasks, self._before.worker_addresses)
            tasks.create_task(endless(self._take_turns()), name="turns")
            tasks.create_task(endless(self._commits.run()), name="commits")
            tasks.create_task(endless(self._read_inbox()), name="inbox")
            tasks.create_task(endless(self.renewal.run(self._decided)), name="renew")
            tasks.create_task(endless(self._tick()), name="tick")
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

    @property
    def fold_lag(self) -> int:
        """Records that the ledger has, and whose tokens are in the journal only."""
        return self._commits.committed_seq - self._commits.folded_seq

    def now_ns(self) -> int:
        """The ledger's clock, carried on by our own monotonic one: no node's wall clock matters."""
        return self._clock.monotonic_ns() + self._clock_offset_ns

    def _look(self, looks: Looks, before: View | None) -> View:
        """The core as it is, for those who watch."""
        moment = Moment(self.leader.epoch, self._journal.seq, self.journal_seq, self.now_ns())
        addresses = {link.worker_id: link.address for link in self.roster.links.values()}
        return look(self.core, moment, self._configured, looks, addresses, before)

    # What happens

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

    def outranked(self, epoch: int) -> None:
        """A worker follows a leader of this epoch. Ours was the newest, so the store has gone back
        in time: lead anew, above it.
        """
        self.seen_epoch = max(self.seen_epoch, epoch)
        self._error = OutOfOrder(f"a worker has seen epoch {epoch}")
        self._wake()

    def configure(self, settings: SchedulerSettings) -> None:
        """Decide by this from now on, as long as this leader leads; its journal says so."""
        configured = settings.configured
        self.tell(configured)
        self.settings, self._configured = settings, configured

    def tell(self, command: Command) -> None:
        """Tell the core, and let everybody know what came of it."""
        now_ns = self.now_ns()
        outcome = self.core.apply(command, now_ns)
        self.timelines.take(command, outcome, now_ns, self.core.waiting)
        self._publish(command, outcome, now_ns)
        self._wake()

    def step_arrived(self, link: WorkerLink, result: StepMessage) -> None:
        began_ns = self._clock.monotonic_ns()
        self._book(link, result, self.now_ns())
        self._meters.spent("book", self._clock.monotonic_ns() - began_ns)

    def _book(self, link: WorkerLink, result: StepMessage, now_ns: int) -> None:
        try:
            if result.boot_id != link.worker_id:
                raise ResultRejected(f"boot_id {result.boot_id!r} is another worker's")
            wire.check_values(
                result, rows_max=link.worker.slots_max, tokens_max=link.step_tokens_max
            )
            self._check_logprobs(link, result)
            command = StepDone(result=wire.step_from_proto(link.worker_id, result))
            flight = self.watching.flight_of(self.core.workers[link.worker_id], result.plan_id)
            outcome = self.core.apply(command, now_ns)
        except ResultRejected as error:
            log.error("step.rejected", worker_id=link.worker_id, reason=str(error))
            link.reject(str(error))
            return
        link.answered(result.timings)
        assert outcome.tokens is not None
        if flight is not None:
            self.watching.stepped(flight, command.result, now_ns)
        self.timelines.take(command, outcome, now_ns, self.core.waiting)
        self._meters.stepped(result.timings)
        self._meters.answered(self._journal.seq + 1, self._requests.answered(outcome.tokens))
        if self._tracing is not None:
            of = self._requests.traceparent
            self._tracing.stepped(link.worker_id, result, outcome.tokens, of, now_ns)
        self._publish(command, outcome, now_ns, result)
        self._commits.worked()
        self._wake()

    def _check_logprobs(self, link: WorkerLink, result: StepMessage) -> None:
        """Only where there are some, or some are due: a look at every row costs."""
        if result.logprobs or result.prompt_logprobs or self._requests.has_logprobs:
            rows = self.core.workers[link.worker_id].sequences_of(result.plan_id)
            asked = {slot: self._requests.asked(sequence_id) for slot, sequence_id in rows.items()}
            wire.check_logprobs(result, asked, link.worker.vocab_size)

    def _publish(
        self,
        command: Command,
        outcome: Outcome,
        now_ns: int,
        message: PlanMessage | StepMessage | None = None,
    ) -> None:
        """The one way out of the core: to the journal, the ledger, the meters and the spans."""
        self._concerned |= dict.fromkeys(outcome.workers)
        if outcome.events:
            events, of = self._requests.whole(outcome.events), self._requests.traceparent
            seq = self._journal.seq + 1
            self._meters.ended(seq, events, of)
            if self._tracing is not None:
                self._tracing.ended(seq, events, of, now_ns, self.timelines.tracks)
        commit = self._journal.write(command, outcome, now_ns, message, self.core.waiting)
        self._commits.put(commit)

    # The turn

    def _wake(self) -> None:
        """Take a turn soon; however often this is called, once."""
        self._turn_asked.set()

    def _on_commit(self, commits: Sequence[Commit]) -> None:
        """The ledger has acknowledged these; a turn has nothing new to find in most of it."""
        self._meters.spent("commit", self._commits.round_trip_ns)
        records = [commit.record for commit in commits]
        self._meters.committed(records)
        if self._tracing is not None:
            self._tracing.committed(records[-1].seq)
        self.timelines.committed(records[0].unix_ns, records[-1].unix_ns, self.now_ns())
        if self.core.is_store_behind:
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
            # An event that is set already is no wait: everybody else would have none of the loop.
            await asyncio.sleep(0)

    async def _decided(self) -> None:
        """Return when a turn has been taken from now on."""
        self._turn_taken.clear()
        self._wake()
        await self._turn_taken.wait()

    def _turn(self) -> None:
        now_ns, began_ns = self.now_ns(), self._clock.monotonic_ns()
        self._expire(now_ns)
        self._plan(now_ns)
        self._meters.spent("plan", self._clock.monotonic_ns() - began_ns)
        self._commits.put(self._journal.overdue(now_ns))
        self._commits.put(self._snapshots.due(self._journal, self._configured, now_ns))
        self._fold()
        if not load.has_work(self.core):
            self._idle_since_ns = self._clock.monotonic_ns()
        self._idle_check.turn(self._clock.monotonic_ns())

    def _expire(self, now_ns: int) -> None:
        deadline_ns = self.core.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= now_ns:
            self.tell(Expire())

    def _plan(self, now_ns: int) -> None:
        """Ask for the plans of all workers that the core named, until it names none, or it takes
        long: then the others have another turn. What happens between two turns may happen here,
        too: each answer of the core is published before anything else, and leaves it whole.
        """
        self._look_back()
        until_ns = self._clock.monotonic_ns() + PLAN_NS_MAX
        while self._concerned and not self._is_stopping:
            if self.core.is_store_behind:
                self._meters.held_back(len(self._concerned))
                return
            worker_id = next(iter(self._concerned))
            del self._concerned[worker_id]
            link = self.roster.links.get(worker_id)
            if link is not None and link.is_open and worker_id in self.core.workers:
                self._plan_one(link, now_ns)
                if self._clock.monotonic_ns() >= until_ns:
                    self._wake()
                    return

    def _look_back(self) -> None:
        """Nothing is planned while too many steps are uncommitted, and the core knows why."""
        is_behind = self._commits.steps_ahead >= self.settings.uncommitted_steps_max
        if is_behind != self.core.is_store_behind:
            self.tell(StoreBehind(is_behind=is_behind))

    def _plan_one(self, link: WorkerLink, now_ns: int) -> None:
        command = MakePlan(worker_id=link.worker_id)
        outcome = self.core.apply(command, now_ns)
        self._meters.asked(link.address, outcome.passed_over)
        self.watching.asked(self.core.workers[link.worker_id], outcome)
        self.timelines.take(command, outcome, now_ns, self.core.waiting)
        if outcome.again_ns is not None:
            self._hold(link.worker_id, outcome.again_ns - now_ns)
        if (plan := outcome.plan) is None:
            return
        samplings = [self._requests.sampling(join.sequence_id) for join in plan.joins]
        trace = ""
        if self._tracing is not None:
            of = self._requests.traceparent
            trace = self._tracing.planned(plan, now_ns, outcome.passed_over, self.core, of)
        spec = self.core.workers[link.worker_id].spec
        message = wire.plan_to_proto(
            plan, self._leader, samplings, slot_tokens_max=spec.slot_tokens_max, traceparent=trace
        )
        tokens = plan.chunk_tokens + plan.decode_rows * spec.slot_tokens_max
        message.expected_step_us = link.expected_step_us(tokens)
        link.send(message)
        self._meters.planned(link.address, plan, outcome.passed_over, spec)
        self._publish(command, outcome, now_ns, message)

    def _hold(self, worker_id: str, for_ns: int) -> None:
        """One timer of each worker: its step's end may be expected otherwise by now."""
        if (before := self._held.get(worker_id)) is not None:
            before.cancel()
        after = asyncio.get_running_loop().call_later
        self._held[worker_id] = after(for_ns / 1e9, self._ask_again, worker_id)

    def _ask_again(self, worker_id: str) -> None:
        self._held.pop(worker_id, None)
        self._concerned[worker_id] = None
        self._wake()

    def _fold(self) -> None:
        if self._journal.seq - self._fold_seq >= self.settings.fold_records:
            self._commits.put_fold(self._fold_seq, self._requests.next_fold())
            self._fold_seq = self._journal.seq

    # Requests

    def _submit(self, entry: InboxEntry, record: SubmitRecord) -> None:
        """Take a new request in."""
        self._requests.add(BookedRequest(entry=entry, record=record))
        arrived_ns = wire.arrived_ns(entry, self.now_ns())
        request = wire.request_from_proto(entry, record, arrived_ns)
        self._meters.took_in(is_new=True)
        self.tell(Submit(request=request))

    def _resume(self, entry: InboxEntry, record: SubmitRecord, recovered: Recovered) -> None:
        """Take a request in with whatever an earlier leader committed of it."""
        outputs = self._requests.resume(BookedRequest(entry=entry, record=record), recovered)
        prompt_logprobs_from = recovered.prompt_logprobs_from.get(entry.sequence_id, 1)
        arrived_ns = wire.arrived_ns(entry, self.now_ns(), self._before.clock_step)
        request = wire.request_from_proto(entry, record, arrived_ns, outputs, prompt_logprobs_from)
        self._meters.took_in(is_new=False)
        self.tell(Submit(request=request))
        sequence_ids = range(entry.sequence_id, entry.sequence_id + record.n)
        if damages := [recovered.damaged[s] for s in sequence_ids if s in recovered.damaged]:
            # One request that cannot go on must not keep the others of its cell from it.
            log.error("request.damaged", sequence_id=entry.sequence_id, reason=damages[0])
            error = f"the ledger is damaged, this request cannot go on: {damages[0]}"
            self.tell(Cancel(sequence_id=entry.sequence_id, reason=Reason.ERROR, error=error))

    # Tasks

    async def _read_inbox(self) -> None:
        async for entry in self._inbox.entries():
            if isinstance(entry.record, SubmitRecord):
                self._submit(entry, entry.record)
            else:
                self._cancel(entry, cancel_from_proto(entry.record))

    def _cancel(self, entry: InboxEntry, command: Cancel) -> None:
        """Somebody wants no more of a request, which may be over."""
        is_live = command.sequence_id in self._requests
        self.tell(command)
        if is_live:
            now_ns = self.now_ns()
            self._meters.freed(now_ns - wire.arrived_ns(entry, now_ns))

    async def _tick(self) -> None:
        """Deadlines, and workers that went silent."""
        while True:
            deadline_ns = self.core.next_deadline_ns()
            wait_s = TICK_S_MAX
            if deadline_ns is not None:
                wait_s = min(wait_s, max(0.001, (deadline_ns - self.now_ns()) / 1e9))
            await self._clock.sleep(wait_s)
            self.roster.tick()
            self._look_at_load()
            self._wake()

    def _look_at_load(self) -> None:
        """Once a second, while somebody reads metrics."""
        now_ns = self.now_ns()
        if not self._meters.is_heard or now_ns < self._load_due_ns:
            return
        self._load_due_ns, oldest_ns = now_ns + LOAD_NS, self._commits.oldest_ns
        self._meters.load = load.look(
            self.core,
            silent_ns={w.worker_id: (w.address, w.silent_ns) for w in self.roster.links.values()},
            output_tokens=self._meters.output_tokens,
            journal_lag_ns=0 if oldest_ns is None else max(0, now_ns - oldest_ns),
            now_ns=now_ns,
        )

    # What is said of it

    def cell(self) -> CellRecord:
        """What gateways are told with every renewal."""
        record = describe_cell(
            self.core,
            self.roster.links.values(),
            stalled_ms=self.stalled_ms,
            weights_digest=self.roster.weights_digest,
            standby_addresses=sorted({*self._standby_addresses} - {""}),
            queue_time_forecast_s=load.queue_time_s(
                self.core, output_tokens=self._meters.output_tokens, now_ns=self.now_ns()
            ),
        )
        expect_workers(record, self.roster.expected, self._before)
        return record

    @property
    def stalled_ms(self) -> int:
        """How long work has been runnable, on a worker that answers, without a commit."""
        if not load.has_work(self.core):
            return 0
        since_ns = max(self._idle_since_ns, self._commits.committed_ns)
        return max(0, (self._clock.monotonic_ns() - since_ns) // 1_000_000)
