"""Schedulers that die, freeze, hand over or compete: one leads, and no token is lost or doubled."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH
from kaiten.v1.scheduler_service_pb2 import RegisterRequest
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.worker_service_pb2 import DescribeRequest
from kaiten.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.support.answers import Answer, until
from tests.support.cluster import UNDISTURBED, Cluster, Flags
from tests.support.processes import FAULTY_SCHEDULER

LENGTH = FINISH_REASON_LENGTH
# They begin together, and who has a longer prompt is at the gate with a dozen of them.
MAX_TOKENS = 50


def gated(folder: Path, step_ms: int = 10) -> Flags:
    """Workers that wait where `mixed` says."""
    (folder / "gates").mkdir()
    return {"step_ms": step_ms, "gates": folder / "gates"}


async def mixed(cluster: Cluster) -> list[Answer]:
    """Sixteen choices of several kinds, each under way: none is over before `open_gates`."""
    with cluster.held():
        cluster.gates(51)
        answers = await cluster.submit_many(6, max_tokens=MAX_TOKENS)
        answers += await cluster.submit_many(2, max_tokens=MAX_TOKENS, n=3)
        answers += await cluster.submit_many(3, max_tokens=MAX_TOKENS, logprobs=1)
        answers += await cluster.submit_many(1, max_tokens=MAX_TOKENS, prompt_tokens=40)
    for answer in answers:
        await answer.has_tokens(5)
    return answers


def assert_all_gold(answers: list[Answer]) -> None:
    """Complete; that the tokens are right is checked by the cluster."""
    assert {reason for answer in answers for reason in answer.reasons} == {LENGTH}


async def leads(cluster: Cluster, index: int) -> bool:
    state = await cluster.state_of(cluster.scheduler_addresses[index])
    return state is not None and state.is_leader


async def roles(cluster: Cluster) -> tuple[int, int]:
    """Indices of the leader and of the standby; exactly one of the two leads."""
    states: list[bool] = []

    async def one_leads() -> bool:
        # Who is put aside does not answer.
        states[:] = [await leads(cluster, index) for index in (0, 1)]
        return sorted(states) == [False, True]

    await until(one_leads, "exactly one leads")
    return states.index(True), states.index(False)


async def test_two_schedulers_and_exactly_one_leads(tmp_path: Path) -> None:
    async with Cluster(tmp_path, schedulers=2, scheduler_flags=UNDISTURBED) as cluster:
        _, standby = await roles(cluster)
        lease = await cluster.ledger.leader()
        assert lease is not None
        answers = await cluster.submit_many(8)
        await cluster.all_done()
        assert_all_gold(answers)
        assert not await leads(cluster, standby)
        now = await cluster.ledger.leader()
        assert now is not None
        assert (now.epoch, now.nonce) == (lease.epoch, lease.nonce)


async def test_kill_the_leader_and_the_standby_takes_over(tmp_path: Path) -> None:
    async with Cluster(tmp_path, schedulers=2, worker_flags=gated(tmp_path)) as cluster:
        leader, standby = await roles(cluster)
        answers = await mixed(cluster)
        cluster.schedulers[leader].kill()
        cluster.open_gates()
        while_away = await cluster.submit(max_tokens=8)
        await until(lambda: leads(cluster, standby), "the standby leads")
        await cluster.all_done()
        assert_all_gold([*answers, while_away])


async def test_kill_the_only_scheduler_and_start_it_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, worker_flags=gated(tmp_path)) as cluster:
        answers = await mixed(cluster)
        cluster.schedulers[0].kill()
        cluster.open_gates()
        answers.append(await cluster.submit(max_tokens=8))
        cancelled = await cluster.submit(max_tokens=8)
        await cluster.ledger.cancel(cancelled.record.id)
        cluster.schedulers[0].start()
        await cluster.all_done()
        assert_all_gold(answers)
        assert cancelled.reasons == [FINISH_REASON_CANCELLED]


async def test_kill_the_scheduler_again_and_again(tmp_path: Path) -> None:
    """Every leader recovers from what the one before had folded and journaled, and folds itself."""
    scheduler_flags = {"fold_records": 15, "lease_ttl_s": 0.3}
    async with Cluster(
        tmp_path, worker_flags=gated(tmp_path, 5), scheduler_flags=scheduler_flags
    ) as cluster:
        answers = await mixed(cluster)
        cluster.open_gates()
        for _ in range(3):
            folded = await folded_seq(cluster)
            # Enough for a fold, however much of the others is over by now.
            answers.append(await cluster.submit(max_tokens=60))
            await until(
                lambda folded=folded: has_folded(cluster, folded), "a fold of this leadership"
            )
            cluster.schedulers[0].kill()
            cluster.schedulers[0].start()
        await cluster.all_done()
        assert_all_gold(answers)


async def folded_seq(cluster: Cluster) -> int:
    lease = await cluster.ledger.leader()
    assert lease is not None
    return lease.folded_seq


async def has_folded(cluster: Cluster, before: int) -> bool:
    """The first fold of a leadership takes what the leadership before had left."""
    return await folded_seq(cluster) > before


async def test_a_leader_told_to_stop_hands_over_at_once(tmp_path: Path) -> None:
    # More than a test waits for anything; a standby looks eight times in it.
    scheduler_flags = {"lease_ttl_s": 120.0}
    async with Cluster(
        tmp_path, schedulers=2, worker_flags=gated(tmp_path), scheduler_flags=scheduler_flags
    ) as cluster:
        leader, standby = await roles(cluster)
        answers = await mixed(cluster)
        cluster.schedulers[leader].send(signal.SIGTERM)
        cluster.open_gates()
        await until(lambda: leads(cluster, standby), "the standby leads")
        assert await asyncio.to_thread(cluster.schedulers[leader].join) == 0
        await cluster.all_done()
        assert_all_gold(answers)


async def test_a_leader_that_was_frozen_is_fenced_when_it_wakes(tmp_path: Path) -> None:
    async with Cluster(tmp_path, schedulers=2, worker_flags=gated(tmp_path)) as cluster:
        leader, standby = await roles(cluster)
        answers = await mixed(cluster)
        frozen = cluster.schedulers[leader]
        frozen.send(signal.SIGSTOP)
        cluster.open_gates()
        await until(lambda: leads(cluster, standby), "the standby leads")
        frozen.send(signal.SIGCONT)
        await until(lambda: cluster.events(frozen, "leadership.ended"), "the old leader gives up")
        await cluster.all_done()
        assert_all_gold(answers)
        await roles(cluster)


async def test_a_freeze_shorter_than_the_lease_changes_nothing(tmp_path: Path) -> None:
    async with Cluster(
        tmp_path, schedulers=2, worker_flags=gated(tmp_path), scheduler_flags=UNDISTURBED
    ) as cluster:
        leader, standby = await roles(cluster)
        answers = await mixed(cluster)
        frozen = cluster.schedulers[leader]
        frozen.send(signal.SIGSTOP)
        cluster.open_gates()
        seen = sum(answer.token_count for answer in answers)
        await until(lambda: min(answer.silence_s for answer in answers) > 0.5, "silence")
        frozen.send(signal.SIGCONT)
        await cluster.all_done()
        assert sum(answer.token_count for answer in answers) > seen
        assert_all_gold(answers)
        assert await roles(cluster) == (leader, standby)


@pytest.mark.parametrize("fault", ["raise", "hang"])
async def test_a_leader_whose_plans_fail_does_not_keep_the_lease(
    tmp_path: Path, fault: str
) -> None:
    """An error in its loop ends it at once; one that hangs in its loop is not renewed."""
    flags = {"lease_ttl_s": 30.0 if fault == "raise" else 2.0, "fault": fault}
    async with Cluster(
        tmp_path,
        schedulers=2,
        worker_flags=gated(tmp_path),
        scheduler_flags={**flags, "fault_folder": tmp_path},
        scheduler_module=FAULTY_SCHEDULER,
    ) as cluster:
        leader, standby = await roles(cluster)
        failing = cluster.schedulers[leader]
        cluster.may_crash.append(failing)
        answers = await mixed(cluster)
        (tmp_path / cluster.scheduler_addresses[leader].rpartition(":")[2]).touch()
        # There is something to plan, however much of the others is over by now.
        answers.append(await cluster.submit(max_tokens=8))
        cluster.open_gates()
        await until(lambda: leads(cluster, standby), "the standby leads")
        if fault == "raise":
            assert await asyncio.to_thread(failing.join) == 1
            assert cluster.events(failing, "service.crashed")
        else:
            failing.kill()
        await cluster.all_done()
        assert_all_gold(answers)


async def test_a_pause_of_the_scheduler_is_not_the_workers_silence(tmp_path: Path) -> None:
    scheduler_flags = {**UNDISTURBED, "worker_timeout_ms": 5000}
    async with Cluster(
        tmp_path, workers=2, worker_flags=gated(tmp_path), scheduler_flags=scheduler_flags
    ) as cluster:
        (scheduler,) = cluster.schedulers
        answers = await mixed(cluster)
        scheduler.send(signal.SIGSTOP)
        cluster.open_gates()
        await until(lambda: min(answer.silence_s for answer in answers) > 8.0, "a long pause")
        scheduler.send(signal.SIGCONT)
        await cluster.all_done()
        assert_all_gold(answers)
        await cluster.ready(workers=2)
        assert not cluster.events(scheduler, "worker.forgotten")


async def test_a_standby_that_dies_is_not_missed(tmp_path: Path) -> None:
    async with Cluster(
        tmp_path, schedulers=2, worker_flags=gated(tmp_path), scheduler_flags=UNDISTURBED
    ) as cluster:
        leader, standby = await roles(cluster)
        lease = await cluster.ledger.leader()
        answers = await mixed(cluster)
        cluster.schedulers[standby].kill()
        cluster.open_gates()
        await cluster.all_done()
        assert_all_gold(answers)
        await until(lambda: leads(cluster, leader), "the leader still leads")
        now = await cluster.ledger.leader()
        assert lease is not None
        assert now is not None
        assert (now.epoch, now.nonce) == (lease.epoch, lease.nonce)


async def test_a_worker_that_registers_while_the_leader_recovers_is_refused_not_forgotten(
    tmp_path: Path,
) -> None:
    """Only the first moment counts: whoever is taken in before there is room is never dialled."""
    async with Cluster(tmp_path) as cluster:
        (worker,), (scheduler,) = cluster.workers, cluster.schedulers
        scheduler.kill()
        answers = await cluster.submit_many(120, max_tokens=2)
        (ready,) = cluster.events(worker, "service.ready")
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            described = await WorkerServiceStub(channel).Describe(DescribeRequest())
        scheduler.start()
        request = RegisterRequest(address=ready["address"], worker=described.worker)
        codes: set[grpc.StatusCode] = set()
        while (code := await register(cluster, request)) is not None:
            codes.add(code)
        assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION}
        await cluster.ready(workers=1)
        await cluster.all_done()
        assert_all_gold(answers)


async def register(cluster: Cluster, request: RegisterRequest) -> grpc.StatusCode | None:
    """None: accepted."""
    async with grpc.aio.insecure_channel(cluster.scheduler_addresses[0]) as channel:
        try:
            await SchedulerServiceStub(channel).Register(request, timeout=60.0)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return None
