"""The store goes back in time: a backup restored, a second lost. Nobody is served another's tokens,
nobody waits for what is not there any more, and there is a leader that workers follow.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH, Leader
from kaiten.v1.worker_service_pb2 import ExecuteRequest, Open
from kaiten.v1.worker_service_pb2_grpc import WorkerServiceStub
from ledger import Follower, Lease, Ledger
from service_kit.errors import NotFound
from tests.support.answers import until
from tests.support.cluster import Cluster, gold
from tests.support.play_leader import PlayLeader, eventually, submit_record
from tests.support.set_clock import COMPILER, SetClock
from tests.support.store_server import StoreServer, own_store

HOUR_US = 3_600_000_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A server of one's own, to be hurt."""
    with own_store(tmp_path / "store") as server:
        yield server


async def test_nothing_is_minted_twice(server: StoreServer, tmp_path: Path) -> None:
    ledger = await Ledger.connect(server.url)
    kept = await ledger.submit(submit_record("kept"), b"h")
    before = await PlayLeader.elected(ledger)
    await before.step({kept.sequence_id: [1]})
    server.stop()
    server.back_up(tmp_path / "backup")
    server.start()
    lost = await ledger.submit(submit_record("lost", n=3), b"h")
    last = await PlayLeader.elected(ledger, nonce=2)
    for token in range(5):
        await last.step({lost.sequence_id: [token]})
    server.stop()
    server.restore(tmp_path / "backup")
    server.start()
    again = await ledger.submit(submit_record("lost"), b"h")
    assert again.is_new
    assert again.sequence_id >= lost.sequence_id + 3
    successor = await PlayLeader.elected(ledger, nonce=3)
    assert successor.leader.epoch > last.leader.epoch
    assert successor.leader.journal_seq > last.seq
    assert successor.leader.after_seq == before.seq
    await ledger.close()


async def test_who_follows_hears_what_is_lost_and_goes_on_with_the_rest(
    server: StoreServer, tmp_path: Path
) -> None:
    ledger = await Ledger.connect(server.url)
    kept = await ledger.submit(submit_record("kept"), b"h")
    before = await PlayLeader.elected(ledger)
    await before.step({kept.sequence_id: [0, 1]})
    server.stop()
    server.back_up(tmp_path / "backup")
    server.start()
    lost = await ledger.submit(submit_record("lost"), b"h")
    follower = Follower(ledger)
    tail = asyncio.create_task(follower.run())
    await eventually(lambda: follower.is_connected)
    with (
        follower.subscribe([kept.sequence_id], from_seq=0) as of_kept,
        follower.subscribe([lost.sequence_id], from_seq=lost.journal_seq) as of_lost,
    ):
        # Seen, and then it never happened.
        await before.step({kept.sequence_id: [2, 3], lost.sequence_id: [7]})
        seen = (await asyncio.wait_for(anext(of_kept), 60)).token_ids
        assert (await asyncio.wait_for(anext(of_lost), 60)).token_ids == [7]
        server.kill()
        server.restore(tmp_path / "backup")
        server.start()
        successor = await PlayLeader.elected(ledger, nonce=2)
        successor.outputs = {kept.sequence_id: [0, 1]}
        other = await ledger.submit(submit_record("other"), b"h")
        # The same tokens once more, and one that is new; and of another request its first.
        await successor.step({kept.sequence_id: [2, 3, 4], other.sequence_id: [9]})
        while len(seen) < 5:
            seen += (await asyncio.wait_for(anext(of_kept), 60)).token_ids
        assert seen == [0, 1, 2, 3, 4]
        with pytest.raises(NotFound):
            await asyncio.wait_for(anext(of_lost), 60)
    tail.cancel()
    with suppress(asyncio.CancelledError):
        await tail
    await ledger.close()


