"""Watching a cell of real processes: what is seen is what is, and nobody is held up by it."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from gateway.tenants import digest
from kaiten.client.live_core import LiveCore
from kaiten.local.health import state_of
from kaiten.mini import CHECKPOINT
from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.watch_pb2 import SEQUENCE_STATE_RUNNING, WatchRequest
from ledger.archive import Wanted, entries, segments
from ledger.archive.remote import remote_entries
from scheduler_svc.servicer import WATCHERS_MAX
from tests.support import commands
from tests.support.answers import until
from tests.support.cluster import UNDISTURBED, Cluster
from tests.support.processes import GATEWAY

WATCH_S_MAX = 60.0


class Watcher:
    """Somebody who watches one scheduler."""

    def __init__(self, channel: grpc.aio.Channel, key: str = "") -> None:
        self.core = LiveCore()
        self.snapshots = 0
        stub, request = SchedulerServiceStub(channel), WatchRequest(interval_ms=100)
        self.call = stub.Watch(request, metadata=(("authorization", f"Bearer {key}"),))

    async def take(self) -> None:
        """The next response."""
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "a watch ends with a reason"
        self.core.take(response)
        self.snapshots += response.is_snapshot

    async def until(self, is_so: Callable[[LiveCore], bool]) -> None:
        """Watch until it is so."""
        async with asyncio.timeout(WATCH_S_MAX):
            while not is_so(self.core):
                await self.take()


@asynccontextmanager
async def watching(address: str, key: str = "") -> AsyncIterator[Watcher]:
    async with grpc.aio.insecure_channel(address) as channel:
        watcher = Watcher(channel, key)
        await watcher.take()
        yield watcher


def is_same(one: LiveCore, other: LiveCore) -> bool:
    """But for the time."""
    return one == replace(other, unix_ns=one.unix_ns)


def running(core: LiveCore) -> int:
    states = [one.place.state for one in core.sequences.values()]
    return states.count(SEQUENCE_STATE_RUNNING)


async def test_the_batch_and_the_queue_are_seen_as_they_are(tmp_path: Path) -> None:
    """Held between two steps, what one saw change is what another sees at once."""
    flags = {"slots": 2, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        (address,) = cluster.scheduler_addresses
        async with watching(address) as first:
            with cluster.held():
                await cluster.submit_many(5, max_tokens=40)
                await first.until(lambda core: (running(core), len(core.queue)) == (2, 3))
                async with watching(address) as second:
                    await first.until(lambda core: is_same(core, second.core))
            await cluster.all_done()
            await first.until(lambda core: not core.sequences)
            (worker,) = first.core.workers.values()
            assert (worker.blocks_free, first.core.waiting) == (worker.block_count, 0)
            assert first.snapshots == 1
            await first.until(lambda core: core.committed_seq == core.seq)
            state = await cluster.leaders_state()
            assert (first.core.epoch, first.core.seq) == (state.leader.epoch, state.journal_seq)


async def test_a_standby_says_who_leads_and_a_watch_ends_with_its_leader(tmp_path: Path) -> None:
    flags = {"gates": tmp_path / "gates"}
    async with Cluster(
        tmp_path, schedulers=2, worker_flags=flags, scheduler_flags=UNDISTURBED
    ) as cluster:
        cluster.gates(100)
        leader = await cluster.leader()
        at = cluster.schedulers.index(leader)
        led, stands_by = cluster.scheduler_addresses[at], cluster.scheduler_addresses[1 - at]
        answer = await cluster.submit(max_tokens=120)
        async with watching(led) as watcher:
            await watcher.until(lambda core: running(core) == 1)
            follows = partial(cluster.events, cluster.schedulers[1 - at], "leader.followed")
            await until(lambda: bool(follows()), "the standby knows who leads")
            with pytest.raises(grpc.aio.AioRpcError, match=f"not the leader; the leader is {led}"):
                async with watching(stands_by):
                    pass
            code, *_ = await kaiten("watch", "--once", "--address", stands_by, "--address", led)
            assert code == 0, "whoever is asked, the leader answers"
            epoch = watcher.core.epoch
            leader.send(signal.SIGTERM)
            cluster.open_gates()
            with pytest.raises(grpc.aio.AioRpcError):
                await watcher.until(lambda core: False)
        leader.join()
        await cluster.leader()
        async with watching(stands_by) as watcher:
            assert watcher.core.epoch > epoch
            await answer.done()
            await watcher.until(lambda core: not core.sequences)


async def test_who_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    """As many as may watch, none of which reads; one more is refused, and the streams run on."""
    async with Cluster(tmp_path) as cluster:
        (address,) = cluster.scheduler_addresses
        await cluster.submit_many(8, max_tokens=60)
        async with grpc.aio.insecure_channel(address) as channel:
            watchers = [Watcher(channel) for _ in range(WATCHERS_MAX)]
            for watcher in watchers:
                await watcher.take()
            one_more = Watcher(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="too many watchers") as refused:
                await one_more.take()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await cluster.all_done()
            for watcher in watchers:
                watcher.call.cancel()
        async with watching(address) as watcher:
            await watcher.until(lambda core: not core.sequences)


OF_DEFAULT = {"tenant": "default"}
OPERATOR, TENANT, OWNER = "an-operator", "a-tenant", "whose-requests-these-are"


def keys_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text(
        f'[tenants.ops]\noperator = true\nkeys = ["sha256:{digest(OPERATOR).hex()}"]\n'
        f'[tenants.acme]\nkeys = ["sha256:{digest(TENANT).hex()}"]\n'
        f'[tenants.default]\nkeys = ["sha256:{digest(OWNER).hex()}"]\n'
    )
    return path


def add_gateway(cluster: Cluster, **flags: object) -> str:
    """Its address; it need not be ready yet."""
    return add_doors(cluster, **flags)[0]


def add_doors(cluster: Cluster, **flags: object) -> tuple[str, str]:
    """Where a gateway answers gRPC and HTTP."""
    port, http = cluster.hold_port(), cluster.hold_port()
    base = {"redis_url": cluster.store.url, "model": CHECKPOINT, "http_port": http.number}
    cluster.add("gateway", GATEWAY, {**base, "grpc_port": port.number, **flags}).start()
    return port.address, f"http://{http.address}"


async def kaiten(*arguments: str) -> commands.Ended:
    """As an operator."""
    environ = {"KAITEN_API_KEY": OPERATOR}
    return await asyncio.to_thread(commands.kaiten, *arguments, environ=environ)


def read_archives(gateway: str) -> list[ArchiveEntry]:
    return list(remote_entries([gateway], Wanted(), OPERATOR))


async def pages_tell(http: str, written: list[ArchiveEntry]) -> None:
    """Page by page, over HTTP, every record once and whose its tokens are."""
    records = [entry.record for entry in written if entry.HasField("record")]
    found, after, sequence_ids = [], "", list[int]()
    headers = {"authorization": f"Bearer {OPERATOR}"}
    async with httpx.AsyncClient(base_url=http, headers=headers, timeout=WATCH_S_MAX) as client:
        while True:
            query = {"after": after, "limit": "60"}
            page = (await client.get("/v1/archive", params=query)).json()
            for entry in page["data"]:
                if (record := entry.get("record")) is not None:
                    sequence_ids = record.get("sequence_ids", sequence_ids)
                    found.append((record["epoch"], record["seq"], sequence_ids))
                elif "header" in entry:
                    sequence_ids = []
            if not page["has_more"]:
                break
            after, sequence_ids = page["last"], []
        first = (await client.get("/v1/archive", params={"limit": "1"})).json()
        assert first["last"] == f"{records[0].epoch}:{records[0].seq}"
        wrong = await client.get("/v1/archive", params={"after": "x"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")
    assert found == [(one.epoch, one.seq, list(one.sequence_ids)) for one in records]


async def all_is_told(http: str) -> None:
    """To whose request it is, and to operators: of one that only archives know, and of one that
    came before its leader.
    """
    headers = {key: {"authorization": f"Bearer {key}"} for key in (OPERATOR, OWNER)}
    async with httpx.AsyncClient(base_url=f"{http}/v1/requests", timeout=WATCH_S_MAX) as client:
        for id in ("0", "1"):
            url = f"/cmpl-{id}/explain"

            async def is_told(url: str = url) -> bool:
                """A busy machine may need longer than an operator is kept waiting."""
                told = await client.get(url, params=OF_DEFAULT, headers=headers[OPERATOR])
                return "unknown" not in told.raise_for_status().text

            await until(is_told, "all of its time")
            # What it was told of, the gateway has kept.
            seen = (await client.get(url, params=OF_DEFAULT, headers=headers[OPERATOR])).json()
            own = (await client.get(url, headers=headers[OWNER])).json()
            (told,), (told_owner,) = seen["choices"], own["choices"]
            assert told["ended"] == told_owner["ended"] == "length"
            for one, other in zip(told["intervals"], told_owner["intervals"], strict=True):
                assert one["phase"] == other["phase"] != "unknown"
                assert other["worker_id"] is None
            assert {one["phase"] for one in told["intervals"]} >= {"queue", "prefill", "decode"}
            assert any(one["worker_id"] for one in told["intervals"])


async def is_up(address: str) -> bool:
    """It answers, ready or not."""
    return (await state_of(address)).partition(":")[0] in ("serving", "not serving")


async def state_starts(address: str, word: str) -> bool:
    return (await state_of(address)).startswith(word)


async def refusal(address: str, key: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with watching(address, key):
            pass
    return refused.value.code()


async def test_an_operator_sees_every_leader_and_archive_through_a_gateway(tmp_path: Path) -> None:
    """One stream goes on with the next leader, and the archives of both are one."""
    folders = [tmp_path / "one", tmp_path / "other"]
    workers = {"gates": tmp_path / "gates"}
    cluster = Cluster(tmp_path, schedulers=2, worker_flags=workers, scheduler_flags=UNDISTURBED)
    for scheduler, folder in zip(cluster.schedulers, folders, strict=True):
        scheduler.argv += ["--archive-dir", str(folder)]
    async with cluster:
        cluster.gates(100)
        gateway, http = add_doors(cluster, api_keys_file=keys_file(tmp_path))
        leader = await cluster.leader()
        await (await cluster.submit(max_tokens=5)).done()
        answer = await cluster.submit(max_tokens=120)
        await until(partial(is_up, gateway), "the gateway")
        assert await refusal(gateway, "") is grpc.StatusCode.UNAUTHENTICATED
        assert await refusal(gateway, TENANT) is grpc.StatusCode.PERMISSION_DENIED
        async with watching(gateway, OPERATOR) as watcher:
            await watcher.until(lambda core: running(core) == 1)
            epoch = watcher.core.epoch
            leader.send(signal.SIGTERM)
            cluster.open_gates()
            leader.join()
            await watcher.until(lambda core: core.epoch > epoch and not core.sequences)
            assert watcher.snapshots == 2
        leader.start()
        await answer.done()
        key = tmp_path / "key"
        key.write_text(OPERATOR)

        async def is_whole() -> bool:
            """The last records are on their way to the disk, and the first leader is starting."""
            written = list(entries(folders))
            return written == await asyncio.to_thread(read_archives, gateway)

        await until(is_whole, "both archives, merged")
        read = ("archive", "cat", "--address", gateway, "--api-key-file", str(key))
        _, said, _ = await kaiten(*read)
        told = [json.loads(line) for line in said.splitlines()]
        headers = [entry["header"]["epoch"] for entry in told if "header" in entry]
        assert headers == [str(part.epoch) for part in segments(folders)]
        assert len(set(headers)) == 2
        await pages_tell(http, list(entries(folders)))
        # The leader does not know it any more, and they do.
        elsewhere = "explain", "cmpl-0", "--address", gateway, "--tenant", "acme"
        code, _, complained = await kaiten(*elsewhere)
        assert code == 1
        said = " ".join(complained.split())
        assert "did not end of late, nor do the archives tell of it" in said
        assert "kaiten explain cmpl-0 --tenant acme --archive .kaiten" in complained
        await all_is_told(http)


async def test_the_command_shows_the_cell(tmp_path: Path) -> None:
    """Through a gateway of this machine without keys, whose user may see everything."""
    flags = {"slots": 1, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        gateway = add_gateway(cluster)
        await until(partial(is_up, gateway), "the gateway")
        with cluster.held():
            await cluster.submit_many(2, max_tokens=9)
            async with watching(gateway) as watcher:
                await watcher.until(lambda core: (running(core), len(core.queue)) == (1, 1))
            code, said, _ = await kaiten("watch", "--once", "--blocks", "--address", gateway)
        assert code == 0
        head, worker, runs, waits = said.splitlines()
        assert f"epoch {watcher.core.epoch}" in head
        assert "1 of 1 slots" in worker
        assert runs.startswith("  slot 0  default:0/0 ")
        assert waits.startswith("waiting 1  waiting  default:1/0 ")
        code, said, _ = await kaiten("watch", "--once", "--json", "--address", gateway)
        assert (code, json.loads(said)["is_snapshot"]) == (0, True)
        code, said, complained = await kaiten("explain", "0", "--address", gateway)
        assert (code, complained) == (0, "")


async def test_who_asks_why_is_told_while_the_store_does_not_answer(tmp_path: Path) -> None:
    """The leader knows, and the gateway where it is: it has seen that before."""
    flags = {"slots": 1, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        gateway, url = add_doors(cluster)
        await until(partial(state_starts, gateway, "serving"), "a gateway that is ready")
        async with httpx.AsyncClient(base_url=url, timeout=WATCH_S_MAX) as http:
            with cluster.held():
                await cluster.submit_many(2, max_tokens=9)
                async with watching(gateway) as watcher:
                    await watcher.until(lambda core: (running(core), len(core.queue)) == (1, 1))
                with cluster.store.paused():
                    await until(partial(state_starts, gateway, "not serving"), "the gateway sees")
                    async with watching(gateway) as watcher:
                        assert (running(watcher.core), len(watcher.core.queue)) == (1, 1)
                    told = [await http.get("/v1/requests/1/explain") for _ in range(2)]
                    first, second = [one.raise_for_status().json()["choices"][0] for one in told]
                    assert second["intervals"][-1]["phase"] == "queue"
                    assert second["ms"] > first["ms"], "it waits on, though nothing is decided"
            await cluster.all_done()


async def test_a_gateway_for_everybody_without_keys_shows_nothing(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=0) as cluster:
        gateway = add_gateway(cluster, grpc_host="0.0.0.0")
        await until(partial(is_up, gateway), "the gateway")
        assert await refusal(gateway, "any") is grpc.StatusCode.PERMISSION_DENIED
        code, _, complained = await kaiten("watch", "--address", gateway)
        assert code == 1
        assert "operator = true" in complained
