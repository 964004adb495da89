"""Workers that die, drain, lie, or do not belong: clients notice nothing but time."""

import signal
from functools import partial
from pathlib import Path

import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH
from tests.fakes.mock_worker import LIES
from tests.support.answers import Answer, until
from tests.support.cluster import IMPATIENT, Cluster

LENGTH = FINISH_REASON_LENGTH
# A mock worker never samples what ends a sequence: only a prompt can hold it.
POISON = 2


def assert_all_gold(answers: list[Answer]) -> None:
    """Complete; that the tokens are right is checked by the cluster."""
    assert {reason for answer in answers for reason in answer.reasons} == {LENGTH}


@pytest.mark.parametrize("gather_ms", [0, 100])
async def test_kill_a_worker_mid_decode_and_another_goes_on(tmp_path: Path, gather_ms: int) -> None:
    flags = {"step_ms": 10, "gather_ms": gather_ms}
    async with Cluster(tmp_path, workers=2, worker_flags=flags) as cluster:
        answers = await cluster.submit_many(16, max_tokens=60)
        for answer in answers:
            await answer.has_tokens(5)
        cluster.workers[0].kill()
        await cluster.all_done()
        assert_all_gold(answers)
        await until(lambda: cluster.events(cluster.schedulers[0], "worker.lost"), "the loss")


async def test_kill_the_only_worker_and_start_it_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, worker_flags={"step_ms": 10}) as cluster:
        answers = await cluster.submit_many(8, max_tokens=50, n=2)
        await answers[-1].has_tokens(5)
        cluster.workers[0].kill()
        newcomer = await cluster.submit(max_tokens=5)
        cluster.workers[0].start()
        await cluster.all_done()
        assert_all_gold([*answers, newcomer])


async def test_kill_a_worker_in_the_middle_of_a_prompt(tmp_path: Path) -> None:
    worker_flags = {"step_tokens": 32, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=worker_flags) as cluster:
        cluster.gates(400)
        answer = await cluster.submit(prompt_tokens=700, max_tokens=10)

        async def is_prefilling() -> bool:
            state = await cluster.state()
            return state is not None and state.running == 1

        await until(is_prefilling, "the prompt in a batch")
        cluster.workers[0].kill()
        cluster.open_gates()
        cluster.workers[0].start()
        await answer.done()
        assert_all_gold([answer])


async def test_a_frozen_worker_is_given_up_and_welcome_back(tmp_path: Path) -> None:
    async with Cluster(
        tmp_path, workers=2, worker_flags={"step_ms": 10}, scheduler_flags=IMPATIENT
    ) as cluster:
        answers = await cluster.submit_many(8, max_tokens=60)
        for answer in answers:
            await answer.has_tokens(5)
        cluster.workers[0].send(signal.SIGSTOP)
        await cluster.all_done()
        cluster.workers[0].send(signal.SIGCONT)
        await cluster.ready(workers=2)
        answers += await cluster.submit_many(8, max_tokens=10)
        await cluster.all_done()
        assert_all_gold(answers)


async def test_a_hung_worker_keeps_nobody_waiting_for_ever(tmp_path: Path) -> None:
    """Its process lives and says so; a step of it does not end. What it had goes on elsewhere."""
    async with Cluster(tmp_path, worker_flags={"step_ms": 10}) as cluster:
        scheduler = cluster.schedulers[0]
        cluster.add_worker({"step_ms": 10, "gates": cluster.gates(50)}).start()
        await cluster.ready(workers=2)
        answers = await cluster.submit_many(20, max_tokens=75)

        async def is_nobody_waiting() -> bool:
            state = await cluster.state()
            return state is not None and state.waiting == 0

        await until(lambda: cluster.events(scheduler, "worker.late"), "the step is overdue")
        await until(is_nobody_waiting, "the other takes whatever waits")
        await cluster.all_done()
        # Of a peer that was put aside for long, gRPC may have lost the connection besides.
        all_lost = cluster.events(scheduler, "worker.lost")
        (lost,) = (e for e in all_lost if e["reason"].startswith("a step has not ended for "))
        assert lost["is_crash"] is None
        cluster.open_gates()
        await cluster.ready(workers=2)
        joined = [entry["worker_id"] for entry in cluster.events(scheduler, "worker.joined")]
        assert joined.count(lost["worker_id"]) >= 2
        answers += await cluster.submit_many(8, max_tokens=10)
        await cluster.all_done()
        assert_all_gold(answers)