@pytest.mark.skipif(COMPILER is None, reason="a clock to be set needs a C compiler")
@pytest.mark.parametrize("is_late", [False, True], ids=["back first", "back last"])
async def test_an_end_is_heard_though_its_record_has_a_number_seen_before(
    tmp_path: Path, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the clock is behind what it was: what was lost is no gap in the numbers."""
    clock = SetClock(tmp_path / "clock")
    clock.set(HOUR_US // 1_000_000)
    with own_store(tmp_path / "store", clock.environ) as server:
        ledger, watching = await Ledger.connect(server.url), await Ledger.connect(server.url)
        kept = await ledger.submit(submit_record("kept"), b"h")
        before = await PlayLeader.elected(ledger)
        await before.step({kept.sequence_id: [0]})
        server.stop()
        server.back_up(tmp_path / "backup")
        server.start()
        looked, may_look = watching.leader, asyncio.Event()

        async def look() -> Lease | None:
            await may_look.wait()
            return await looked()

        monkeypatch.setattr(watching, "leader", look)
        may_look.set()
        follower = Follower(watching)
        tail = asyncio.create_task(follower.run())
        await eventually(lambda: follower.is_connected)
        with follower.subscribe([kept.sequence_id], from_seq=0) as subscription:
            seen: list[int] = []
            await before.step({kept.sequence_id: [1]})
            await before.step({kept.sequence_id: [2]})
            while len(seen) < 3:
                seen += (await asyncio.wait_for(anext(subscription), 60)).token_ids
            server.kill()
            await eventually(lambda: not follower.is_connected)
            server.restore(tmp_path / "backup")
            clock.set(0)
            if is_late:
                may_look.clear()
            server.start()
            if not is_late:
                await eventually(lambda: follower.is_connected)
            successor = await PlayLeader.elected(ledger, nonce=2)
            assert successor.leader.journal_seq < before.seq
            successor.outputs = {kept.sequence_id: [0]}
            await successor.step({kept.sequence_id: [1, 2]})
            await successor.finish("kept", kept.sequence_id)
            may_look.set()
            update = await asyncio.wait_for(anext(subscription), 60)
            assert update.finished is not None
            assert seen + update.token_ids == [0, 1, 2]
        tail.cancel()
        with suppress(asyncio.CancelledError):
            await tail
        await ledger.close()
        await watching.close()


async def test_a_new_leader_of_the_same_store_is_no_gap(server: StoreServer) -> None:
    """A follower that read all of what there was reads no history for it."""
    ledger = await Ledger.connect(server.url)
    kept = await ledger.submit(submit_record("kept"), b"h")
    before = await PlayLeader.elected(ledger)
    await before.step({kept.sequence_id: [0]})
    follower = Follower(ledger)
    follower.start_at(before.seq)
    subscription = follower.subscribe(
        [kept.sequence_id], from_seq=before.seq, positions={kept.sequence_id: 1}
    )
    # One that committed nothing is none either.
    await PlayLeader.elected(ledger, nonce=3)
    successor = await PlayLeader.elected(ledger, nonce=2)
    successor.outputs = before.outputs
    await successor.step({kept.sequence_id: [1]})
    for record in await ledger.journal_read(before.seq, block_ms=1, count=9):
        follower.take(record)
    (pending,) = subscription.pending
    assert (pending.has_hole, pending.token_ids) == (False, [1])
    await ledger.close()


# On real processes


async def test_an_older_backup_is_restored_under_live_workers_and_followers(
    tmp_path: Path,
) -> None:
    flags = {"step_ms": 5, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        (scheduler,) = cluster.schedulers
        cluster.gates(20)
        kept = await cluster.submit(max_tokens=40)
        await kept.has_tokens(10)
        cluster.store.kill()
        cluster.store.back_up(tmp_path / "backup")
        cluster.store.start()
        # Workers come to know a leader that the backup does not.
        cluster.open_gates()
        await kept.done()
        scheduler.kill()
        scheduler.start()
        await cluster.ready(workers=1)
        cluster.gates(20)
        lost = await cluster.submit(max_tokens=40)
        await lost.has_tokens(10)
        cluster.store.kill()
        cluster.store.restore(tmp_path / "backup")
        cluster.store.start()
        cluster.open_gates()
        await lost.fails_with(NotFound)
        cluster.answers.remove(lost)
        await lost.close()
        later = await cluster.submit(max_tokens=40)
        assert later.sequence_id > lost.sequence_id
        await cluster.all_done()
        assert kept.reasons == later.reasons == [FINISH_REASON_LENGTH]


async def test_a_submit_that_the_store_lost_is_no_other_request(tmp_path: Path) -> None:
    """A crash under `everysec`: the leader has taken it in, and leads on. Also where the store's
    clock is behind what it was: what comes later has an id before that of the one lost.
    """
    flags = {"step_ms": 5, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        with cluster.held():
            cluster.store.kill()
            cluster.store.back_up(tmp_path / "backup")
            cluster.store.start()
            await cluster.number_entries_ahead()
            lost = await cluster.submit(max_tokens=10)
            await until(lambda: holds(cluster, 1), "the leader has it")
            cluster.store.kill()
            cluster.store.restore(tmp_path / "backup")
            cluster.store.start()
            later = await cluster.submit(max_tokens=30)
            assert later.sequence_id > lost.sequence_id
            await until(lambda: holds(cluster, 2), "the leader has both")
        await cluster.all_done()
        assert lost.outputs[lost.sequence_id] == gold(lost.sequence_id, 10)
        cluster.answers.remove(lost)


async def holds(cluster: Cluster, count: int) -> bool:
    state = await cluster.state()
    return state is not None and state.waiting + state.running == count


async def test_a_leader_that_a_worker_takes_for_stale_stands_for_election_again(
    tmp_path: Path,
) -> None:
    """The store's clock is an hour behind what it was when its predecessor was elected."""
    async with Cluster(tmp_path, worker_flags={"step_ms": 5}) as cluster:
        (scheduler,), (worker,) = cluster.schedulers, cluster.workers
        (ready,) = cluster.events(worker, "service.ready")
        lease = await cluster.ledger.leader()
        assert lease is not None
        ahead = Leader(epoch=lease.epoch + HOUR_US, nonce=1)
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            call = WorkerServiceStub(channel).Execute()
            await call.write(ExecuteRequest(open=Open(leader=ahead, boot_id=ready["boot_id"])))
            assert (await call.read()).WhichOneof("message") == "opened"
        answer = await cluster.submit(max_tokens=20)
        await answer.done()
        assert cluster.events(scheduler, "leadership.outranked")
        after = await cluster.ledger.leader()
        assert after is not None
        assert after.epoch == ahead.epoch + 1
        assert scheduler.is_alive
