"""A worker process's life as a scheduler sees it: register, heartbeat, failures, drain."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.service import registration
from gpu_worker.service.process import WorkerProcess
from kaiten.local.health import state_of
from kaiten.local.ports import HeldPort
from kaiten.v1 import (
    scheduler_service_pb2,
    scheduler_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from service_kit.errors import NotLeader
from service_kit.grpc_health import REGISTERED
from service_kit.grpc_server import bind, create_server
from tests.fakes.mock_worker import MockSettings, load_mock
from tests.support.processes import WORKER, ServiceProcess
from tests.support.random_model import write_random_model
from tests.support.worker_server import description

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes a second is no leader to leave here: the scheduler is on the same loop."""
    monkeypatch.setattr(registration, "_RPC_S_MAX", WAIT_S)


@dataclass
class FakeScheduler(scheduler_service_pb2_grpc.SchedulerServiceServicer):
    """Counts what workers say; a test changes what it answers."""

    leader_address: str | None = None
    must_register: bool = False
    is_drained: bool = False
    registered: list[Any] = field(default_factory=list)
    heartbeats: list[Any] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Heartbeats are heard at once and answered while this is set.
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def Register(self, request: Any, _context: Any) -> Any:
        if self.leader_address is not None:
            raise NotLeader(self.leader_address)
        self.registered.append(request)
        self.must_register = False
        self._wake()
        return scheduler_service_pb2.RegisterResponse(heartbeat_interval_ms=20)

    async def Heartbeat(self, request: Any, _context: Any) -> Any:
        self.heartbeats.append(request)
        self._wake()
        await self.may_answer.wait()
        return scheduler_service_pb2.HeartbeatResponse(
            must_register=self.must_register, is_drained=self.is_drained
        )

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.changed.wait()


@asynccontextmanager
async def scheduler_at(fake: FakeScheduler, port: int = 0) -> AsyncIterator[int]:
    server = create_server()
    scheduler_service_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    bound = bind(server, "127.0.0.1", port)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "tiny")


@asynccontextmanager
async def worker(model: Path, *ports: int, **chosen: Any) -> AsyncIterator[WorkerProcess]:
    """A started worker whose `serve` runs."""
    schedulers = tuple(f"127.0.0.1:{port}" for port in ports)
    settings = MockSettings(
        **{"model": str(model), "scheduler": schedulers, "step_ms": 0, **chosen}
    )
    process = WorkerProcess(settings, load_mock)
    await process.start()
    serving = asyncio.create_task(process.serve())
    try:
        yield process
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await process.stop()


async def test_it_registers_with_an_address_that_answers(model: Path) -> None:
    fake = FakeScheduler()
    async with scheduler_at(fake) as port, worker(model, port):
        await fake.until(lambda: len(fake.heartbeats) >= 2)
        request = fake.registered[0]
        async with grpc.aio.insecure_channel(request.address) as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            answer = await stub.Describe(worker_service_pb2.DescribeRequest(), timeout=WAIT_S)
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="kaiten.v1.WorkerService"), timeout=WAIT_S
            )
        assert answer.worker == request.worker
        assert request.worker.boot_id == fake.heartbeats[0].boot_id
        assert (request.worker.model, request.worker.vocab_size) == ("tiny", 97)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert len(fake.registered) == 1


async def test_whom_no_leader_has_taken_in_says_so(model: Path) -> None:
    """It serves, and none is to be ended in its favour: a rollout of workers that are refused."""
    fake = FakeScheduler(leader_address="")
    with HeldPort() as own:
        async with scheduler_at(fake) as port, worker(model, port, grpc_port=own.number) as process:
            address = f"127.0.0.1:{own.number}"
            assert await state_of(address) == "serving"
            refused = "not serving: no leader has taken it in; its log says why"
            assert await state_of(address, REGISTERED) == refused
            fake.leader_address = None
            await fake.until(lambda: len(fake.heartbeats) >= 1)
            assert await state_of(address, REGISTERED) == "serving"
            process._leave("it is draining")
            assert await state_of(address, REGISTERED) == "not serving: it is draining"


async def test_it_registers_again_when_told(model: Path) -> None:
    fake = FakeScheduler()
    async with scheduler_at(fake) as port, worker(model, port):
        await fake.until(lambda: len(fake.registered) == 1)
        fake.must_register = True
        await fake.until(lambda: len(fake.registered) == 2)
        assert fake.registered[0] == fake.registered[1]


async def test_it_registers_again_when_the_scheduler_comes_back(model: Path) -> None:
    # A scheduler that has just started knows nobody.
    first, second = FakeScheduler(), FakeScheduler(must_register=True)
    async with AsyncExitStack() as stack:
        port = stack.enter_context(HeldPort()).number
        async with scheduler_at(first, port):
            await stack.enter_async_context(worker(model, port))
            await first.until(lambda: len(first.heartbeats) >= 1)
        async with scheduler_at(second, port):
            await second.until(lambda: len(second.registered) >= 1)
    assert second.registered == first.registered


async def test_it_follows_a_standby_to_the_leader(model: Path) -> None:
    leader = FakeScheduler()
    async with scheduler_at(leader) as leader_port:
        standby = FakeScheduler(leader_address=f"127.0.0.1:{leader_port}")
        async with scheduler_at(standby) as port, worker(model, port):
            await leader.until(lambda: len(leader.registered) == 1)
    assert standby.registered == []


