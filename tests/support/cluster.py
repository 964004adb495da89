"""A whole cell of real processes: store, schedulers, workers, and whoever else talks to the ledger.

    async with Cluster(tmp_path, workers=2) as cluster:
        answer = await cluster.submit(prompt_tokens=5, max_tokens=20)
        await answer.has_tokens(3)
        cluster.workers[0].kill()

Leaving the block waits for every answer and then checks what must hold after any story: one end
per choice, tokens as computed by an undisturbed run, nothing live in the ledger, every block free.
`is_checked=False` leaves that out, for stories that end in ruins.
"""

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from kaiten.client import AsyncClient
from kaiten.client.errors import UnavailableError
from kaiten.local.ports import HeldPort
from kaiten.mini import CHECKPOINT
from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.scheduler_service_pb2 import GetStateRequest, GetStateResponse
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import Follower, Ledger, LedgerLimits
from tests.fakes.mock_worker import mock_token_ids
from tests.support.answers import WAIT_S, Answer, until
from tests.support.processes import MOCK_WORKER, SCHEDULER, ServiceProcess, events
from tests.support.store_server import StoreServer, store_folder

LEASE_TTL_S = 2.0
Flags = Mapping[str, object]

# Impatient with schedulers, so that a story of failures is short, and with followers, so that those
# who were away have something to catch up with. A worker is silent by being put
# aside for seconds, too: a story of a frozen one says how long that may take.
SCHEDULER_FLAGS: Flags = {
    "lease_ttl_s": LEASE_TTL_S,
    "journal_s": 0,
    "heartbeat_interval_ms": 100,
    "worker_timeout_ms": 20_000,
}
# Nobody who is put aside loses it by right.
UNDISTURBED: Flags = {"lease_ttl_s": 60.0}
IMPATIENT: Flags = {"worker_timeout_ms": 1500}
WORKER_FLAGS: Flags = {"model": CHECKPOINT, "slots": 16, "step_ms": 2.6, "kv_blocks": 512}


def argv_of(flags: Flags) -> list[str]:
    """`{"grpc_port": 1, "archive": True}` is `--grpc-port 1 --archive`."""
    argv: list[str] = []
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return argv


@lru_cache(maxsize=4096)
def gold(sequence_id: int, count: int) -> list[int]:
    """What a mock worker says for a sequence when nothing disturbs it."""
    return mock_token_ids(CHECKPOINT, sequence_id, count)


class Store(Protocol):
    """What a cell needs of its store, be it one server or several."""

    folder: Path

    @property
    def url(self) -> str: ...

    def start(self) -> object: ...

    def close(self) -> None: ...


