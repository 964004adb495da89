"""What befalls a store besides its death: a file that is rewritten, a load that takes long, a disk
that is full, a network that is slow. Nothing is lost that was acknowledged.
"""

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from ledger import Ledger, LedgerLimits
from service_kit.errors import Unavailable
from tests.support.answers import until
from tests.support.cluster import UNDISTURBED, Cluster
from tests.support.play_leader import submit_record
from tests.support.relay import Relay
from tests.support.store_server import StoreServer, own_store

HASTY = LedgerLimits(retry_s=0.0)
PATIENT = LedgerLimits(retry_s=60.0)
REQUESTS = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A server of one's own, to be hurt."""
    with own_store(tmp_path / "store") as server:
        yield server


@pytest.fixture
def admin(server: StoreServer) -> Iterator[Redis]:
    with Redis(port=server.port) as client:
        yield client


async def ids_of(ledger: Ledger) -> list[str]:
    return [entry.record.id for entry in await ledger.inbox_all()]


async def accepted(ledger: Ledger, count: int = REQUESTS) -> list[str]:
    ids = [f"r{index}" for index in range(count)]
    for id in ids:
        await ledger.submit(submit_record(id), b"h")
    return ids


async def test_killed_while_it_rewrites_its_file(server: StoreServer, admin: Redis) -> None:
    ledger = await Ledger.connect(server.url, limits=PATIENT)
    ids = await accepted(ledger)
    # So long for each key that it does not end by itself.
    admin.config_set("rdb-key-save-delay", 1_000_000)
    admin.bgrewriteaof()
    await until(lambda: admin.info("persistence")["aof_rewrite_in_progress"], "a rewriting")
    during = await ledger.submit(submit_record("during"), b"h")
    server.kill()
    server.start()
    assert await ids_of(ledger) == [*ids, "during"]
    assert not (await ledger.submit(submit_record("during"), b"h")).is_new
    assert (await ledger.find("during")).sequence_id == during.sequence_id
    await ledger.close()


async def test_a_store_that_loads_for_long_accepts_nothing_and_then_everything(
    server: StoreServer, admin: Redis
) -> None:
    ledger = await Ledger.connect(server.url, limits=PATIENT)
    ids = await accepted(ledger, 3 * REQUESTS)
    admin.bgrewriteaof()
    await until(lambda: not admin.info("persistence")["aof_rewrite_in_progress"], "a rewriting")
    server.kill()
    # For each key: it takes twenty seconds, unless it is told otherwise; and is asked now and then.
    server.settings |= {"key-load-delay": "100000", "loading-process-events-interval-bytes": "1024"}
    server.launch()
    hasty = await Ledger.connect(server.url, limits=HASTY)
    seen: list[str] = []

    async def refuses() -> bool:
        with pytest.raises(Unavailable) as caught:
            await hasty.submit(submit_record("new"), b"h")
        seen.append(str(caught.value))
        return "loading" in seen[-1].lower()

    await until(refuses, "a store that says that it loads")
    with pytest.raises(Unavailable):
        await hasty.check()
    late = asyncio.create_task(ledger.submit(submit_record("late"), b"h"))
    await asyncio.sleep(0)
    admin.config_set("key-load-delay", 0)
    assert (await late).is_new
    assert await ids_of(ledger) == [*ids, "late"]
    await hasty.close()
    await ledger.close()


async def test_a_disk_that_is_full_accepts_nothing_and_loses_nothing(server: StoreServer) -> None:
    """With an fsync for each turn a server that cannot write ends; half a line is left at most."""
    ledger = await Ledger.connect(server.url, limits=HASTY)
    ids = await accepted(ledger)
    (written,) = server.folder.glob("appendonlydir/*.incr.aof")
    full = written.stat().st_size + 3000
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (full, full))
    for index in range(REQUESTS, 1000):
        try:
            await ledger.submit(submit_record(f"r{index}"), b"h")
        except Unavailable:
            break
        ids.append(f"r{index}")
    assert REQUESTS < len(ids) < 1000, "the disk was never full"
    server.stop()
    server.start()
    found = await ids_of(ledger)
    # The last one may have been written, and its reply not sent.
    assert found[: len(ids)] == ids
    assert len(found) <= len(ids) + 1
    assert (await ledger.submit(submit_record("after"), b"h")).is_new
    await ledger.close()


class Far:
    """A cell's store behind a slow way."""

    def __init__(self, folder: Path, relay: Relay) -> None:
        self.folder = folder
        self.url = f"redis://{relay.address}/0"

    def start(self) -> None:
        """It runs."""

    def close(self) -> None:
        """Whose it is ends it."""


async def test_a_store_that_is_far_away_deposes_nobody(server: StoreServer, tmp_path: Path) -> None:
    """Of those who work. Whoever is put aside for a time to live is deposed by right, and this
    machine does that: that renewals come in time over such a way, a clock of its own tells
    (`unit/scheduler_svc/test_renewal.py`)."""
    async with (
        Relay(f"127.0.0.1:{server.port}", delay_s=0.1) as relay,
        Cluster(
            tmp_path / "cell",
            schedulers=2,
            scheduler_flags=UNDISTURBED,
            limits=PATIENT,
            store=Far(tmp_path / "far", relay),
        ) as cluster,
    ):
        before = await cluster.ledger.leader()
        await cluster.submit_many(4, max_tokens=20)
        await cluster.all_done()
        assert before is not None
        now = await cluster.ledger.leader()
        assert now is not None
        assert now.nonce == before.nonce, "no false fail-over"
        assert relay.connections