async def test_one_name_may_stand_for_several_schedulers(model: Path) -> None:
    """As replicas of a container do: whichever of the name's addresses answers leads the way."""
    leader = FakeScheduler()
    async with scheduler_at(leader) as leader_port:
        standby = FakeScheduler(leader_address=f"127.0.0.1:{leader_port}")
        async with scheduler_at(standby) as port:
            name = f"ipv4:127.0.0.1:{port},127.0.0.1:{leader_port}"
            async with worker(model, scheduler=(name,)):
                await leader.until(lambda: len(leader.heartbeats) >= 1)
    assert standby.registered == []


async def test_bound_to_a_wildcard_it_tells_an_address_that_answers(model: Path) -> None:
    fake = FakeScheduler()
    async with (
        scheduler_at(fake) as port,
        worker(model, port, grpc_host="0.0.0.0", allow_anyone=True),
    ):
        await fake.until(lambda: len(fake.registered) == 1)
        assert fake.registered[0].address.startswith("127.0.0.1:")


async def test_it_tries_each_configured_scheduler(model: Path) -> None:
    fake = FakeScheduler()
    async with scheduler_at(fake) as port, worker(model, 1, port):
        await fake.until(lambda: len(fake.registered) == 1)


async def test_drain_waits_until_everything_was_moved(model: Path) -> None:
    fake = FakeScheduler()
    async with scheduler_at(fake) as port, worker(model, port) as process:
        await fake.until(lambda: len(fake.heartbeats) >= 1)
        draining = asyncio.create_task(process.drain())
        seen = len(fake.heartbeats)
        await fake.until(lambda: len(fake.heartbeats) >= seen + 2)
        assert fake.heartbeats[-1].is_draining
        assert not draining.done()
        fake.is_drained = True
        await asyncio.wait_for(draining, WAIT_S)


async def test_an_answer_to_an_earlier_heartbeat_does_not_end_the_drain(model: Path) -> None:
    fake = FakeScheduler(is_drained=True)
    fake.may_answer.clear()
    async with scheduler_at(fake) as port, worker(model, port) as process:
        await fake.until(lambda: len(fake.heartbeats) == 1)
        draining = asyncio.create_task(process.drain())
        await asyncio.sleep(0)  # it has begun
        fake.may_answer.set()
        await asyncio.wait_for(draining, WAIT_S)
        assert fake.heartbeats[-1].is_draining


async def test_drain_ends_at_once_when_nobody_knows_the_worker(model: Path) -> None:
    async with worker(model, 1) as process:
        await asyncio.wait_for(process.drain(), WAIT_S)


async def test_drain_gives_up_on_a_scheduler_that_is_gone(model: Path) -> None:
    fake = FakeScheduler()
    async with AsyncExitStack() as stack:
        async with scheduler_at(fake) as port:
            process = await stack.enter_async_context(worker(model, port))
            await fake.until(lambda: len(fake.heartbeats) >= 1)
        await asyncio.wait_for(process.drain(), WAIT_S)


async def test_sigterm_drains_and_exits(model: Path, tmp_path: Path) -> None:
    """The whole process, as a supervisor starts and stops it."""
    fake = FakeScheduler(is_drained=True)
    async with scheduler_at(fake) as port:
        flags = ["--model", str(model), "--scheduler", f"127.0.0.1:{port}", "--threads", "1"]
        log_path = tmp_path / "worker.log"
        child = ServiceProcess(name="worker", module=WORKER, argv=flags, log_path=log_path)
        child.start()
        try:
            async with asyncio.timeout(3 * WAIT_S):
                while not fake.heartbeats:
                    await fake.changed.wait()
                child.send(signal.SIGTERM)
                assert await asyncio.to_thread(child.join) == 0, child.log()
        finally:
            child.kill()
    assert fake.heartbeats[-1].is_draining
    assert '"service.ready"' in child.log()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nowhere"), "no such folder"),
        (("--model", "{model}", "--slots", "64", "--step-tokens", "64"), "more than slots"),
        (("--model", "{model}", "--kv-memory-mb", "0.001"), "holds no KV block"),
        (("--model", "{model}", "--kv-host-memory-mb", "0.001"), "0.001 holds no KV block"),
        (("--model", "{model}", "--kv-host-memory-mb", "1e9"), "1e+09 is more than the"),
        (("--model", "{model}", "--modle", "x"), "Did you mean --model?"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    model: Path, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    worker = ServiceProcess(
        name="worker",
        module=WORKER,
        argv=[argument.format(model=model) for argument in arguments],
        log_path=tmp_path / "log",
    )
    worker.start()
    assert worker.join() == 2, worker.log()
    assert said in json.loads(worker.log().splitlines()[-1])["reason"]
    assert "Traceback" not in worker.log()


async def test_a_scheduler_may_stay_away_for_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """More failures in a row than a float has doublings: nine minutes at the real pace."""
    monkeypatch.setattr(registration, "_BACKOFF_S_MAX", 0.0)
    tries = 0
    enough = asyncio.Event()

    async def address_for(_scheduler: str) -> str:
        nonlocal tries
        tries += 1
        if tries > 1100:
            enough.set()
        return "127.0.0.1:1"

    limits = RowLimits(
        slots=1, vocab_size=9, context_tokens=16, block_count=1, block_size=16, step_tokens=2
    )
    registrar = registration.Registrar(
        ["127.0.0.1:9"], address_for=address_for, description=description(limits)
    )
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as group:
        running = group.create_task(registrar.run())
        await enough.wait()
        running.cancel()
