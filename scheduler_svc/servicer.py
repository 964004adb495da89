"""SchedulerService: workers announce themselves here, and operators look in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import deepcopy
from typing import Any, Final

from kaiten.v1 import common_pb2
from kaiten.v1.scheduler_service_pb2 import (
    ConfigureResponse,
    GetStateResponse,
    HeartbeatResponse,
    ReadArchiveResponse,
    ReadTimelineResponse,
    RegisterResponse,
    RehearseResponse,
    ReplayTimelineResponse,
    StandByResponse,
    WorkerState,
)
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer
from kaiten.v1.watch_pb2 import WatchedSteps, WatchResponse
from ledger import Leader
from scheduler_svc import archiving
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.leader_session import LeaderSession
from scheduler_svc.live_view_wire import steps_to_proto
from scheduler_svc.membership import TEXT_CHARS_MAX, check_registration
from scheduler_svc.rehearsal import asks_from_proto, configured_for, rehearse
from scheduler_svc.replaying import replayed
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.timeline_intervals import mentioned, timelines_of
from scheduler_svc.timeline_wire import timeline_to_proto
from service_kit.addresses import problem_of, unix_path
from service_kit.errors import InvalidRequest, NotFound, NotLeader
from service_kit.grpc_health import AtMost

STANDBYS_MAX: Final = 64
# Each holds a segment in memory.
ARCHIVE_READERS_MAX: Final = 4
# Each holds a view in memory.
WATCHERS_MAX: Final = 16
# At once; each takes a thread for a fraction of a second.
EXPLAINED_MAX: Final = 4
# Each takes a process for up to a minute.
REPLAYED_MAX: Final = 2
# Takes a thread for up to a second.
REHEARSED_MAX: Final = 1


class Servicer(SchedulerServiceServicer):
    """Answers for the session that leads now, if any; a standby sends workers to the leader."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.session: LeaderSession | None = None
        self.leader_address = ""
        self._settings = settings
        self._readers = AtMost(ARCHIVE_READERS_MAX, "readers of the archive")
        self._watchers = AtMost(WATCHERS_MAX, "watchers")
        self._explained = AtMost(EXPLAINED_MAX, "requests that are explained")
        self._replayed = AtMost(REPLAYED_MAX, "replays of archives")
        self._rehearsed = AtMost(REHEARSED_MAX, "rehearsals")
        self._leader: Leader | None = None
        self._is_over = asyncio.Event()
        self._standbys = AtMost(STANDBYS_MAX, "standbys")
        # Of those, by their streams.
        self.standby_addresses: dict[object, str] = {}

    def begin(self, leader: Leader) -> None:
        """We were elected. Who stands by may know; workers may come when there is a session."""
        self._leader, self._is_over = leader, asyncio.Event()

    def end(self) -> None:
        """We lead no more."""
        self.session = self._leader = None
        self._is_over.set()

    async def Register(self, request: Any, context: Any) -> RegisterResponse:
        check_registration(request)
        if unix_path(request.address) is not None and self._settings.grpc_socket is None:
            # It may come from anywhere, and would have us open files of this machine.
            raise InvalidRequest("address", "must be host:port: this scheduler listens on a port")
        with self._leading().called() as session:
            session.roster.register(request.address, request.worker)
        return RegisterResponse(heartbeat_interval_ms=self._settings.heartbeat_interval_ms)

    async def Heartbeat(self, request: Any, context: Any) -> HeartbeatResponse:
        with self._leading().called() as session:
            is_drained = session.roster.heartbeat(request.boot_id, is_draining=request.is_draining)
        if is_drained is None:
            return HeartbeatResponse(must_register=True)
        return HeartbeatResponse(is_drained=is_drained)

    async def StandBy(self, request: Any, context: Any) -> AsyncIterator[StandByResponse]:
        with self._standbys:
            if (leader := self._leader) is None:
                raise NotLeader(self.leader_address)
            is_over = self._is_over
            # Gateways dial it.
            address = request.address[:TEXT_CHARS_MAX]
            self.standby_addresses[context] = "" if problem_of(address) else address
            try:
                yield StandByResponse(leader=_leader(leader))
                await is_over.wait()
            finally:
                del self.standby_addresses[context]

    async def GetState(self, request: Any, context: Any) -> GetStateResponse:
        if self.session is None:
            return GetStateResponse(is_leader=False, policy=self._settings.policy)
        leader, core = self.session.leader, self.session.core
        return GetStateResponse(
            is_leader=True,
            leader=_leader(leader),
            journal_seq=self.session.journal_seq,
            waiting=len(core.waiting),
            running=core.running_count,
            policy=self.session.settings.policy,
            workers=[
                self._worker(self.session, worker_id) for worker_id in self.session.roster.links
            ],
        )

    async def Configure(self, request: Any, context: Any) -> ConfigureResponse:
        # What is refused is no error of the leader's.
        settings = self._leading().settings.changed(request.settings)
        # First: what could not be written down must not be decided by.
        response = ConfigureResponse(configured=configured_to_proto(settings.configured))
        with self._leading().called() as session:
            session.configure(settings)
        return response

    async def ReadArchive(self, request: Any, context: Any) -> AsyncIterator[ReadArchiveResponse]:
        with self._readers:
            async for entries in archiving.read(self._settings, request):
                yield ReadArchiveResponse(entries=entries)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[WatchResponse]:
        with self._watchers:
            watching, is_over = self._leading().watching, self._is_over
            async with aclosing(watching.changes(request, is_over)) as changes:
                async for response in changes:
                    yield response
            raise NotLeader(self.leader_address)

    async def ReadTimeline(self, request: Any, context: Any) -> ReadTimelineResponse:
        with self._explained:
            session = self._leading()
            known, now_ns = session.timelines, session.now_ns()
            tracks = known.tracks(request.id)
            traceparent = session.traceparent_of(tracks[0].sequence_id) if tracks else ""
            timelines = await asyncio.to_thread(timelines_of, known.snapshot(request.id, now_ns))
        if not timelines:
            raise NotFound(f"a timeline of request {request.id[:TEXT_CHARS_MAX]!r}")
        names = known.names(mentioned(timelines))
        told = [timeline_to_proto(each, names) for each in timelines]
        return ReadTimelineResponse(choices=told, traceparent=traceparent)

    async def ReplayTimeline(self, request: Any, context: Any) -> ReplayTimelineResponse:
        self._leading()
        with self._replayed:
            others = [address for address in self.standby_addresses.values() if address]
            return await replayed(self._settings, request, others)

    async def Rehearse(self, request: Any, context: Any) -> RehearseResponse:
        asks = asks_from_proto(request)
        with self._rehearsed:
            session = self._leading()
            if (worker := session.core.workers.get(request.worker_id)) is None:
                raise NotFound(f"worker {request.worker_id[:TEXT_CHARS_MAX]!r}")
            configured = configured_for(session.settings.configured, request.policy)
            spec, cost = worker.spec, deepcopy(worker.cost)
            notes = await asyncio.to_thread(
                rehearse, configured, spec, cost, asks, request.between_us
            )
        return RehearseResponse(
            configured=configured_to_proto(configured),
            steps=next(steps_to_proto(notes, 0), WatchedSteps()),
        )

    def _leading(self) -> LeaderSession:
        if self.session is None:
            raise NotLeader(self.leader_address)
        return self.session

    def _worker(self, session: LeaderSession, worker_id: str) -> WorkerState:
        link = session.roster.links[worker_id]
        state = WorkerState(
            worker_id=worker_id,
            address=link.address,
            is_connected=link.is_open,
            description=link.worker,
        )
        if (worker := session.core.workers.get(worker_id)) is not None:
            state.running = len(worker.running)
            state.blocks_free = worker.kv.free_count
            state.block_count = worker.kv.block_count
            state.plans_in_flight = len(worker.flights)
        return state


def _leader(leader: Leader) -> common_pb2.Leader:
    return common_pb2.Leader(epoch=leader.epoch, nonce=leader.nonce)
