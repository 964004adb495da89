"""A cell's slot goes to another server of the cluster under 64 streams."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from ledger import Follower, Ledger, LedgerLimits, StoreLost
from service_kit.errors import Unavailable
from tests.stores.conftest import Lent
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.play_leader import PlayLeader, submit_record
from tests.support.store_group import Group, StoreCluster

pytestmark = pytest.mark.stores
SLOW = pytest.mark.slow

Lend = Callable[[Group], Lent]
STREAMS = 64
WORKER = {"slots": STREAMS, "step_ms": 10, "kv_blocks": 2048}


@pytest.mark.parametrize("by", ["keys", "slot", "failover"])
async def test_64_streams_follow_their_slot(
    store_cluster: StoreCluster, lent: Lend, tmp_path: Path, by: str
) -> None:
    """There and back again, key by key as ever, at once as Valkey 9 can, or to the replica."""
    group = store_cluster
    async with Cluster(
        tmp_path / "cell",
        store=lent(group),
        limits=LedgerLimits(retry_s=60.0),
        worker_flags={**WORKER, "gates": tmp_path / "cell" / "gates"},
    ) as cluster:
        # No stream is over before its slot has moved, however long that takes.
        gates = cluster.gates(100, 190)
        answers = await cluster.submit_many(STREAMS, max_tokens=200)
        for answer in answers:
            await answer.has_tokens(10)
        for gate in (100, 190):
            if by == "failover":
                await asyncio.to_thread(group.fail_over)
            else:
                target = group.other_primaries()[0]
                move = group.move_slot if by == "keys" else group.move_slot_at_once
                await asyncio.to_thread(move, target)
            seen = cluster.token_count
            (gates / str(gate)).unlink()
            await until(lambda seen=seen: cluster.token_count > seen, "tokens from there")


@contextlib.contextmanager
def half_moved(group: StoreCluster, keys: list[str]) -> Iterator[None]:
    """These are at their new place, the others are not."""
    to = group.other_primaries()[0]
    with group.moving(to) as move:
        move(keys)
        yield


@pytest.mark.parametrize(
    "which", ["meta", "request", *(pytest.param(each, marks=SLOW) for each in ("journal", "all"))]
)
async def test_nobody_is_told_that_what_moves_is_not_there(
    store_cluster: StoreCluster, lent: Lend, which: str
) -> None:
    """Between two servers a key looks like none, at either: no request is unknown for it, no store
    lost, no leader deposed, and nothing is accepted by halves.
    """
    group = store_cluster
    lent(group)
    ledger = await Ledger.connect(group.url, limits=LedgerLimits(retry_s=0.05))
    patient = await Ledger.connect(group.url, limits=LedgerLimits(retry_s=60.0))
    sequence_id = (await patient.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(patient)
    await leader.step({sequence_id: [1, 2]})
    keys = ledger.keys
    moved = {
        "meta": [keys.meta],
        "journal": [keys.journal, keys.inbox],
        "request": [keys.request("a"), keys.sequence(sequence_id)],
        "all": [keys.meta, keys.lease, keys.inbox, keys.journal, keys.load, keys.request("a"),
                keys.sequence(sequence_id)],
    }[which]  # fmt: skip

    asked_again: list[int] = []

    async def is_right(call: Awaitable[object], expected: object) -> None:
        try:
            assert await call == expected
        except StoreLost:
            raise
        except Unavailable:
            asked_again.append(1)

    lease = await patient.leader()
    found = await patient.find("a")
    waiting = []
    with half_moved(group, moved):
        for _ in range(2):
            await is_right(ledger.find("a"), found)
            await is_right(ledger.leader(), lease)
            await is_right(ledger.result("a"), None)
            read = ledger.journal_read(leader.base, block_ms=1, count=9)
            await is_right(read, [leader.unfolded[0]])
            history = ledger.history(sequence_id, through_seq=leader.seq)
            with contextlib.suppress(Unavailable):
                assert list((await history).output.token_ids) == [1, 2]
            with contextlib.suppress(Unavailable):
                await ledger.submit(submit_record("new"), b"h")
        waiting.append(asyncio.create_task(patient.submit(submit_record("b"), b"h")))
        await asyncio.sleep(0)
    assert which == "all" or asked_again, "nothing was between two servers"
    (accepted,) = await asyncio.gather(*waiting)
    assert accepted.is_new
    await leader.step({sequence_id: [3]})
    assert (await patient.submit(submit_record("new"), b"h")).sequence_id
    entries = await patient.inbox_all()
    assert sorted(each.record.id for each in entries) == ["a", "b", "new"]
    assert (await patient.load()).choices == 3
    await ledger.close()
    await patient.close()


async def test_who_waits_for_the_next_record_is_woken_at_the_new_place(
    store_cluster: StoreCluster, lent: Lend
) -> None:
    group = store_cluster
    lent(group)
    ledger = await Ledger.connect(group.url, limits=LedgerLimits(retry_s=60.0))
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    follower = Follower(ledger)
    tail = asyncio.create_task(follower.run())
    subscription = follower.subscribe([sequence_id], from_seq=0)
    await leader.step({sequence_id: [1]})
    assert (await asyncio.wait_for(anext(subscription), 60)).token_ids == [1]
    await asyncio.to_thread(group.move_slot_at_once, group.other_primaries()[0])
    await leader.step({sequence_id: [2]})
    assert (await asyncio.wait_for(anext(subscription), 60)).token_ids == [2]
    tail.cancel()
    await asyncio.gather(tail, return_exceptions=True)
    await ledger.close()
