"""A url that does not suit its servers, a store that cannot keep what it promises, a user that may
not do what the ledger does: a sentence each, before anything is accepted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from kaiten.local.ports import HeldPort
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import Ledger, LedgerLimits
from ledger.acl import keys_rule
from ledger.servers.commands import ALL, needed
from ledger.servers.refusals import is_transient, translated
from service_kit.errors import ConfigError, Unavailable
from tests.support.store_server import StoreServer, own_store

RECORD = SubmitRecord(
    id="default:1",
    tenant="default",
    n=1,
    prompt_token_ids=[7],
    sampling=RowSampling(max_tokens=1),
)


async def check(url: str, cell: str = "0", **limits: Any) -> None:
    limits = {"retry_s": 0.0, **limits}
    ledger = await Ledger.connect(url, cell=cell, limits=LedgerLimits(**limits))
    try:
        await ledger.check()
    finally:
        await ledger.close()


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """A cluster of one, which has the slots that a test gives it."""
    with HeldPort() as bus:
        settings = {"cluster_enabled": "yes", "cluster_port": str(bus.number)}
        with own_store(tmp_path_factory.mktemp("lone"), **settings) as server:
            yield server


def take_slots(admin: Any) -> None:
    """All, of a cluster of one: it has none."""
    admin.execute_command("FLUSHALL")
    admin.execute_command("CLUSTER", "FLUSHSLOTS")


@pytest.mark.parametrize(
    ("scheme", "path", "rule"),
    [
        ("redis+cluster", "", r"redis\+cluster:// must lead to servers of a cluster.*redis://"),
        ("redis+sentinel", "/main", r"redis\+sentinel:// must lead to Sentinels.*redis://"),
    ],
)
async def test_a_single_server_is_neither_cluster_nor_sentinel(
    redis_url: str, cell: str, scheme: str, path: str, rule: str
) -> None:
    place = redis_url.removeprefix("redis://").removesuffix("/0")
    with pytest.raises(ConfigError, match=rule):
        await check(f"{scheme}://{place}{path}", cell)


async def test_a_server_of_a_cluster_is_not_a_single_one(lone: StoreServer) -> None:
    with pytest.raises(ConfigError, match=r"the server is a cluster.*redis\+cluster://HOST,HOST"):
        await check(lone.url)


async def test_a_cluster_without_the_cells_slot_is_named_and_mended(lone: StoreServer) -> None:
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{lone.port}"
    with Redis(port=lone.port) as admin:
        take_slots(admin)
        with pytest.raises(ConfigError, match=r"must serve slot 13907, .*CLUSTER ADDSLOTS 13907"):
            await check(url)
        # Another one than ours, and then ours.
        admin.execute_command("CLUSTER", "ADDSLOTS", 1)
        with pytest.raises(ConfigError, match=r"slot 13907, which has the keys kaiten:\{0\}:\*"):
            await check(url)
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 0, 2, 16383)
    # It thinks about it for a moment.
    await check(url, retry_s=60.0)


async def test_a_service_that_runs_waits_for_a_slot_that_was_taken_away(lone: StoreServer) -> None:
    url = f"redis+cluster://127.0.0.1:{lone.port}"
    with Redis(port=lone.port) as admin:
        take_slots(admin)
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await check(url, retry_s=60.0)
        ledger = await Ledger.connect(url, cell="7", limits=LedgerLimits(retry_s=0.0))
        admin.execute_command("CLUSTER", "DELSLOTS", 1716)
        with pytest.raises(Unavailable, match=r"must serve slot 1716|cluster is down"):
            await ledger.leader()
        admin.execute_command("CLUSTER", "ADDSLOTS", 1716)
        await ledger.close()


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/a"])
async def test_servers_that_are_away_are_waited_for(url: str, cell: str) -> None:
    with pytest.raises(Unavailable):
        await check(url, cell)


async def test_too_few_replicas_for_a_promise(redis_url: str, cell: str) -> None:
    rule = r"must have 2 replicas \(store-replicas-min\); 0 are connected"
    with pytest.raises(Unavailable, match=rule):
        await check(redis_url, cell, replicas_min=2)


async def test_a_replica_is_no_store(redis_url: str, cell: str, tmp_path: Path) -> None:
    place = redis_url.removeprefix("redis://").removesuffix("/0").split(":")
    with (
        own_store(tmp_path / "replica", replicaof=" ".join(place)) as replica,
        pytest.raises(ConfigError, match=rf"this server is a replica of 127.0.0.1:{place[1]}"),
    ):
        # It may still be loading what it is a replica of.
        await check(replica.url, cell, retry_s=60.0)


@pytest.mark.parametrize("command", ["xadd", "script|load", "config|get", "xtrim", "waitaof"])
async def test_a_user_that_may_not_do_all_that_is_needed(
    redis_url: str, cell: str, command: str
) -> None:
    """Found at the start, not by the first request."""
    allowed = [f"+{name}" for name in ALL if name != command]
    with Redis.from_url(redis_url) as admin:
        rules = f"reset on >pw {keys_rule(cell)} -@all".split()
        admin.execute_command("ACL", "SETUSER", f"short-{cell}", *rules, *allowed)
        url = redis_url.replace("redis://", f"redis://short-{cell}:pw@")
        try:
            with pytest.raises((ConfigError, Unavailable), match=r"lacks a permission|CONFIG\|GET"
                               r"|config\|get|must be allowed " + command.upper()):  # fmt: skip
                await check(url, cell, replicas_min=1)
        finally:
            admin.execute_command("ACL", "DELUSER", f"short-{cell}")


async def test_a_user_that_loses_a_command_while_it_is_used_is_told_and_goes_on_later(
    redis_url: str, cell: str
) -> None:
    """What a script is refused is no error of ours: services wait, as for a store that is away."""
    user = f"loses-{cell}"
    with Redis.from_url(redis_url) as admin:
        rules = f"reset on >pw {keys_rule(cell)} -@all".split()
        admin.execute_command("ACL", "SETUSER", user, *rules, *(f"+{name}" for name in ALL))
        url = redis_url.replace("redis://", f"redis://{user}:pw@")
        ledger = await Ledger.connect(url, cell=cell, limits=LedgerLimits(retry_s=0.0))
        try:
            await ledger.check()
            admin.execute_command("ACL", "SETUSER", user, "-xadd")
            with pytest.raises(Unavailable, match=r"the ledger's user lacks a permission: .*xadd"):
                await ledger.submit(RECORD, b"one")
            admin.execute_command("ACL", "SETUSER", user, "+xadd")
            await ledger.submit(RECORD, b"one")
        finally:
            await ledger.close()
            admin.execute_command("ACL", "DELUSER", user)


async def test_a_wrong_password_is_said_without_it(redis_url: str, cell: str) -> None:
    with pytest.raises(ConfigError, match="must accept the url's user and password") as caught:
        await check(redis_url.replace("redis://", "redis://nobody:s3cret@"), cell)
    assert "s3cret" not in str(caught.value)


def test_what_is_needed_is_allowed() -> None:
    for kind in ("single", "cluster", "sentinel"):
        assert set(needed(kind, 1)) <= set(ALL)
    assert "wait" not in needed("single", 0)


def test_a_primary_that_becomes_a_replica_in_between_has_not_said_the_last_word(
    tmp_path: Path,
) -> None:
    """It took a write, and what waits for its replicas finds it one of them: as the server says it.

    A frozen primary that thaws meets its successor just so.
    """
    with own_store(tmp_path / "store") as store, Redis.from_url(store.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", 1)
        for waits in (("WAIT", 1, 1), ("WAITAOF", 0, 1, 1)):
            with pytest.raises(ResponseError) as refused:
                client.execute_command(*waits)
            assert is_transient(refused.value), refused.value
            assert isinstance(translated(refused.value), Unavailable)
