"""Everything as it is deployed: store, scheduler, a worker with the shipped model, gateways.

Real processes, and no event loop of its own: synchronous and asynchronous tests share one stack.
`check` is what must hold after any story: all processes alive and without a fault of their own in
the log, nothing live, every block free, and the golden request answered as on the first day.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx

from kaiten.local.ports import HeldPort
from kaiten.mini import CHECKPOINT
from kaiten.v1.scheduler_service_pb2 import GetStateRequest, GetStateResponse
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from ledger import Ledger
from tests.support.answers import POLL_S_MAX, REST_OF_WAIT
from tests.support.cluster import SCHEDULER_FLAGS, Flags, argv_of
from tests.support.held_steps import held
from tests.support.processes import GATEWAY, HELD_WORKER, SCHEDULER, WORKER, ServiceProcess
from tests.support.store_server import StoreServer, store_folder

MODEL = "mini"
WAIT_S = 60.0
POLL_S = 0.02
# How long a step may be is said: finding it out by running some is half of a worker's start.
WORKER_FLAGS: Flags = {
    "model": CHECKPOINT,
    "slots": 16,
    "threads": 1,
    "kv_blocks": 512,
    "step_tokens": 512,
}
GOLDEN = {"model": MODEL, "prompt": "The chef", "max_tokens": 24, "temperature": 0}
# What a service writes when something happened that it has no name for.
FAULTS = ('"level": "critical"', "internal error", "http.crashed", "rpc.crashed", "Traceback (")


def wait_until(question: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for a condition, without an event loop."""
    began_at = time.monotonic()
    while not question():
        waited_s = time.monotonic() - began_at
        assert waited_s < timeout_s, f"still not after {timeout_s:g} s: {what}"
        time.sleep(min(max(POLL_S, REST_OF_WAIT * waited_s), POLL_S_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One gateway and where it answers."""

    process: ServiceProcess
    grpc: str
    http: str

    @property
    def openai(self) -> str:
        """What OpenAI's client calls base_url."""
        return f"{self.http}/v1"

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.http}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        def is_settled() -> bool:
            assert self.process.is_alive, f"{self.process.name} ended: {self.process.log()[-2000:]}"
            return self.is_ready()

        wait_until(is_settled, f"{self.process.name} is ready")


class WholeStack:
    """Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        gateway_flags: Flags | None = None,
        worker_flags: Flags | None = None,
        scheduler_flags: Flags | None = None,
        worker_module: str = WORKER,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._held = ExitStack()
        self.store = StoreServer(self._held.enter_context(store_folder(folder / "store")))
        scheduler, worker = self.hold_port(), self.hold_port()
        self.scheduler_address, self.worker_address = scheduler.address, worker.address
        flags: Flags = {
            "redis_url": self.store.url,
            "grpc_port": scheduler.number,
            **SCHEDULER_FLAGS,
            # Nobody dies here unseen: who is silent has been put aside. Beats as in a deployment:
            # ten a second, of four stacks that stand for minutes, are dear.
            "lease_ttl_s": 30.0,
            "heartbeat_interval_ms": 500,
            "worker_timeout_ms": 60_000,
            **(scheduler_flags or {}),
        }
        self.scheduler = self._process("scheduler", SCHEDULER, flags)
        flags = {"scheduler": scheduler.address, "grpc_port": worker.number, **WORKER_FLAGS}
        self._lock = folder / "held"
        if worker_module == HELD_WORKER:
            flags |= {"lock": self._lock}
        self.worker = self._process("worker", worker_module, {**flags, **(worker_flags or {})})
        self.doors: list[Door] = []
        self.door = self.add_gateway(**(gateway_flags or {}))
        self.golden: dict[str, Any] = {}

    def add_gateway(self, **flags: object) -> Door:
        """Another gateway of the cell. Those added to a running stack the caller starts."""
        grpc_port, http_port = self.hold_port(), self.hold_port()
        given: Flags = {
            "redis_url": self.store.url,
            "model": CHECKPOINT,
            "served_model_name": MODEL,
            # Of steps that are held.
            "stalled_ms_max": 60_000,
            "grpc_port": grpc_port.number,
            "http_port": http_port.number,
            **flags,
        }
        process = self._process(f"gateway-{len(self.doors)}", GATEWAY, given)
        http = f"http://{http_port.address}"
        self.doors.append(Door(process=process, grpc=grpc_port.address, http=http))
        return self.doors[-1]

    def hold_port(self) -> HeldPort:
        """For one of the processes, for as long as the stack stands."""
        return self._held.enter_context(HeldPort())

    def _process(self, name: str, module: str, flags: Flags) -> ServiceProcess:
        log_path = self._folder / f"{name}.log"
        return ServiceProcess(name=name, module=module, argv=argv_of(flags), log_path=log_path)

    @property
    def processes(self) -> list[ServiceProcess]:
        return [self.scheduler, self.worker, *(door.process for door in self.doors)]

    # Life

    def __enter__(self) -> Self:
        try:
            self.store.start()
            for process in self.processes:
                process.start()
            for door in self.doors:
                door.wait_ready()
            self.golden = self.answer()
        except AssertionError as error:
            self.close()
            logs = "\n".join(process.log()[-1000:] for process in self.processes)
            raise AssertionError(f"{error}\n{logs}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.store.close()
        self._held.close()

    def retire(self, door: Door) -> None:
        """End a gateway that was added for one story."""
        door.process.kill()
        self.doors.remove(door)

    @contextmanager
    def held(self, position: int = 0) -> Iterator[None]:
        """No step of this output position or a later one ends in the block, of a `HELD_WORKER`; it
        is there all the same, and requests are taken in. One that is silent would be gone for
        everybody in four seconds.
        """
        assert self.worker.module == HELD_WORKER
        with held(self._lock, position):
            yield

    # Looking

    def answer(self) -> dict[str, Any]:
        """The golden request's choice."""
        reply = httpx.post(f"{self.door.openai}/completions", json=GOLDEN, timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice

    def state(self) -> GetStateResponse:
        with grpc.insecure_channel(self.scheduler_address) as channel:
            stub = SchedulerServiceStub(channel)
            state: GetStateResponse = stub.GetState(GetStateRequest(), timeout=WAIT_S)
            return state

    def problem(self) -> str:
        """What is not as it is in an idle cell; empty: nothing."""
        state = self.state()
        if state.waiting or state.running:
            return f"{state.waiting} wait and {state.running} run"
        for worker in state.workers:
            if worker.blocks_free != worker.block_count or worker.plans_in_flight:
                return f"{worker.blocks_free} of {worker.block_count} blocks are free"
        return _in_a_thread(lambda: asyncio.run(self._ledger_problem()))

    async def _ledger_problem(self) -> str:
        ledger = await Ledger.connect(self.store.url)
        try:
            load, inbox = await ledger.load(), await ledger.inbox_all()
        finally:
            await ledger.close()
        if load.choices or load.prompt_tokens or inbox:
            return f"the ledger counts {load} with {len(inbox)} entries in the inbox"
        return ""

    def faults(self) -> list[str]:
        """Lines of any log that no service should ever write."""
        lines = (line for process in self.processes for line in process.log().splitlines())
        return [line[:2000] for line in lines if any(fault in line for fault in FAULTS)]

    def check(self) -> None:
        """What holds when every client has gone."""
        assert all(process.is_alive for process in self.processes), self.processes
        wait_until(lambda: not self.problem(), "an idle cell with every block free")
        assert not self.faults(), self.faults()[:3]
        assert self.answer() == self.golden
        # A look at the store that took long is a moment of not being ready.
        for door in self.doors:
            door.wait_ready()


def _in_a_thread(work: Callable[[], str]) -> str:
    """A loop of its own, whether or not the caller runs inside one."""
    outcome: list[str] = []
    thread = threading.Thread(target=partial(_keep, work, outcome))
    thread.start()
    thread.join(WAIT_S)
    assert outcome, "the ledger did not answer"
    return outcome[0]


def _keep(work: Callable[[], str], outcome: list[str]) -> None:
    outcome.append(work())