async def test_a_draining_worker_hands_its_work_over(tmp_path: Path) -> None:
    """More work than the drain has time for: it exits in time and others finish what it began."""
    slow = {"step_ms": 200, "drain_s": 0.5}
    async with Cluster(tmp_path, worker_flags=slow) as cluster:
        answers = await cluster.submit_many(8, max_tokens=100)
        for answer in answers:
            await answer.has_tokens(2)
        cluster.add_worker({"gates": cluster.gates(90)}).start()
        await cluster.ready(workers=2)
        cluster.workers[0].send(signal.SIGTERM)
        assert cluster.workers[0].join() == 0
        assert not any(answer.is_over for answer in answers), "the drain was cut short"
        cluster.open_gates()
        answers += await cluster.submit_many(4, max_tokens=10)
        await cluster.all_done()
        assert_all_gold(answers)
        lost = [e["is_crash"] for e in cluster.events(cluster.schedulers[0], "worker.lost")]
        # Of a peer that was put aside for long, gRPC may have lost the connection besides.
        assert [is_crash for is_crash in lost if is_crash is not None] == [False]


async def test_an_idle_worker_drains_at_once(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=2, worker_flags={"drain_s": 60}) as cluster:
        cluster.workers[0].send(signal.SIGTERM)
        assert cluster.workers[0].join() == 0
        assert_all_gold([await done(await cluster.submit()) for _ in range(2)])


async def done(answer: Answer) -> Answer:
    await answer.done()
    return answer


# With a time to gather in there are others behind the wrong step, in the same message.
@pytest.mark.parametrize(("lies", "gather_ms"), [(tuple(LIES), 0), (("missing_row",), 100)])
async def test_a_worker_that_lies_is_put_aside(
    tmp_path: Path, lies: tuple[str, ...], gather_ms: int
) -> None:
    """One after the other, each beside one that does not."""
    flags = {"step_ms": 4, "gather_ms": gather_ms}
    async with Cluster(tmp_path, worker_flags=flags) as cluster:
        scheduler = cluster.schedulers[0]
        for count, lie in enumerate(lies, start=1):
            liar = cluster.add_worker({"lie": lie, "lie_after_steps": 5, **flags})
            liar.start()
            await cluster.ready(workers=2)
            await until(partial(is_put_aside, cluster, count), f"quarantine for {lie}")
            assert_all_gold(cluster.answers)
            assert len(cluster.events(scheduler, "step.rejected")) == 3 * count, lie
            await cluster.ready(workers=1)
            liar.kill()
        assert_all_gold([await done(await cluster.submit())])


async def is_put_aside(cluster: Cluster, count: int) -> bool:
    """So many have been; what shows the next one for what it is has been asked."""
    answers = await cluster.submit_many(1, max_tokens=7)
    answers += await cluster.submit_many(3, max_tokens=7, logprobs=1, prompt_logprobs=1)
    for answer in answers:
        await answer.done()
    return len(cluster.events(cluster.schedulers[0], "worker.quarantined")) == count


async def test_a_worker_with_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        stranger = cluster.add_worker({"fingerprint": "other"})
        stranger.start()
        refused = (
            "FAILED_PRECONDITION",
            "fingerprint other of 'checkpoint' differs from mock of 'checkpoint': "
            "the workers of a cell need the same weights, config, dtype and KV dtype",
        )

        def is_refused() -> bool:
            """A leader that is put aside for a moment says nothing of it."""
            noted = cluster.events(stranger, "worker.unregistered")
            return any((each["code"], each["reason"]) == refused for each in noted)

        await until(is_refused, "a refusal")
        assert_all_gold([await done(await cluster.submit())])
        await cluster.ready(workers=1)


