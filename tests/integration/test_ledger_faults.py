"""The store fails: killed, restarted, flushed, full, misconfigured, absent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from redis.asyncio import Redis

from ledger import Commit, Follower, Ledger, LedgerLimits, Load, StoreLost
from ledger.durability import RULES, SETTINGS
from ledger.types import Submitted
from service_kit.errors import ConfigError, Unavailable
from tests.support.play_leader import PlayLeader, eventually, submit_record
from tests.support.store_server import StoreServer, own_store

T = TypeVar("T")
PATIENT = LedgerLimits(retry_s=60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A server of one's own, to be hurt."""
    with own_store(tmp_path / "store") as server:
        yield server


@contextlib.asynccontextmanager
async def connected(
    server: StoreServer, limits: LedgerLimits | None = None
) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(server.url, limits=limits)
    try:
        yield ledger
    finally:
        await ledger.close()


async def in_the_end(ask: Callable[[], Awaitable[T]]) -> T:
    """As a caller insists: a handle with little patience refuses on a busy machine, too."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except Unavailable:
                await asyncio.sleep(0.01)


async def submitted_in_the_end(ledger: Ledger, id: str) -> Submitted:
    return await in_the_end(partial(ledger.submit, submit_record(id), b"h"))


async def test_a_killed_store_loses_nothing_it_acknowledged(server: StoreServer) -> None:
    async with connected(server, PATIENT) as ledger:
        sequence_ids = {}
        for index in range(20):
            submitted = await ledger.submit(submit_record(f"r{index}"), b"h")
            sequence_ids[f"r{index}"] = submitted.sequence_id
        leader = await PlayLeader.elected(ledger)
        for token in range(10):
            await leader.step({sequence_id: [token] for sequence_id in sequence_ids.values()})
        await leader.finish("r0", sequence_ids["r0"])
        await leader.fold(leader.base + 5, list(sequence_ids.values())[1:])
        before = await ledger.inbox_all()
        server.kill()

        # Sent while the store is away: waits, and is applied once when it is back.
        late = asyncio.create_task(ledger.submit(submit_record("late"), b"h"))
        step = asyncio.create_task(leader.step({sequence_ids["r1"]: [77]}))
        await asyncio.sleep(0)
        server.start()
        assert (await asyncio.wait_for(late, 60)).is_new
        await asyncio.wait_for(step, 60)

        after = await ledger.inbox_all()
        assert [entry.record.id for entry in after[:-1]] == [e.record.id for e in before]
        assert after[-1].record.id == "late"
        for id, sequence_id in sequence_ids.items():
            history = await ledger.history(sequence_id, through_seq=leader.seq)
            assert list(history.output.token_ids) == leader.outputs[sequence_id], id
        assert await ledger.load() == Load(choices=20, prompt_tokens=60)
        assert await ledger.result("r0") is not None


async def test_subscriptions_pause_and_go_on_over_a_restart(server: StoreServer) -> None:
    async with connected(server, PATIENT) as ledger:
        sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
        leader = await PlayLeader.elected(ledger)
        follower = Follower(ledger)
        tail = asyncio.create_task(follower.run())
        subscription = follower.subscribe([sequence_id], from_seq=0)
        await leader.step({sequence_id: [0, 1]})
        first = await asyncio.wait_for(anext(subscription), 60)
        server.kill()
        await eventually(lambda: not follower.is_connected)
        server.start()
        # Committed, folded and trimmed before the follower is back: the history must fill in.
        await leader.step({sequence_id: [2, 3]})
        await leader.step({sequence_id: [4]})
        await leader.fold(leader.seq, [sequence_id])
        await leader.finish("a", sequence_id)
        tokens = list(first.token_ids)
        async with asyncio.timeout(60):
            async for update in subscription:
                assert not update.token_ids or update.position == len(tokens)
                tokens += update.token_ids
        assert tokens == [0, 1, 2, 3, 4]
        assert follower.is_connected
        tail.cancel()


async def test_scripts_come_back_after_the_cache_is_emptied(server: StoreServer) -> None:
    async with connected(server) as ledger:
        leader = await PlayLeader.elected(ledger)
        client = Redis.from_url(server.url)
        for _ in range(3):
            await client.script_flush()
            batch = [Commit(leader.record({1: [i]})) for i in range(3)]
            await ledger.commit_many(leader.leader, batch)
        await client.aclose()
        lease = await ledger.leader()
        assert lease is not None
        assert lease.journal_seq == leader.base + 9


async def test_a_flushed_store_is_noticed_by_everyone_and_nothing_is_written(
    server: StoreServer,
) -> None:
    async with connected(server) as ledger:
        sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
        leader = await PlayLeader.elected(ledger)
        follower = Follower(ledger)
        tail = asyncio.create_task(follower.run())
        await eventually(lambda: follower.is_connected or tail.done())
        subscription = follower.subscribe([sequence_id], from_seq=0)
        client = Redis.from_url(server.url)
        await client.flushall()
        for lost in (
            ledger.submit(submit_record("b"), b"h"),
            ledger.commit(leader.leader, leader.record({sequence_id: [1]})),
            ledger.find("a"),
            ledger.inbox_read("0-0", block_ms=10),
            ledger.leader(),
        ):
            with pytest.raises(StoreLost):
                await lost
        with pytest.raises(StoreLost):
            await asyncio.wait_for(anext(subscription), 60)
        with pytest.raises(StoreLost):
            await tail
        assert not follower.is_connected
        with pytest.raises(StoreLost):
            await anext(follower.subscribe([sequence_id], from_seq=0))
        assert await client.dbsize() == 0
        # A new handle starts an empty cell; the old one stays lost.
        async with connected(server) as fresh:
            await fresh.check()
            successor = await PlayLeader.elected(fresh)
            assert successor.leader.epoch > leader.leader.epoch
            assert (await fresh.submit(submit_record("a"), b"h")).is_new
        with pytest.raises(StoreLost):
            await ledger.check()
        await client.aclose()


async def test_a_fresh_store_elects_above_every_epoch_of_its_predecessor(
    server: StoreServer,
) -> None:
    # More elections than seconds go by: workers would refuse a leader of an epoch they have seen.
    async with connected(server) as ledger:
        for nonce in range(1, 101):
            last = await ledger.elect("here", nonce, seen=await ledger.leader())
    assert last is not None
    client = Redis.from_url(server.url)
    await client.flushall()
    await client.aclose()
    async with connected(server) as fresh:
        first = await fresh.elect("here", 1)
    assert first is not None
    assert first.epoch > last.epoch


async def test_a_full_store_refuses_requests_and_still_drains(server: StoreServer) -> None:
    async with connected(server, LedgerLimits(retry_s=0.2)) as ledger:
        sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
        leader = await PlayLeader.elected(ledger)
        talk = await ledger.conversations.new("alice", "conv_1", b"")
        client = Redis.from_url(server.url)
        await client.config_set("maxmemory", "1")
        with pytest.raises(Unavailable, match="out of memory"):
            await ledger.submit(submit_record("b"), b"h")
        with pytest.raises(Unavailable, match="out of memory"):
            await ledger.conversations.change("alice", talk, b"a question")
        # What leaves the store by that must be able to.
        answered = partial(ledger.conversations.change, "alice", talk, b"an answer")
        assert await answered(is_let_in=True) is not None
        await leader.step({sequence_id: [1]})
        # Several go out as one transaction, which must be allowed as well, with no script cached.
        await client.script_flush()
        batch = [Commit(leader.record({sequence_id: [token]})) for token in (2, 3)]
        await ledger.commit_many(leader.leader, batch)
        await leader.finish("a", sequence_id)
        assert await ledger.load() == Load(choices=0, prompt_tokens=0)
        await client.config_set("maxmemory", "0")
        assert (await ledger.submit(submit_record("b"), b"h")).is_new
        await client.aclose()


async def test_an_absent_store_is_unavailable_within_the_bound(server: StoreServer) -> None:
    server.stop()
    limits = LedgerLimits(retry_s=0.3, connect_timeout_s=0.5)
    async with connected(server, limits) as ledger:
        for call in (ledger.submit(submit_record("a"), b"h"), ledger.leader(), ledger.check()):
            async with asyncio.timeout(20):
                with pytest.raises(Unavailable, match="cannot be reached"):
                    await call
        # It may start later: no reconnecting by hand.
        server.start()
        await submitted_in_the_end(ledger, "a")
        assert (await in_the_end(ledger.load)).choices == 1


async def test_a_stopped_store_is_unavailable_within_the_bound(server: StoreServer) -> None:
    limits = LedgerLimits(retry_s=1.0, operation_timeout_s=1.0, connect_timeout_s=1.0)
    async with connected(server, limits) as ledger:
        await submitted_in_the_end(ledger, "a")
        with server.paused():
            async with asyncio.timeout(60):
                with pytest.raises(Unavailable, match="no answer in time"):
                    await ledger.submit(submit_record("b"), b"h")
        # What was sent before the timeout may have been applied: the same call says so, once.
        await submitted_in_the_end(ledger, "b")
        assert (await in_the_end(ledger.load)).choices == 2


async def test_a_cancelled_call_does_not_disturb_the_next(server: StoreServer) -> None:
    async with connected(server) as ledger:
        first = (await ledger.submit(submit_record("a"), b"h")).sequence_id
        for index in range(30):
            call = asyncio.create_task(ledger.submit(submit_record(f"r{index}"), b"h"))
            for _ in range(index):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            assert (await ledger.find("a")).sequence_id == first


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("appendonly", "no", "appendonly must be yes"),
        ("appendfsync", "everysec", "appendfsync must be always"),
        ("maxmemory-policy", "allkeys-lru", "maxmemory-policy must be noeviction"),
    ],
)
async def test_check_refuses_a_store_that_may_lose_requests(
    server: StoreServer, setting: str, value: str, rule: str
) -> None:
    client = Redis.from_url(server.url)
    async with connected(server) as ledger:
        info = await ledger.check()
        assert info.appendfsync == "always"
        await client.config_set(setting, value)
        with pytest.raises(ConfigError, match=rf"{rule}.*Fix: CONFIG SET {setting}"):
            await ledger.check()
    if setting == "appendfsync":
        async with connected(server, LedgerLimits(allow_everysec=True)) as ledger:
            assert (await ledger.check()).appendfsync == "everysec"
    await client.aclose()


async def test_check_refuses_another_schema_and_a_store_without_its_meta(
    server: StoreServer,
) -> None:
    async with connected(server) as ledger:
        await ledger.submit(submit_record("a"), b"h")
        meta = ledger.keys.meta
    client = Redis.from_url(server.url)
    await client.hset(meta, "schema", "999")
    async with connected(server) as ledger:
        with pytest.raises(ConfigError, match=r"schema 999.*Fix: use another cell"):
            await ledger.check()
    await client.delete(meta)
    async with connected(server) as ledger:
        with pytest.raises(ConfigError, match="must exist while cell '0' has other keys"):
            await ledger.check()
    await client.aclose()


async def test_check_says_when_it_may_not_look_or_log_in(server: StoreServer) -> None:
    client = Redis.from_url(server.url)
    rights = ["~*", "+@all", "-config"]
    await client.execute_command(  # type: ignore[no-untyped-call]
        "ACL", "SETUSER", "shy", "on", ">secret", *rights
    )
    ledger = await Ledger.connect(server.url.replace("//", "//shy:secret@"))
    with pytest.raises(ConfigError, match=r"Fix: allow this user \+config\|get"):
        await ledger.check()
    # Everything else works for such a user.
    assert (await ledger.submit(submit_record("a"), b"h")).is_new
    await ledger.close()
    ledger = await Ledger.connect(server.url.replace("//", "//shy:wrong@"))
    with pytest.raises(ConfigError, match="must accept the url's user and password"):
        await ledger.check()
    await ledger.close()
    await client.aclose()


async def test_a_store_that_does_not_know_a_setting_is_not_taken_for_safe(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Redis renames, or another server leaves out, is answered with nothing."""
    rule = ("append-safely", ("yes",), "nobody knows")
    monkeypatch.setattr("ledger.durability.RULES", (*RULES, rule))
    monkeypatch.setattr("ledger.store.SETTINGS", (*SETTINGS, "append-safely"))
    async with connected(server) as ledger:
        with pytest.raises(ConfigError, match="append-safely must be yes, but it cannot be read"):
            await ledger.check()


async def test_a_store_out_of_connections_recovers_by_itself(server: StoreServer) -> None:
    client = Redis.from_url(server.url, single_connection_client=True)
    await client.config_set("maxclients", "1")
    async with connected(server, LedgerLimits(retry_s=0.2)) as ledger:
        with pytest.raises(Unavailable):
            await ledger.submit(submit_record("a"), b"h")
        await client.config_set("maxclients", "100")
        await submitted_in_the_end(ledger, "a")
        assert (await in_the_end(ledger.load)).choices == 1
    await client.aclose()
