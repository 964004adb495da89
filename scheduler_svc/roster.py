"""The workers of one leadership: who may be one, a link to each, what to think of their silence.

What happens to one is told to the core by the session; nothing is decided here of sequences.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import grpc
import structlog

from kaiten.v1 import common_pb2
from kaiten.v1.common_pb2 import WorkerDescription
from kaiten.v1.scheduler_service_pb2 import RegisterRequest
from kaiten.v1.worker_service_pb2 import DescribeRequest
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from kaiten.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_svc import wire
from scheduler_svc.core.commands import (
    Command,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLate,
    WorkerLost,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links import WorkerLink
from scheduler_svc.membership import (
    check_registration,
    refuse_change,
    refuse_namesake,
    refuse_stranger,
)
from scheduler_svc.meters import Meters
from scheduler_svc.renewal import Renewal
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.target_watch import TargetWatch
from scheduler_svc.tracing import Tracing
from scheduler_svc.worker_watch import Finding, look_at
from service_kit.clock import Clock
from service_kit.errors import InvalidRequest, OutOfOrder
from service_kit.peers import Peers

log = structlog.get_logger()

# Counted as silence at most, of the time between two ticks: a longer one was our own pause.
TICK_NS_COUNTED_MAX = 500_000_000
# For a worker that the leader before knew to say what it is. So long it is expected.
DESCRIBE_S_MAX = 2.0


class Session(Protocol):
    """What the roster needs of the session that leads."""

    core: Scheduler
    settings: SchedulerSettings
    renewal: Renewal

    def tell(self, command: Command) -> None: ...

    def step_arrived(self, link: WorkerLink, result: StepMessage) -> None: ...

    def outranked(self, epoch: int) -> None: ...


class Roster:
    """Also the owner of the links. Everything is called on the event loop."""

    def __init__(
        self,
        session: Session,
        leader: common_pb2.Leader,
        *,
        clock: Clock,
        meters: Meters,
        tracing: Tracing | None,
        peers: Peers,
    ) -> None:
        self.links: dict[str, WorkerLink] = {}
        # Of the workers for which the live requests were accepted; empty: not known.
        self.weights_digest = ""
        # Name of ours and which store holds it.
        self.cell = ""
        self._session, self._core, self._leader = session, session.core, leader
        self._clock, self._meters, self._tracing = clock, meters, tracing
        self._peers = peers
        self._tasks: asyncio.TaskGroup | None = None
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        self._targets = TargetWatch()
        self._ticked_ns = 0
        self._expected: dict[str, None] = {}
        self._expected_until_ns = 0

    def open(self, tasks: asyncio.TaskGroup, known_addresses: Iterable[str]) -> None:
        """Workers may register from here on; these tasks follow them. `known_addresses`: where they
        were under the leader before.
        """
        self._tasks, self._ticked_ns = tasks, self._clock.monotonic_ns()
        self._expected = dict.fromkeys(known_addresses)
        self._expected_until_ns = self._ticked_ns + int(DESCRIBE_S_MAX * 1e9)
        tasks.create_task(self._adopt_all(), name="adopt")

    # Who is here

    @property
    def model(self) -> str:
        """What the workers serve, as they say; empty: there are none."""
        return next((link.worker.model for link in list(self.links.values())), "")

    @property
    def expected(self) -> list[str]:
        """Where those are whom the leader before knew, until they have a stream: for a moment."""
        is_over = self._clock.monotonic_ns() > self._expected_until_ns
        return [] if is_over else list(self._expected)

    async def _adopt_all(self) -> None:
        """Ask those whom the leader before knew: they may take a while to find out who leads."""
        await asyncio.gather(*map(self._adopt, list(self._expected)))

    async def _adopt(self, address: str) -> None:
        try:
            async with self._peers.channel(address) as channel:
                stub = WorkerServiceStub(channel)
                told = await self._peers.ask(stub.Describe, DescribeRequest(), DESCRIBE_S_MAX)
            check_registration(RegisterRequest(address=address, worker=told.worker))
            if told.worker.boot_id not in self.links:
                self.register(address, told.worker)
        except (grpc.aio.AioRpcError, InvalidRequest, OutOfOrder) as error:
            # It registers by itself, or is refused by itself.
            self._expected.pop(address, None)
            log.info("worker.not_adopted", address=address, reason=str(error))

    def register(self, address: str, worker: WorkerDescription) -> None:
        """A worker announced itself. OutOfOrder when it serves something else than the cell, and
        when it takes another's name.
        """
        known = self.links.get(worker.boot_id)
        if known is not None and known.address == address:
            known.silent_ns = 0
            self._describe(known, worker)
            return
        if known is not None:
            refuse_namesake(known.worker_id, known.address, address)
        others = [link.worker for link in self.links.values()]
        refuse_stranger(worker, others, self._core.live_count, self.weights_digest)
        self.weights_digest = worker.weights_digest or self.weights_digest
        for link in list(self.links.values()):
            if link.address == address and not link.is_open:
                self.forget(link.worker_id, "another process has its address")
        self._start(
            WorkerLink(
                address=address,
                worker=worker,
                leader=self._leader,
                owner=self,
                cell=self.cell,
                peers=self._peers,
            )
        )
        log.info("worker.registered", worker_id=worker.boot_id, address=address)

    def heartbeat(self, boot_id: str, *, is_draining: bool) -> bool | None:
        """None: unknown, register again. Otherwise whether nothing of the worker is left."""
        link = self.links.get(boot_id)
        if link is None:
            return None
        link.silent_ns = 0
        if not is_draining:
            return False
        link.is_draining = True
        if boot_id not in self._core.workers:
            return True
        if not self._core.workers[boot_id].is_draining:
            self._session.tell(WorkerDraining(worker_id=boot_id))
        return not self._core.workers[boot_id].members

    def forget(self, worker_id: str, reason: str, *, is_crash: bool = True) -> None:
        """The worker is gone for good; if it comes back it registers again."""
        link = self.links.pop(worker_id)
        self._link_tasks.pop(worker_id).cancel()
        log.info("worker.forgotten", worker_id=worker_id, reason=reason)
        if worker_id in self._core.workers or link.broke:
            is_crash = is_crash and not link.is_draining
            self._lose(link, link.broke or reason, is_crash=is_crash)

    def _describe(self, link: WorkerLink, worker: WorkerDescription) -> None:
        """The same process again; what it can do in a step may be something else now."""
        refuse_change(link.worker, worker)
        spec, before = wire.spec_from_proto(worker), wire.spec_from_proto(link.worker)
        link.describe(worker)
        if spec != before and link.worker_id in self._core.workers:
            log.info("worker.changed", worker_id=link.worker_id)
            self._session.tell(WorkerChanged(worker_id=link.worker_id, spec=spec))

    def _start(self, link: WorkerLink, after: "asyncio.Task[None] | None" = None) -> None:
        """Dial it, and again whenever the stream ends. `after`: once that one has let it go."""
        assert self._tasks is not None
        dialling = self._dial(link, after)
        try:
            self._link_tasks[link.worker_id] = self._tasks.create_task(dialling)
        except RuntimeError:
            dialling.close()
            raise OutOfOrder("this leadership is just ending") from None
        self.links[link.worker_id] = link

    async def _dial(self, link: WorkerLink, after: "asyncio.Task[None] | None") -> None:
        """Nothing is computed with other weights before a successor of this leader would know."""
        if after is not None:
            await asyncio.wait({after})
        await self._session.renewal.is_known(self.weights_digest)
        await link.run()

    # What links report

    def link_opened(self, link: WorkerLink) -> None:
        self._expected.pop(link.address, None)
        spec = wire.spec_from_proto(link.worker)
        self._session.tell(WorkerJoined(worker_id=link.worker_id, spec=spec))
        if link.is_draining:
            # It said so before its stream broke.
            self._session.tell(WorkerDraining(worker_id=link.worker_id))
        log.info("worker.joined", worker_id=link.worker_id, address=link.address)

    def link_closed(self, link: WorkerLink, reason: str, *, is_crash: bool | None) -> None:
        if link.worker_id in self._core.workers:
            self._lose(link, reason, is_crash=is_crash)

    def link_refused(self, link: WorkerLink, epoch: int) -> None:
        log.warning("leadership.outranked", worker_id=link.worker_id, epoch=epoch)
        self._session.outranked(epoch)

    def step_arrived(self, link: WorkerLink, result: StepMessage) -> None:
        # As good as a heartbeat, and a busy worker's may be late.
        link.silent_ns = 0
        self._session.step_arrived(link, result)

    def plan_written(self, link: WorkerLink, after_ns: int) -> None:
        self._meters.spent("send", after_ns)

    # Silence

    def tick(self) -> None:
        """Time has passed: only what we could have heard is silence."""
        before_ns, self._ticked_ns = self._ticked_ns, self._clock.monotonic_ns()
        passed_ns = min(self._ticked_ns - before_ns, TICK_NS_COUNTED_MAX)
        timeout_ns = self._session.settings.worker_timeout_ms * 1_000_000
        links, workers = list(self.links.values()), self._core.workers
        for link, finding in look_at(links, workers, passed_ns=passed_ns, timeout_ns=timeout_ns):
            self._conclude(link, finding)
        for worker_id, why in self._targets.look(self._core.config, workers.values()):
            log.warning("itl_target.missed", worker_id=worker_id, reason=why)
        waiting = self._core.waiting
        flex_waits = bool(waiting.num_admissible) and not waiting.has_non_flex
        for worker_id, why in self._targets.look_at_gap(
            self._core.config, workers.values(), flex_waits=flex_waits
        ):
            log.warning("batch_gap.full", worker_id=worker_id, reason=why)

    def _conclude(self, link: WorkerLink, finding: Finding) -> None:
        match finding:
            case Finding.LATE:
                log.warning("worker.late", worker_id=link.worker_id, waited_ns=link.waited_ns)
                self._session.tell(WorkerLate(worker_id=link.worker_id))
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

    def _lose(self, link: WorkerLink, reason: str, *, is_crash: bool | None) -> None:
        """Tell the core: of a worker that it has lost already, what became of its process."""
        is_here = link.worker_id in self._core.workers
        event = "worker.lost" if is_here else "worker.judged"
        log.warning(event, worker_id=link.worker_id, reason=reason, is_crash=is_crash)
        if is_here or is_crash:
            self._meters.lost_worker(is_crash=is_crash)
        if self._tracing is not None:
            self._tracing.lost(link.worker_id)
        self._session.tell(WorkerLost(worker_id=link.worker_id, is_crash=is_crash, reason=reason))