async def test_what_was_accepted_for_one_model_waits_for_it(tmp_path: Path) -> None:
    """Its worker and its leader are gone, another model comes: it serves when nothing is live."""
    flags = {"weights_digest": "one", "step_ms": 4, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=flags, scheduler_flags=IMPATIENT) as cluster:
        cluster.gates(20)
        answers = await cluster.submit_many(4, max_tokens=40)
        for answer in answers:
            await answer.has_tokens(3)
        first, scheduler = cluster.workers[0], cluster.schedulers[0]
        first.kill()
        scheduler.kill()
        scheduler.start()
        second = cluster.add_worker({"weights_digest": "two", "fingerprint": "other"})
        second.start()
        reason = (
            "4 live sequences were accepted for other weights (one) than those of 'checkpoint' "
            "(two): let workers of the former model end them, cancel them, or give this one "
            "another --cell"
        )

        def is_refused() -> bool:
            noted = cluster.events(second, "worker.unregistered")
            return any(each["reason"] == reason for each in noted)

        await until(is_refused, "the leader's refusal")
        assert not cluster.events(second, "worker.registered")
        cluster.open_gates()
        first.start()
        await cluster.all_done()
        assert_all_gold(answers)
        first.kill()
        await until(lambda: cluster.events(second, "worker.registered"), "the other model's turn")
        assert_all_gold([await done(await cluster.submit())])
        await cluster.ready(workers=1)


async def test_a_prompt_that_kills_its_worker_fails_alone(tmp_path: Path) -> None:
    worker_flags = {"poison_token": POISON, "step_ms": 10}
    async with Cluster(tmp_path, worker_flags=worker_flags) as cluster:
        cluster.keep_alive(cluster.workers[0])
        mates = await cluster.submit_many(6, max_tokens=60)
        for answer in mates:
            await answer.has_tokens(3)
        poison = await cluster.submit(prompt=[9, POISON, 9], n=2)
        mates += await cluster.submit_many(2, max_tokens=60)
        await cluster.all_done()
        assert_all_gold(mates)
        assert poison.reasons == [FINISH_REASON_ERROR] * 2
        error = poison.endings[poison.sequence_id].error
        assert error.startswith("3 workers were lost computing this request, the last: UNAVAILABLE")
        await cluster.ready(workers=1)
        assert len(cluster.events(cluster.workers[0], "service.ready")) == 1 + 3, "it died thrice"


async def test_a_request_that_no_worker_accepts_fails_alone(tmp_path: Path) -> None:
    """A token beyond the vocabulary, as no gateway lets through: the plan is refused each time."""
    async with Cluster(tmp_path, worker_flags={"step_ms": 10}) as cluster:
        mates = await cluster.submit_many(4, max_tokens=60)
        for answer in mates:
            await answer.has_tokens(3)
        strange = await cluster.submit(prompt=[9, 1536])
        await cluster.all_done()
        assert_all_gold(mates)
        assert strange.reasons == [FINISH_REASON_ERROR]
        error = strange.endings[strange.sequence_id].error
        assert "the last: FAILED_PRECONDITION: " in error
        assert "token id 1536 is not in the vocabulary of 1536" in error
        await cluster.ready(workers=1)


async def test_one_four_one_workers_under_load(tmp_path: Path) -> None:
    async with Cluster(tmp_path, worker_flags={"step_ms": 5, "slots": 8}) as cluster:
        answers = await cluster.submit_many(40, max_tokens=60)
        await answers[0].has_tokens(5)
        for _ in range(3):
            cluster.add_worker({"step_ms": 5, "slots": 8}).start()
        await cluster.ready(workers=4)
        await until(lambda: any(answer.is_over for answer in answers), "the first one done")
        for worker in cluster.workers[1:]:
            worker.send(signal.SIGTERM)
        assert [worker.join() for worker in cluster.workers[1:]] == [0, 0, 0]
        answers += await cluster.submit_many(4, max_tokens=10)
        await cluster.all_done()
        assert_all_gold(answers)
