"""The scheduler on real processes with all well: requests in, tokens out, bounds and ends."""

from pathlib import Path

import pytest

from kaiten.v1.common_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE_EXCEEDED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
)
from ledger import LedgerLimits
from service_kit.errors import Overloaded
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster

LENGTH = FINISH_REASON_LENGTH


def all_reasons(answers: list[Answer]) -> set[int]:
    return {reason for answer in answers for reason in answer.reasons}


async def test_one_request(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        answer = await cluster.submit(max_tokens=20, logprobs=2)
        await answer.done()
        assert answer.reasons == [LENGTH]
        result = await cluster.ledger.result(answer.record.id)
        assert result is not None
        assert [item.logprob for item in result.choices[0].output.logprobs] == [-1.0] * 20
        assert result.done.usage.prompt_tokens == 4
        assert result.done.usage.output_tokens == 20


async def test_who_waits_is_told_in_order(tmp_path: Path) -> None:
    worker_flags = {"slots": 1}
    async with Cluster(tmp_path, workers=0, worker_flags=worker_flags) as cluster:
        answers = [await cluster.submit(max_tokens=3, n=n) for n in (1, 3, 1)]
        told: list[int] = []

        async def is_told() -> bool:
            record = (await cluster.ledger.cell()).record
            told[:] = [] if record is None else record.waiting_sequence_ids
            return len(told) == 3

        await until(is_told, "all three are told of")
        assert told == [answer.sequence_id for answer in answers]
        for answer in answers:
            await cluster.ledger.cancel(answer.record.id)


async def test_sixty_four_ragged_requests_on_two_workers(tmp_path: Path) -> None:
    """More than fit at once, prompts below and above a block and a step, several choices."""
    async with Cluster(tmp_path, workers=2, worker_flags={"step_tokens": 64}) as cluster:
        for index in range(64):
            await cluster.submit(
                prompt_tokens=1 + index * 7 % 90,
                max_tokens=1 + index * 11 % 40,
                n=3 if index % 8 == 0 else 1,
            )
        await cluster.all_done()
        assert all_reasons(cluster.answers) == {LENGTH}


async def test_too_few_blocks_for_all_preempts_and_loses_nothing(tmp_path: Path) -> None:
    worker_flags = {"kv_blocks": 16, "block_size": 4, "context_tokens": 64}
    # Nobody comes who holds more.
    flags = {"misfit_wait_s": 1}
    async with Cluster(tmp_path, workers=0, scheduler_flags=flags) as cluster:
        # All are there before anybody runs, or each might be over before the next one comes.
        answers = await cluster.submit_many(8, prompt_tokens=9, max_tokens=30)
        too_long = await cluster.submit(prompt_tokens=20, max_tokens=45)
        await cluster.all_wait(9)
        cluster.add_worker(worker_flags).start()
        await cluster.all_done()
        assert all_reasons(answers) == {LENGTH}
        results = [await cluster.ledger.result(answer.record.id) for answer in answers]
        assert sum(result.done.timings.preemptions for result in results if result) > 0
        assert too_long.reasons == [FINISH_REASON_ERROR]
        assert "the largest worker holds 63" in too_long.endings[too_long.sequence_id].error


@pytest.mark.parametrize("journal_s", [0, 30])
async def test_old_tokens_are_folded_and_still_read(tmp_path: Path, journal_s: int) -> None:
    """With a fold every few records the journal stays short, unless it is to stay for a while; who
    comes late sees everything.
    """
    fold, uncommitted = 5, 8
    scheduler_flags = {
        "fold_records": fold,
        "uncommitted_steps_max": uncommitted,
        "journal_s": journal_s,
    }
    async with Cluster(tmp_path, scheduler_flags=scheduler_flags) as cluster:
        answer = await cluster.submit(max_tokens=200, logprobs=0)
        await answer.has_tokens(150)
        lease = await cluster.ledger.leader()
        assert lease is not None
        history = await cluster.ledger.history(answer.sequence_id, through_seq=lease.journal_seq)
        assert lease.folded_seq > 100
        assert len(history.output.token_ids) >= 150
        assert len(history.output.logprobs) == len(history.output.token_ids)
        records = await cluster.ledger.journal_read(0, block_ms=1, count=1000)
        if journal_s:
            assert records[0].HasField("after_seq"), "the first of the leadership"
            return
        # One fold due and one on its way, and what a slow store is given at once behind either. A
        # worker goes on by itself for a lease of 8 steps in each of 2 plans.
        assert len(records) <= 2 * (fold + uncommitted + 2 * 8) < 150


async def test_the_queue_is_bounded_and_choices_count(tmp_path: Path) -> None:
    limits = LedgerLimits(requests_max=4)
    async with Cluster(tmp_path, workers=0, limits=limits) as cluster:
        await cluster.submit(n=3, max_tokens=20)
        with pytest.raises(Overloaded, match="too many live requests"):
            await cluster.submit(n=2)
        await cluster.submit(max_tokens=5)
        with pytest.raises(Overloaded):
            await cluster.submit()
        cluster.add_worker({}).start()
        await cluster.all_done()
        await cluster.submit(n=4, max_tokens=2)


async def test_a_cancel_finds_a_request_wherever_it_is(tmp_path: Path) -> None:
    worker_flags = {"slots": 1, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, worker_flags=worker_flags) as cluster:
        cluster.gates(100)
        running = await cluster.submit(max_tokens=900)
        queued = await cluster.submit(max_tokens=900)
        last = await cluster.submit(max_tokens=5)
        await running.has_tokens(3)
        assert await cluster.ledger.cancel(queued.record.id)
        await queued.done()
        assert queued.reasons == [FINISH_REASON_CANCELLED]
        assert queued.token_count == 0
        assert not running.is_over
        assert await cluster.ledger.cancel(running.record.id)
        await running.done()
        assert running.reasons == [FINISH_REASON_CANCELLED]
        assert 3 <= running.token_count < 900
        cluster.open_gates()
        await last.done()
        assert not await cluster.ledger.cancel(running.record.id)


async def test_a_stop_found_downstream_cuts_one_choice_to_the_token(tmp_path: Path) -> None:
    async with Cluster(tmp_path, worker_flags={"gates": tmp_path / "gates"}) as cluster:
        cluster.gates(30)
        answer = await cluster.submit(n=2, max_tokens=60)
        await until(lambda: len(answer.outputs[answer.sequence_id + 1]) >= 9, "nine tokens")
        await cluster.ledger.cancel(
            answer.record.id, choice=1, reason=FINISH_REASON_STOP, output_tokens=7
        )
        await until(lambda: answer.endings, "the end of a choice")
        cluster.open_gates()
        await answer.done()
        assert answer.reasons == [LENGTH, FINISH_REASON_STOP]
        assert len(answer.outputs[answer.sequence_id + 1]) == 7
        result = await cluster.ledger.result(answer.record.id)
        assert result is not None
        assert result.done.usage.output_tokens == 67


async def test_deadlines_end_queued_and_running_requests(tmp_path: Path) -> None:
    worker_flags = {"slots": 1, "step_ms": 40}
    async with Cluster(tmp_path, worker_flags=worker_flags) as cluster:
        # Longer than anybody is put aside for, shorter than its tokens take.
        running = await cluster.submit(max_tokens=900, timeout_ms=4000)
        queued = await cluster.submit(max_tokens=900, timeout_ms=300)
        late = await cluster.submit(max_tokens=5, timeout_ms=100_000)
        await queued.done()
        assert queued.reasons == [FINISH_REASON_DEADLINE_EXCEEDED]
        assert queued.token_count == 0
        await running.done()
        assert running.reasons == [FINISH_REASON_DEADLINE_EXCEEDED]
        assert running.token_count > 0
        await late.done()
        assert late.reasons == [LENGTH]
        records = await cluster.ledger.journal_read(0, block_ms=1, count=10_000)
        ended = [ending.sequence_id for record in records for ending in record.finished]
        assert ended == [answer.sequence_id for answer in (queued, running, late)]


async def test_the_static_policy_answers_the_same(tmp_path: Path) -> None:
    async with Cluster(tmp_path, scheduler_flags={"policy": "static"}) as cluster:
        for index in range(24):
            await cluster.submit(max_tokens=3 + index)
        await cluster.all_done()
        assert all_reasons(cluster.answers) == {LENGTH}
