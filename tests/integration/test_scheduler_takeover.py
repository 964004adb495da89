"""Who saw the leader end takes over at once; who only hears nothing waits for the lease."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH, Leader
from kaiten.v1.scheduler_service_pb2 import StandByResponse
from kaiten.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from scheduler_svc import standby
from scheduler_svc.standby import Found, look_at
from service_kit.errors import NotLeader
from service_kit.grpc_server import bind, create_server
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.processes import ServiceProcess
from tests.support.relay import Relay

# Longer than every wait of a test: who leads before has not waited for the lease.
NEVER_RUNS_OUT = {"lease_ttl_s": 3600.0}
STEADY = {"step_ms": 20}
US = Leader(epoch=5, nonce=7)


@asynccontextmanager
async def followed(
    folder: Path, *, is_relayed: bool = False, is_hermit: bool = False
) -> AsyncIterator[tuple[Cluster, Any]]:
    """A leader, and a standby that follows it; between the two a network, if one is wanted, or a
    worker that was told of the first leader alone.
    """
    cluster = Cluster(
        folder,
        schedulers=2,
        worker_flags=STEADY,
        scheduler_flags=NEVER_RUNS_OUT,
        is_started=False,
    )
    async with cluster, Relay(cluster.scheduler_addresses[0]) as relay:
        leader, second = cluster.schedulers
        if is_relayed:
            leader.argv += ["--advertise-address", relay.address]
        (worker,) = cluster.workers
        if is_hermit:
            worker.argv[worker.argv.index("--scheduler") + 1] = cluster.scheduler_addresses[0]
        cluster.store.start()
        leader.start()
        worker.start()
        await cluster.connect()
        await cluster.ready(workers=1)
        second.start()
        await until(lambda: cluster.events(second, "leader.followed"), "the standby follows")
        yield cluster, relay


async def mixed(cluster: Cluster) -> None:
    """Choices of several kinds, each under way."""
    answers = await cluster.submit_many(4, max_tokens=75)
    answers += await cluster.submit_many(2, max_tokens=75, n=2, logprobs=1)
    for answer in answers:
        await answer.has_tokens(5)


def assert_all_whole(cluster: Cluster) -> None:
    """Complete; that the tokens are right is checked by the cluster."""
    assert {each for answer in cluster.answers for each in answer.reasons} == {FINISH_REASON_LENGTH}


async def test_a_killed_leader_has_a_successor_at_once(tmp_path: Path) -> None:
    """Which meets a worker first that is too small for all that it resumes."""
    async with followed(tmp_path) as (cluster, _):
        first, second = cluster.schedulers
        (large,), small = [*cluster.workers], cluster.add_worker({"kv_blocks": 3})
        small.start()
        await cluster.ready(workers=2)
        await mixed(cluster)
        large.send(signal.SIGSTOP)
        first.kill()
        await until(lambda: cluster.events(second, "worker.joined"), "the small one has joined")
        large.send(signal.SIGCONT)
        await cluster.all_done()
        assert_all_whole(cluster)
        assert await cluster.leader() is second
        # And back: who was killed stands by in its turn.
        first.start()
        await until(lambda: cluster.events(first, "leader.followed"), "the first follows")
        await mixed(cluster)
        second.kill()
        await cluster.all_done()
        assert_all_whole(cluster)


async def test_a_new_leader_finds_the_workers_that_the_one_before_knew(tmp_path: Path) -> None:
    """They need not find it first: this one never would."""
    async with followed(tmp_path, is_hermit=True) as (cluster, _):
        first, second = cluster.schedulers
        (hermit,) = cluster.workers
        await mixed(cluster)
        await until(lambda: knows(cluster, hermit), "the ledger says where it is")
        first.kill()
        # More than once, if its leader was put aside for so long that it was left.
        before = cluster.events(hermit, "worker.registered")
        await cluster.all_done()
        assert_all_whole(cluster)
        assert len(cluster.events(second, "worker.registered")) == 1
        assert cluster.events(hermit, "worker.registered") == before


async def knows(cluster: Cluster, worker: ServiceProcess) -> bool:
    """The ledger does, and of no other."""
    record = (await cluster.ledger.cell()).record
    addresses = [entry["address"] for entry in cluster.events(worker, "service.ready")]
    return record is not None and list(record.worker_addresses) == addresses != []


async def test_a_killed_leader_that_is_back_before_anybody_asked_has_ended(tmp_path: Path) -> None:
    """Somebody listens at its address again, and leads nothing."""
    async with followed(tmp_path) as (cluster, _):
        first, second = cluster.schedulers
        second.send(signal.SIGSTOP)
        first.kill()
        first.start()
        await until(
            lambda: len(cluster.events(first, "service.ready")) == 2, "it listens once more"
        )
        second.send(signal.SIGCONT)
        await cluster.submit()
        await cluster.all_done()
        assert_all_whole(cluster)
        assert await cluster.leader() is second


async def test_a_connection_that_breaks_is_no_end(tmp_path: Path) -> None:
    async with followed(tmp_path, is_relayed=True) as (cluster, relay):
        first, second = cluster.schedulers
        before = await cluster.ledger.leader()
        for count in (2, 3, 4):
            relay.reset()
            await until(
                lambda count=count: len(cluster.events(second, "leader.followed")) >= count,
                "the standby follows anew",
            )
        await cluster.submit()
        await cluster.all_done()
        after = await cluster.ledger.leader()
        assert before is not None
        assert after is not None
        assert (after.epoch, after.nonce) == (before.epoch, before.nonce)
        assert await cluster.leader() is first


async def test_a_leader_that_is_put_aside_has_not_ended(tmp_path: Path) -> None:
    """Its connections break while it cannot answer: there is silence, and the lease is its own."""
    async with followed(tmp_path, is_relayed=True) as (cluster, relay):
        first, second = cluster.schedulers
        await mixed(cluster)
        first.send(signal.SIGSTOP)
        asked = len(relay.connections)
        relay.reset()
        await until(lambda: len(relay.connections) > asked + 4, "the standby asks and asks")
        assert not cluster.events(second, "leader.ended")
        first.send(signal.SIGCONT)
        await until(
            lambda: len(cluster.events(second, "leader.followed")) > 1, "the standby follows anew"
        )
        await cluster.all_done()
        assert_all_whole(cluster)
        assert await cluster.leader() is first


# What a look says

Said = StandByResponse | Exception | asyncio.Event


class Scripted(SchedulerServiceServicer):
    """Answers as told: messages, an error, or nothing until an event."""

    def __init__(self, *said: Said) -> None:
        self._said = said

    async def StandBy(self, request: Any, context: Any) -> AsyncIterator[StandByResponse]:
        for each in self._said:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, asyncio.Event):
                await each.wait()
            else:
                yield each


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ((), Found.ABSENT),
        ((StandByResponse(leader=US),), Found.LED),
        ((StandByResponse(leader=Leader(epoch=6, nonce=7)),), Found.ABSENT),
        ((StandByResponse(),), Found.ABSENT),
        ((NotLeader("elsewhere:1"),), Found.ABSENT),
        ((AssertionError("on purpose"),), Found.SILENT),
        ((asyncio.Event(),), Found.SILENT),
    ],
)
async def test_what_a_look_at_the_leader_says(
    said: tuple[Said, ...], found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "ANSWER_S_MAX", 0.3 if found is Found.SILENT else 60.0)
    server = create_server()
    add_SchedulerServiceServicer_to_server(Scripted(*said), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        assert await look_at(f"127.0.0.1:{port}", US) is found
    finally:
        await server.stop(None)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "", "nowhere", "no.such.host.invalid:1"])
async def test_where_nobody_listens_there_is_no_leader(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who resolves names may take its time to know none.
    monkeypatch.setattr(standby, "ANSWER_S_MAX", 60.0)
    assert await look_at(address, US) is Found.ABSENT