class Cluster:
    """Starts everything, keeps every answer, checks the end."""

    def __init__(
        self,
        folder: Path,
        *,
        schedulers: int = 1,
        workers: int = 1,
        scheduler_flags: Flags | None = None,
        scheduler_module: str = SCHEDULER,
        worker_flags: Flags | None = None,
        limits: LedgerLimits | None = None,
        is_started: bool = True,
        store: Store | None = None,
    ) -> None:
        self.folder = folder
        self.is_checked = True
        # Whose log may tell of a crash.
        self.may_crash: list[ServiceProcess] = []
        self._is_started = is_started
        self.schedulers: list[ServiceProcess] = []
        self.workers: list[ServiceProcess] = []
        self.others: list[ServiceProcess] = []
        self.answers: list[Answer] = []
        self._held = ExitStack()
        self._store = store or StoreServer(self._held.enter_context(store_folder(folder / "store")))
        self.scheduler_addresses = [self.hold_port().address for _ in range(schedulers)]
        # Who is put aside for long asks again.
        self._limits = limits or LedgerLimits(retry_s=WAIT_S, operation_timeout_s=WAIT_S)
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        for _ in range(schedulers):
            self.add_scheduler(scheduler_flags or {}, scheduler_module)
        for _ in range(workers):
            self.add_worker(worker_flags or {})

    @property
    def store(self) -> StoreServer:
        """To be hurt; of a story with several servers, these know how."""
        assert isinstance(self._store, StoreServer)
        return self._store

    def gates(self, *positions: object) -> Path:
        """Where mock workers are told to wait before they compute any of these positions.

        A story that ends a process in the middle of something needs no luck then: until a gate is
        removed nothing goes beyond it.
        """
        folder = self.folder / "gates"
        folder.mkdir(parents=True, exist_ok=True)
        for position in positions:
            (folder / str(position)).touch()
        return folder

    def open_gates(self) -> None:
        """Everybody goes on."""
        for gate in self.gates().iterdir():
            gate.unlink()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No worker that was told of the gates begins a step. A block in a block is fine."""
        gate = self.gates() / "any"
        is_outer = not gate.exists()
        gate.touch()
        try:
            yield
        finally:
            if is_outer:
                gate.unlink()

    def hold_port(self) -> HeldPort:
        """For one of the processes, for as long as the cluster stands."""
        return self._held.enter_context(HeldPort())

    # Parts; added ones are started by the caller

    def add(self, name: str, module: str, flags: Flags) -> ServiceProcess:
        """Any other service (a gateway); ended with the cluster."""
        process = self._process(name, module, flags)
        self.others.append(process)
        return process

    def add_scheduler(self, flags: Flags, module: str = SCHEDULER) -> ServiceProcess:
        index = len(self.schedulers)
        port = self.scheduler_addresses[index].rpartition(":")[2]
        flags = {"redis_url": self._store.url, "grpc_port": port, **SCHEDULER_FLAGS, **flags}
        self.schedulers.append(self._process(f"scheduler-{index}", module, flags))
        return self.schedulers[-1]

    def add_worker(self, flags: Flags, module: str = MOCK_WORKER) -> ServiceProcess:
        base = WORKER_FLAGS if module == MOCK_WORKER else {}
        flags = {"scheduler": ",".join(self.scheduler_addresses), **base, **flags}
        self.workers.append(self._process(f"worker-{len(self.workers)}", module, flags))
        return self.workers[-1]

    def _process(self, name: str, module: str, flags: Flags) -> ServiceProcess:
        log_path = self.folder / f"{name}.log"
        return ServiceProcess(name=name, module=module, argv=argv_of(flags), log_path=log_path)

    @property
    def processes(self) -> list[ServiceProcess]:
        return [*self.others, *self.schedulers, *self.workers]

    # Life

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if self._is_started:
                await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def _start(self) -> None:
        self._store.start()
        for process in (*self.schedulers, *self.workers):
            process.start()
        await self.connect()
        await self.ready(workers=len(self.workers))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self.is_checked:
                await self.check()
        finally:
            await self._close()

    async def connect(self) -> None:
        """A ledger and a follower of our own, as a gateway has. Again after the store was lost."""
        await self._disconnect()
        self.ledger = await Ledger.connect(self._store.url, limits=self._limits)
        await self.ledger.check()
        self.follower = Follower(self.ledger)
        self._tasks.append(asyncio.create_task(self.follower.run()))

    async def ready(self, *, workers: int) -> None:
        """Somebody leads, and so many workers are connected."""

        async def is_ready() -> bool:
            state = await self.state()
            return state is not None and sum(w.is_connected for w in state.workers) == workers

        await until(is_ready, f"a leader with {workers} workers")

    async def _disconnect(self) -> None:
        for answer in self.answers:
            await answer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if hasattr(self, "ledger"):
            await self.ledger.close()

    async def _close(self) -> None:
        await self._disconnect()
        for process in self.processes:
            process.kill()
        self._store.close()
        shutil.rmtree(self._store.folder, ignore_errors=True)
        self._held.close()

    def keep_alive(self, process: ServiceProcess) -> None:
        """Restart it whenever it ends, as a supervisor would."""

        async def restart() -> None:
            while True:
                await until(lambda: not process.is_alive, "an end", timeout_s=3600)
                process.start()

        self._tasks.append(asyncio.create_task(restart()))

    # Asking

    async def submit(
        self,
        *,
        prompt: list[int] | None = None,
        prompt_tokens: int = 4,
        max_tokens: int = 16,
        n: int = 1,
        timeout_ms: int = 0,
        **sampling: Any,
    ) -> Answer:
        """Submit and follow. Without a prompt, one that no other request shares."""
        number = next(self._ids)
        prompt = prompt or [7 + (number * 131 + i * 17) % 1500 for i in range(prompt_tokens)]
        chosen = {"top_p": 1.0, "logprobs": -1, **sampling}
        record = SubmitRecord(
            id=f"default:{number}",
            tenant="default",
            n=n,
            prompt_token_ids=prompt,
            sampling=RowSampling(max_tokens=max_tokens, **chosen),
            timeout_ms=timeout_ms,
        )
        submitted = await self.ledger.submit(record, str(number).encode())
        sequence_ids = range(submitted.sequence_id, submitted.sequence_id + n)
        subscription = self.follower.subscribe(sequence_ids, from_seq=submitted.journal_seq)
        self.answers.append(Answer(record, submitted.sequence_id, subscription))
        return self.answers[-1]

    async def number_entries_ahead(self) -> None:
        """What comes next is numbered from an hour ahead, as on a server with such a clock."""
        in_an_hour = await self.ledger.now_ns() // 1_000_000 + 3_600_000
        inbox, entry_id = self.ledger.keys.inbox, f"{in_an_hour}-0"
        added, gone = ("XADD", inbox, entry_id, "any", "field"), ("XDEL", inbox, entry_id)
        await self.ledger._store.commands((added, gone), is_atomic=True)

    async def flush(self) -> None:
        """FLUSHALL: somebody empties the store under everyone."""
        await self.ledger._store.commands((("FLUSHALL",),))

    async def submit_many(self, count: int, **options: Any) -> list[Answer]:
        """Where workers know of the gates no request begins before the last one is there: else the
        first reaches a gate and keeps all others from what they are waited for.
        """
        with self.held():
            return [await self.submit(**options) for _ in range(count)]

    async def all_done(self, timeout_s: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            for answer in self.answers:
                await answer.done(timeout_s)

    # Looking

    @property
    def token_count(self) -> int:
        """Tokens shown so far, of all answers."""
        return sum(answer.token_count for answer in self.answers)

    async def state(self) -> GetStateResponse | None:
        """Of whoever leads."""
        for address in self.scheduler_addresses:
            state = await self.state_of(address)
            if state is not None and state.is_leader:
                return state
        return None

    async def leaders_state(self) -> GetStateResponse:
        """As soon as one says that it leads."""
        found: list[GetStateResponse] = []

        async def is_told() -> bool:
            found.extend(each for each in (await self.state(),) if each is not None)
            return bool(found)

        await until(is_told, "a leader")
        return found[0]

    async def state_of(self, address: str) -> GetStateResponse | None:
        """None: it did not answer, which one that is put aside does not either. Ask again."""
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = SchedulerServiceStub(channel)
                state: GetStateResponse = await stub.GetState(GetStateRequest(), timeout=1.0)
                return state
        except grpc.aio.AioRpcError:
            return None

    async def leader(self) -> ServiceProcess:
        """The scheduler process that leads, as soon as one says that it does."""
        found: list[ServiceProcess] = []

        async def is_found() -> bool:
            for address, process in zip(self.scheduler_addresses, self.schedulers, strict=True):
                state = await self.state_of(address)
                if state is not None and state.is_leader:
                    found.append(process)
            return bool(found)

        await until(is_found, "a leader")
        return found[0]

    def events(self, process: ServiceProcess, event: str) -> list[dict[str, Any]]:
        """Log lines of that name."""
        return events(process, event)

    # Checking

    async def check(self) -> None:
        """Everything that must hold after any story."""
        await self.all_done()
        for answer in self.answers:
            await self._check_answer(answer)
        await until(self.is_idle, "an idle cell with every block free")
        await self._check_keys()
        await self._check_journal()
        for process in self.processes:
            is_fine = '"level": "critical"' not in process.log() or process in self.may_crash
            assert is_fine, process.log()[-4000:]
            assert "internal error" not in process.log(), process.log()[-4000:]

    async def _check_answer(self, answer: Answer) -> None:
        max_tokens = answer.record.sampling.max_tokens
        result = await self.ledger.result(answer.record.id)
        assert result is not None, f"{answer.record.id} has no result"
        for sequence_id, choice in zip(answer.sequence_ids, result.choices, strict=True):
            output, ending = answer.outputs[sequence_id], answer.endings[sequence_id]
            expected = gold(sequence_id, max_tokens)
            count = max_tokens if ending.reason == FINISH_REASON_LENGTH else len(output)
            assert output == expected[:count], f"sequence {sequence_id} differs from its golden run"
            assert list(choice.output.token_ids[: len(output)]) == output
            assert choice.finished.reason == ending.reason
            assert choice.finished.output_tokens == len(output)
        if answer.record.sampling.HasField("prompt_logprobs"):
            await self._check_prompt(answer)

    async def _check_prompt(self, answer: Answer) -> None:
        """Every position once, as the mock worker says it; all of them before any output."""
        told = await self.ledger.prompt_logprobs(answer.sequence_id)
        count, k = len(answer.record.prompt_token_ids), answer.record.sampling.prompt_logprobs
        assert list(told.logprobs) == [-float(at) for at in range(1, told.token_count + 1)]
        assert list(told.top_token_ids) == [
            at + rank for at in range(1, told.token_count + 1) for rank in range(k)
        ]
        assert told.token_count == count - 1 or not any(answer.outputs.values())

    async def all_wait(self, count: int) -> None:
        """So many are in the queue: who comes one by one may be over before the next is there."""

        async def wait() -> bool:
            state = await self.state()
            return state is not None and state.waiting >= count

        await until(wait, f"{count} in the queue")

    async def is_idle(self) -> bool:
        load = await self.ledger.load()
        state = await self.state()
        if state is None or load.choices or load.prompt_tokens or await self.ledger.inbox_all():
            return False
        return not (state.waiting or state.running) and all(
            worker.blocks_free == worker.block_count and not worker.plans_in_flight
            for worker in state.workers
        )

    async def _check_journal(self) -> None:
        """Followers skip what they have seen; the record itself must not say anything twice."""
        next_of: dict[int, int] = {}
        ended: set[int] = set()
        seq = 0
        while page := await self.ledger.journal_read(seq, block_ms=1, count=256):
            for record in page:
                before = record.after_seq if record.HasField("after_seq") else record.seq - 1
                assert before == seq or not seq
                seq = record.seq
                for sequence_id, position in zip(
                    record.sequence_ids, record.positions, strict=True
                ):
                    assert sequence_id not in ended, f"{sequence_id} goes on after its end"
                    assert position == next_of.get(sequence_id, position), (
                        f"{sequence_id} at {position}"
                    )
                    next_of[sequence_id] = position + 1
                finished = {ending.sequence_id for ending in record.finished}
                assert len(finished) == len(record.finished)
                assert not finished & ended, f"{finished & ended} ended twice"
                ended |= finished

    async def _check_keys(self) -> None:
        """Whatever lives without a TTL belongs to the cell, not to a request."""
        keys = self.ledger.keys
        (found,) = await self.ledger._store.commands((("KEYS", f"{keys.prefix}*"),))
        names = [name.decode() for name in found]
        ttls = await self.ledger._store.commands([("TTL", name) for name in names])
        forever = {name for name, ttl in zip(names, ttls, strict=True) if ttl == -1}
        known = {keys.meta, keys.lease, keys.inbox, keys.journal, keys.load}
        assert forever <= known, f"no TTL: {sorted(forever - known)}"


async def is_answering(address: str) -> bool:
    """Whether the gateway there completes a request now."""
    async with AsyncClient(address, resume_s=0) as client:
        try:
            await client.complete(token_ids=[7], max_tokens=1)
        except UnavailableError:
            return False
    return True
