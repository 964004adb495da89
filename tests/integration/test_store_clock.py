"""The store's wall clock is set an hour on or back while requests run."""

from functools import partial
from pathlib import Path

import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_DEADLINE_EXCEEDED, FINISH_REASON_LENGTH
from tests.support.answers import until
from tests.support.cluster import UNDISTURBED, Cluster, Flags
from tests.support.set_clock import COMPILER, SetClock

pytestmark = pytest.mark.skipif(COMPILER is None, reason="a clock to be set needs a C compiler")
HOUR_S = 3600


async def start(cluster: Cluster) -> None:
    cluster.store.start()
    for process in (*cluster.schedulers, *cluster.workers):
        process.start()
    await cluster.connect()
    await cluster.ready(workers=1)


async def holds(cluster: Cluster, count: int) -> bool:
    state = await cluster.state()
    return state is not None and state.waiting + state.running == count


async def ttl_s(cluster: Cluster, id: str) -> int:
    ledger = cluster.ledger
    (found,) = await ledger._store.commands((("TTL", ledger.keys.result(id)),))
    return int(found)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S], ids=["on", "back"])
async def test_a_store_whose_clock_is_set_disturbs_nobody(tmp_path: Path, by_s: int) -> None:
    """The leader stays, ids rise, deadlines and results last as long as they should."""
    clock = SetClock(tmp_path / "clock")
    flags: Flags = {"gates": tmp_path / "cell" / "gates"}
    async with Cluster(
        tmp_path / "cell",
        schedulers=2,
        worker_flags=flags,
        scheduler_flags=UNDISTURBED,
        is_started=False,
    ) as cluster:
        cluster.store.environ.update(clock.environ)
        await start(cluster)
        cluster.gates(100)
        running = await cluster.submit(max_tokens=500)
        await running.has_tokens(5)
        told_ns, state = await cluster.ledger.now_ns(), await cluster.leaders_state()
        clock.set(by_s)

        async def is_seen() -> bool:
            moved_s = (await cluster.ledger.now_ns() - told_ns) / 1e9
            return abs(moved_s - by_s) < 600

        # It reads the clock once for all that came together.
        await until(is_seen, "the store sees the clock")
        patient = await cluster.submit(max_tokens=20, timeout_ms=60_000)
        hurried = await cluster.submit(max_tokens=500, timeout_ms=200)
        await hurried.done()
        cluster.open_gates()
        await cluster.all_done()
        assert patient.reasons == [FINISH_REASON_LENGTH]
        assert hurried.reasons == [FINISH_REASON_DEADLINE_EXCEEDED]
        assert running.sequence_id < patient.sequence_id < hurried.sequence_id
        for answer in (running, patient, hurried):
            assert 0 < await ttl_s(cluster, answer.record.id) <= 600
        assert (await cluster.leaders_state()).leader == state.leader, "nobody else leads"


async def test_a_new_leader_of_a_store_that_was_set_on_ends_nobody_early(tmp_path: Path) -> None:
    """Nor does the one after it. What came before and what came after the step have their time."""
    clock = SetClock(tmp_path / "clock")
    flags: Flags = {"gates": tmp_path / "cell" / "gates"}
    async with Cluster(
        tmp_path / "cell", schedulers=3, worker_flags=flags, is_started=False
    ) as cluster:
        cluster.store.environ.update(clock.environ)
        await start(cluster)
        with cluster.held():
            before = await cluster.submit(max_tokens=20, timeout_ms=300_000)
            clock.set(HOUR_S)

            async def is_told() -> bool:
                record = (await cluster.ledger.cell()).record
                return record is not None and record.clock_step.by_ns > HOUR_S * 0.9e9

            await until(is_told, "the leader tells of the step")
            after = await cluster.submit(max_tokens=20, timeout_ms=300_000)
            for _ in range(2):
                leader = await cluster.leader()
                leader.kill()
                await until(is_told, "its successor does, too")
                await until(partial(holds, cluster, 2), "it has both")
        await cluster.all_done()
        assert before.reasons == after.reasons == [FINISH_REASON_LENGTH]
