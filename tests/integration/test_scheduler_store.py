"""The store dies, freezes, is flushed, or comes last: streams pause, and go on or start anew."""

import asyncio
from pathlib import Path

from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from ledger import StoreLost
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster

LENGTH = FINISH_REASON_LENGTH
STEADY = {"step_ms": 10}


def assert_all_gold(answers: list[Answer]) -> None:
    """Complete; that the tokens are right is checked by the cluster."""
    assert {reason for answer in answers for reason in answer.reasons} == {LENGTH}


async def test_kill_the_store_mid_stream_and_start_it_again(tmp_path: Path) -> None:
    flags = {**STEADY, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        cluster.gates(100)
        answers = await cluster.submit_many(8, max_tokens=150, n=2)
        for answer in answers:
            await answer.has_tokens(5)
        cluster.store.kill()
        await until(lambda: silence_s(answers) > 0.5, "silence")
        assert not any(answer.is_over for answer in answers)
        cluster.open_gates()
        cluster.store.start()
        await cluster.all_done()
        assert_all_gold(answers)


async def test_a_store_that_is_away_while_requests_wait_in_the_queue(tmp_path: Path) -> None:
    # Nothing is trimmed.
    scheduler_flags = {"fold_records": 1_000_000}
    async with Cluster(
        tmp_path, scheduler_flags=scheduler_flags, worker_flags={"slots": 1, "step_ms": 5}
    ) as cluster:
        # So that the leader looks at them all again.
        await cluster.number_entries_ahead()
        answers = await cluster.submit_many(20, max_tokens=10)
        cluster.store.kill()
        # Some end that the store does not know of: they are not begun again.
        await until(lambda: is_left(cluster, at_most=18), "an end that is not committed")
        cluster.store.start()
        await cluster.all_done()
        assert_all_gold(answers)
        records = await cluster.ledger.journal_read(0, block_ms=1, count=10_000)
        ended = [ending.sequence_id for record in records for ending in record.finished]
        assert ended == [answer.sequence_id for answer in answers], "first come, first served"


async def test_a_frozen_store_pauses_everybody(tmp_path: Path) -> None:
    # Longer than a scheduler is put aside for.
    scheduler_flags = {"lease_ttl_s": 4.0}
    async with Cluster(
        tmp_path, schedulers=2, scheduler_flags=scheduler_flags, worker_flags=STEADY
    ) as cluster:
        answers = await cluster.submit_many(8, max_tokens=150)
        for answer in answers:
            await answer.has_tokens(5)
        lease = await cluster.ledger.leader()
        with cluster.store.paused():
            # Longer than the lease: whoever cannot ask must not conclude anything.
            await until(lambda: silence_s(answers) > 4.5, "silence")
        await cluster.all_done()
        assert_all_gold(answers)
        now = await cluster.ledger.leader()
        assert lease is not None
        assert now is not None
        assert (now.epoch, now.nonce) == (lease.epoch, lease.nonce), "no false fail-over"


async def test_planning_held_back_by_the_store_goes_on_with_its_answer(tmp_path: Path) -> None:
    """Not with the next tick, or whatever else happens: here nothing does."""
    scheduler_flags = {"uncommitted_steps_max": 1, "lease_steps_max": 1, "lease_ttl_s": 600}
    async with Cluster(
        tmp_path,
        scheduler_flags=scheduler_flags,
        scheduler_module="tests.support.rare_ticks",
        worker_flags={"step_ms": 1},
    ) as cluster:
        answer = await cluster.submit(max_tokens=40)
        await cluster.all_done()
        assert_all_gold([answer])


async def is_left(cluster: Cluster, *, at_most: int) -> bool:
    state = await cluster.state()
    return state is not None and state.waiting + state.running <= at_most


def silence_s(answers: list[Answer]) -> float:
    return min(answer.silence_s for answer in answers)


async def test_a_flushed_store_ends_the_leadership_and_a_new_one_serves(tmp_path: Path) -> None:
    async with Cluster(tmp_path, worker_flags={"gates": tmp_path / "gates"}) as cluster:
        cluster.gates(100)
        lost = await cluster.submit_many(4, max_tokens=900)
        for answer in lost:
            await answer.has_tokens(5)
        await cluster.flush()
        for answer in lost:
            await answer.fails_with(StoreLost)
        cluster.open_gates()
        scheduler = cluster.schedulers[0]
        await until(
            lambda: cluster.events(scheduler, "leadership.ended"), "the end of the leadership"
        )
        cluster.answers.clear()
        await cluster.connect()
        await cluster.ready(workers=1)
        answers = await cluster.submit_many(8)
        await cluster.all_done()
        assert_all_gold(answers)


async def test_worker_first_then_scheduler_then_store(tmp_path: Path) -> None:
    async with Cluster(tmp_path, is_started=False) as cluster:
        (worker,), (scheduler,) = cluster.workers, cluster.schedulers
        worker.start()
        await until(lambda: cluster.events(worker, "worker.unregistered"), "nobody to register at")
        scheduler.start()
        await until(lambda: cluster.state_of(cluster.scheduler_addresses[0]), "a scheduler")
        assert await cluster.state() is None, "nobody leads without a store"
        cluster.store.start()
        await cluster.connect()
        await cluster.ready(workers=1)
        answers = await cluster.submit_many(4)
        await cluster.all_done()
        assert_all_gold(answers)


async def test_requests_that_wait_for_the_first_worker(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=0) as cluster:
        answers = await cluster.submit_many(4)
        cancelled = await cluster.submit()
        assert await cluster.ledger.cancel(cancelled.record.id)
        await cancelled.done()
        cluster.add_worker({}).start()
        await cluster.all_done()
        assert_all_gold(answers)


async def test_a_store_that_may_lose_requests_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with Cluster(tmp_path, is_started=False) as cluster:
        cluster.is_checked = False
        cluster.store.settings["appendonly"] = "no"
        cluster.store.start()
        (scheduler,) = cluster.schedulers
        scheduler.start()
        assert await asyncio.to_thread(scheduler.join) == 2
        assert "appendonly must be yes" in scheduler.log()
        assert "Fix: CONFIG SET appendonly yes" in scheduler.log()
