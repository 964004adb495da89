"""Faults that must cost one request, or one worker, or a moment: never a cell."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio
from pydantic import SecretStr
from structlog.testing import capture_logs

from kaiten.v1.common_pb2 import FINISH_REASON_ERROR, Leader, WorkerDescription
from kaiten.v1.worker_service_pb2 import ExecuteResponse, Opened, StepResult
from kaiten.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from ledger import Ledger
from scheduler_svc import archiving
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.leader_session import TICK_S_MAX
from scheduler_svc.links import REDIAL_S_FIRST, REDIAL_S_MAX, WorkerLink
from scheduler_svc.main import SchedulerProcess
from scheduler_svc.settings import SchedulerSettings
from service_kit.grpc_server import create_server
from service_kit.peers import Credential, Peers, make_credential
from tests.support.answers import until
from tests.support.play_leader import PlayLeader, submit_record
from tests.support.relay import Relay

WAIT_S = 60.0


@asynccontextmanager
async def serving(redis_url: str, cell: str) -> AsyncIterator[SchedulerProcess]:
    """A scheduler in this process, serving until the block ends as after a SIGTERM."""
    chosen = SchedulerSettings(redis_url=SecretStr(redis_url), cell=cell, grpc_port=0)
    process = SchedulerProcess(chosen)
    await process.start()
    task = asyncio.create_task(process.serve())
    try:
        yield process
    finally:
        await process.drain()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await process.stop()


async def test_a_damaged_sequence_ends_its_request_and_no_other(
    ledger: Ledger, redis_url: str, cell: str
) -> None:
    play = await PlayLeader.elected(ledger)
    whole = await ledger.submit(submit_record("t:whole"), b"h")
    damaged = await ledger.submit(submit_record("t:damaged", n=2), b"h")
    await play.step({whole.sequence_id: [5], damaged.sequence_id: [5]})
    hole = await play.step({damaged.sequence_id: [6]})
    await play.step(
        {whole.sequence_id: [7], damaged.sequence_id: [7], damaged.sequence_id + 1: [7]}
    )
    async with redis.asyncio.from_url(redis_url) as store:
        assert await store.xdel(f"kaiten:{{{cell}}}:journal", f"{hole.seq}-0") == 1
    await ledger.resign(play.leader)
    async with serving(redis_url, cell) as process:
        async with asyncio.timeout(WAIT_S):
            while (result := await ledger.result("t:damaged")) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        hole_at = f"before journal record {hole.seq + 1}"
        lost = f"sequence {damaged.sequence_id} lacks tokens [1, 2) {hole_at}"
        for choice in result.choices:
            assert choice.finished.reason == FINISH_REASON_ERROR
            assert choice.finished.error == (
                f"the ledger is damaged, this request cannot go on: {lost}"
            )
        session = process._servicer.session
        assert session is not None
        (waiting,) = session.core.waiting
        assert (waiting.sequence_id, waiting.tokens[-2:]) == (whole.sequence_id, [5, 7])


async def test_a_record_that_only_another_version_knows_is_passed_over_and_said(
    ledger: Ledger, redis_url: str, cell: str
) -> None:
    """Field 19, empty; what is no record at all; and what somebody put there by hand."""
    await ledger.check()
    async with redis.asyncio.from_url(redis_url) as store:
        for record in (b"\x9a\x01\x00", b"\xff"):
            await store.xadd(ledger.keys.inbox, {"s": "3", "r": record})
        await store.xadd(ledger.keys.inbox, {"hello": "there"})
        await store.xadd(ledger.keys.inbox, {"s": "three", "r": b""})
        before = await ledger.submit(submit_record("t:before"), b"h")
        with capture_logs() as logs:
            async with serving(redis_url, cell) as process:
                await until(lambda: process._servicer.session is not None, "a leader")
                session = process._servicer.session
                assert session is not None
                await store.xadd(ledger.keys.inbox, {"s": "3", "r": b"\x9a\x01\x00"})
                after = await ledger.submit(submit_record("t:after"), b"h")
                await until(lambda: len(session.core.waiting) == 2, "both requests")
                assert [each.sequence_id for each in session.core.waiting] == [
                    before.sequence_id,
                    after.sequence_id,
                ]
    told = [each["sequence_id"] for each in logs if each["event"] == "inbox.unknown"]
    assert told == [3, 3, 0, 0, 3]
    assert len(await ledger.inbox_all()) == 7


async def test_told_to_stop_while_recovering_it_hands_over_at_once(
    ledger: Ledger, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recovering = asyncio.Event()

    async def for_ever(*_: object) -> None:
        recovering.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Ledger, "recover", for_ever)
    async with asyncio.timeout(WAIT_S), serving(redis_url, cell):
        await recovering.wait()
        held = await ledger.leader()
        assert held is not None
        assert held.nonce
    left = await ledger.leader()
    assert left is not None
    assert (left.epoch, left.nonce) == (held.epoch, 0)


async def test_a_leadership_that_cannot_begin_is_given_up_at_once(
    ledger: Ledger, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby need not wait for the lease to run out."""

    def fail(*_: object) -> None:
        raise RuntimeError("no archive")

    monkeypatch.setattr(archiving, "begin", fail)
    chosen = SchedulerSettings(redis_url=SecretStr(redis_url), cell=cell, grpc_port=0)
    process = SchedulerProcess(chosen)
    await process.start()
    with pytest.raises(RuntimeError, match="no archive"):
        await asyncio.wait_for(process.serve(), WAIT_S)
    await process.stop()
    left = await ledger.leader()
    assert left is not None
    assert (left.epoch > 0, left.nonce) == (True, 0)


