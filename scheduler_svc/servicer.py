"""SchedulerService: workers announce themselves here, and operators look in."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from ledger import Leader
from protos.kaiten.v1 import common_pb2
from protos.kaiten.v1.scheduler_service_pb2 import (
    ConfigureResponse,
    GetStateResponse,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    StandByResponse,
    WorkerState,
)
from protos.kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceServicer
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.leader_session import LeaderSession
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire import PLAN_VERSION
from service_kit.errors import InvalidRequest, NotLeader
from service_kit.grpc_health import AtMost

UINT32_MAX: Final = (1 << 32) - 1
TEXT_CHARS_MAX: Final = 1024
# Every sequence has KV places for so many in reserve.
SLOT_TOKENS_MAX: Final = 256
FEATURES_MAX: Final = 64
# What the core takes for granted of a worker: with nothing to divide by or to seat it would end,
# and it keeps books of every block and every slot.
RANGES: Final = {
    "block_size": (1, 1 << 16),
    "block_count": (1, 1 << 22),
    "slots_max": (1, 1 << 14),
    "vocab_size": (1, UINT32_MAX),
    # A prompt token and an output token.
    "context_tokens_max": (2, UINT32_MAX),
}
# Every sequence has a block table for each.
LAYER_GROUPS_MAX: Final = 64
STANDBYS_MAX: Final = 64


class Servicer(SchedulerServiceServicer):
    """Answers for the session that leads now, if any; a standby sends workers to the leader."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.session: LeaderSession | None = None
        self.leader_address = ""
        self._settings = settings
        self._leader: Leader | None = None
        self._is_over = asyncio.Event()
        self._standbys = AtMost(STANDBYS_MAX, "standbys")

    def begin(self, leader: Leader) -> None:
        """We were elected. Who stands by may know; workers may come when there is a session."""
        self._leader, self._is_over = leader, asyncio.Event()

    def end(self) -> None:
        """We lead no more."""
        self.session = self._leader = None
        self._is_over.set()

    async def Register(self, request: Any, context: Any) -> RegisterResponse:
        if not request.address or not request.worker.boot_id:
            raise InvalidRequest("address, worker.boot_id", "must not be empty")
        _check_texts(request)
        _check_ranges(request.worker)
        _check_budgets(request.worker)
        _check_capabilities(request.worker.capabilities)
        with self._leading().called() as session:
            session.register(request.address, request.worker)
        return RegisterResponse(heartbeat_interval_ms=self._settings.heartbeat_interval_ms)

    async def Heartbeat(self, request: Any, context: Any) -> HeartbeatResponse:
        with self._leading().called() as session:
            is_drained = session.heartbeat(request.boot_id, is_draining=request.is_draining)
        if is_drained is None:
            return HeartbeatResponse(must_register=True)
        return HeartbeatResponse(is_drained=is_drained)

    async def StandBy(self, request: Any, context: Any) -> AsyncIterator[StandByResponse]:
        with self._standbys:
            if (leader := self._leader) is None:
                raise NotLeader(self.leader_address)
            is_over = self._is_over
            yield StandByResponse(leader=_leader(leader))
            await is_over.wait()

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
            workers=[self._worker(self.session, worker_id) for worker_id in self.session.links],
        )

    async def Configure(self, request: Any, context: Any) -> ConfigureResponse:
        # What is refused is no error of the leader's.
        settings = self._leading().settings.changed(request.settings)
        with self._leading().called() as session:
            session.configure(settings)
        return ConfigureResponse(configured=configured_to_proto(settings.configured))

    def _leading(self) -> LeaderSession:
        if self.session is None:
            raise NotLeader(self.leader_address)
        return self.session

    def _worker(self, session: LeaderSession, worker_id: str) -> WorkerState:
        link = session.links[worker_id]
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


def _check_texts(request: RegisterRequest) -> None:
    """InvalidRequest for the first text that is too long: every renewal carries them."""
    texts = {"address": request.address}
    for field, value in request.worker.ListFields():
        if isinstance(value, str):
            texts[f"worker.{field.name}"] = value
    for name, text in texts.items():
        if len(text) > TEXT_CHARS_MAX:
            rule = f"must have at most {TEXT_CHARS_MAX} characters, got {len(text)}"
            raise InvalidRequest(name, rule)


def _check_ranges(worker: common_pb2.WorkerDescription) -> None:
    """InvalidRequest for the first figure that no worker can have."""
    for field, (least, most) in RANGES.items():
        if not least <= (value := getattr(worker, field)) <= most:
            raise InvalidRequest(f"worker.{field}", f"must be in [{least}, {most}], got {value}")
    if (count := len(worker.capabilities.layer_groups)) > LAYER_GROUPS_MAX:
        rule = f"must be at most {LAYER_GROUPS_MAX}, got {count}"
        raise InvalidRequest("worker.capabilities.layer_groups", rule)


def _check_budgets(worker: common_pb2.WorkerDescription) -> None:
    """InvalidRequest unless every kind of step has room for a prompt beside the rows."""
    most = worker.capabilities.slot_tokens_max or 1
    if most > SLOT_TOKENS_MAX:
        rule = f"must be at most {SLOT_TOKENS_MAX}, got {most}"
        raise InvalidRequest("worker.capabilities.slot_tokens_max", rule)
    rows, of = worker.slots_max * most, "slots_max" if most == 1 else f"{most} times slots_max"
    if worker.step_tokens_max <= rows:
        rule = f"must be more than {of}, got {worker.step_tokens_max}"
        raise InvalidRequest("worker.step_tokens_max", rule)
    mixed = worker.mixed_tokens_max
    if mixed and not rows < mixed <= worker.step_tokens_max:
        rule = f"must be 0, or more than {of} and at most step_tokens_max, got {mixed}"
        raise InvalidRequest("worker.mixed_tokens_max", rule)


def _check_capabilities(told: common_pb2.Capabilities) -> None:
    """InvalidRequest for a worker that does not read the plans that are written here."""
    if (count := len(told.features)) > FEATURES_MAX:
        rule = f"must have at most {FEATURES_MAX}, got {count}"
        raise InvalidRequest("worker.capabilities.features", rule)
    if (version := told.plan_version) < PLAN_VERSION:
        rule = (
            f"must be at least {PLAN_VERSION}, got {version}: this scheduler writes plans that the "
            "worker does not read; update the worker first"
        )
        raise InvalidRequest("worker.capabilities.plan_version", rule)