async def test_an_idle_scheduler_looks_through_its_books_once(
    ledger: Ledger, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str | None] = []
    monkeypatch.setattr(Scheduler, "check", lambda core, worker_id=None: checked.append(worker_id))
    async with serving(redis_url, cell):
        async with asyncio.timeout(WAIT_S):
            while not checked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(4 * TICK_S_MAX)
        assert checked == [None]


WORKER = WorkerDescription(boot_id="w")


class Opener(WorkerServiceServicer):
    """A worker that opens a stream and never says anything more."""

    async def Execute(self, requests: Any, context: Any) -> AsyncIterator[ExecuteResponse]:
        await anext(aiter(requests))
        yield ExecuteResponse(opened=Opened(worker=WORKER))
        await asyncio.Event().wait()


class Owner:
    """Writes down what a link reports."""

    def __init__(self) -> None:
        self.is_open = False
        self.closed: list[tuple[str, bool | None]] = []

    def link_opened(self, link: WorkerLink) -> None:
        self.is_open = True

    def link_refused(self, link: WorkerLink, epoch: int) -> None: ...

    def plan_written(self, link: WorkerLink, after_ns: int) -> None: ...

    def link_closed(self, link: WorkerLink, reason: str, *, is_crash: bool | None) -> None:
        self.closed.append((reason, is_crash))

    def step_arrived(self, link: WorkerLink, result: StepResult) -> None:
        raise AssertionError("no step was planned")


async def test_a_worker_whose_host_vanished_is_noticed() -> None:
    server = grpc.aio.server()
    add_WorkerServiceServicer_to_server(Opener(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    owner = Owner()
    async with Relay(f"127.0.0.1:{port}") as relay:
        link = WorkerLink(
            address=relay.address,
            worker=WORKER,
            leader=Leader(epoch=1, nonce=1),
            owner=owner,
        )
        task = asyncio.create_task(link.run())
        await until(lambda: owner.is_open, "the stream is open")
        relay.is_silent = True
        # Two seconds to the ping and two for its answer; gRPC's own patience is a minute.
        await until(lambda: owner.closed, "the silence is noticed")
        task.cancel()
        await asyncio.wait({task})
    await server.stop(None)
    ((reason, is_crash),) = owner.closed
    assert "ping timeout" in reason or "keepalive" in reason
    assert is_crash is None, "the host may be gone, or only the way there"


class Impostor(WorkerServiceServicer):
    """At the address of a worker that registered, and writes down what it is told."""

    def __init__(self, says: WorkerDescription) -> None:
        self._says = says
        self.told: list[str | None] = []

    async def Execute(self, requests: Any, context: Any) -> AsyncIterator[ExecuteResponse]:
        async for request in requests:
            self.told.append(request.WhichOneof("message"))
            yield ExecuteResponse(opened=Opened(worker=self._says))


@pytest.mark.parametrize(
    ("says", "has_credential", "why"),
    [
        (WorkerDescription(boot_id="w", fingerprint="lie"), True, "worker.fingerprint was sound"),
        (WorkerDescription(boot_id="w2", fingerprint="sound"), True, "worker.boot_id was w"),
        (WorkerDescription(), True, "worker.boot_id was w"),
        (WorkerDescription(boot_id="w", fingerprint="sound"), False, "did not prove"),
    ],
)
async def test_who_is_not_the_worker_that_registered_is_sent_no_plan(
    tmp_path: Path, says: WorkerDescription, has_credential: bool, why: str
) -> None:
    make_credential(tmp_path / "credential")
    peers = Peers(Credential(tmp_path / "credential"))
    impostor, owner = Impostor(says), Owner()
    interceptors = peers.interceptors() if has_credential else []
    server = create_server(interceptors=interceptors)
    add_WorkerServiceServicer_to_server(impostor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = WorkerLink(
        address=f"127.0.0.1:{port}",
        worker=WorkerDescription(boot_id="w", fingerprint="sound"),
        leader=Leader(epoch=1, nonce=1),
        owner=owner,
        peers=peers,
    )
    with capture_logs() as logs:
        task = asyncio.create_task(link.run())
        await until(lambda: len(logs) >= 2, "it is dialled again")
        task.cancel()
        await asyncio.wait({task})
    await server.stop(None)
    assert not owner.is_open
    assert set(impostor.told) == {"open"}
    assert all(why in entry["reason"] for entry in logs if entry["event"] == "worker.disconnected")


class Quitter(WorkerServiceServicer):
    """A worker whose streams end as soon as they are open."""

    async def Execute(self, requests: Any, context: Any) -> AsyncIterator[ExecuteResponse]:
        await anext(aiter(requests))
        yield ExecuteResponse(opened=Opened(worker=WORKER))


async def test_a_stream_that_ends_as_soon_as_it_opens_is_dialled_at_a_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = grpc.aio.server()
    add_WorkerServiceServicer_to_server(Quitter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    waits: list[float] = []
    sleep = asyncio.sleep

    async def in_no_time(wait_s: float) -> None:
        waits.append(wait_s)
        await sleep(0)

    link = WorkerLink(
        address=f"127.0.0.1:{port}",
        worker=WORKER,
        leader=Leader(epoch=1, nonce=1),
        owner=Owner(),
    )
    monkeypatch.setattr(asyncio, "sleep", in_no_time)
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(WAIT_S):
        while REDIAL_S_MAX not in waits:
            await sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    await server.stop(None)
    assert waits[0] == REDIAL_S_FIRST


OPENED = ExecuteResponse(opened=Opened(worker=WORKER)).SerializeToString()


@pytest.mark.parametrize("answers", [[b"\xff"], [b""], [OPENED, b"\xff"], [OPENED, OPENED]])
async def test_a_peer_that_talks_nonsense_is_put_aside_and_harms_nobody(
    answers: list[bytes],
) -> None:
    async def execute(requests: Any, _context: Any) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        for answer in answers:
            yield answer
        await asyncio.Event().wait()

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(execute)
    service = "kaiten.v1.WorkerService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Execute": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    owner = Owner()
    link = WorkerLink(
        address=f"127.0.0.1:{port}",
        worker=WORKER,
        leader=Leader(epoch=1, nonce=1),
        owner=owner,
    )
    await asyncio.wait_for(link.run(), WAIT_S)
    await server.stop(None)
    assert link.is_quarantined
    # Its sequences are not to blame.
    assert [is_crash for _, is_crash in owner.closed] == [False] * 3 * (len(answers) - 1)
