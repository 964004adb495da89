"""The follower on the real server: races at subscribe time, trimming, fan-out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from ledger import Follower, History, Ledger, LedgerLimits, Subscription
from service_kit.errors import NotFound
from tests.support.play_leader import (
    PlayLeader,
    eventually,
    outlive_results,
    stopped,
    submit_record,
)


@contextlib.asynccontextmanager
async def following(ledger: Ledger) -> AsyncIterator[Follower]:
    follower = Follower(ledger)
    task = asyncio.create_task(follower.run())
    try:
        await eventually(lambda: follower.is_connected or task.done())
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def outputs_of(subscription: Subscription) -> dict[int, list[int]]:
    """Everything until the end; fails at a gap or a repeat."""
    outputs: dict[int, list[int]] = {}
    async for update in subscription:
        output = outputs.setdefault(update.sequence_id, [])
        assert not update.token_ids or update.position == len(output)
        output += update.token_ids
    return outputs


async def test_tokens_come_once_however_late_one_subscribes(ledger: Ledger) -> None:
    """The race between the submit reply and the tail: every lag gives the same tokens."""
    submitted = await ledger.submit(submit_record("a", n=2), b"h")
    sequence_ids = [submitted.sequence_id, submitted.sequence_id + 1]
    leader = await PlayLeader.elected(ledger)
    async with following(ledger) as follower:
        tasks = []
        for step in range(100):
            if step % 10 == 0:
                subscription = follower.subscribe(sequence_ids, from_seq=submitted.journal_seq)
                tasks.append(asyncio.create_task(outputs_of(subscription)))
            await leader.step({sequence_ids[0]: [step], sequence_ids[1]: [step + 1000]})
            if step == 50:
                await leader.fold(leader.base + 45, sequence_ids)
        await leader.finish("a", sequence_ids[0], n=2)
        # Long after the end there is still the result.
        late = follower.subscribe(sequence_ids, from_seq=submitted.journal_seq)
        for outputs in await asyncio.wait_for(asyncio.gather(*tasks, outputs_of(late)), 60):
            assert outputs == leader.outputs
        assert follower.sequence_count == 0


async def test_attach_by_history_then_subscribe(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    async with following(ledger) as follower:
        for step in range(20):
            await leader.step({sequence_id: [step]})
        await leader.fold(leader.base + 10, [sequence_id])
        found = await ledger.find("a")
        output, finished = await ledger.history(sequence_id, through_seq=found.journal_seq)
        assert finished is None
        start = len(output.token_ids)
        assert start == 20
        for step in range(20, 30):
            await leader.step({sequence_id: [step]})
        await leader.fold(leader.base + 29, [sequence_id])
        with follower.subscribe(
            [sequence_id], from_seq=found.journal_seq, positions={sequence_id: start}
        ) as subscription:
            await leader.finish("a", sequence_id)
            tokens = [t async for update in subscription for t in update.token_ids]
        assert list(output.token_ids) + tokens == list(range(30))


async def test_the_last_token_and_the_end_come_together_with_logprobs(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    async with following(ledger) as follower:
        # From before the leadership a hole might be seen, and read past the end.
        subscription = follower.subscribe([sequence_id], from_seq=leader.base)
        record = leader.record({sequence_id: [4, 5]}, [stopped(sequence_id, 2)], with_logprobs=True)
        await ledger.commit(leader.leader, record, [leader.ending("a", sequence_id)])
        update = await asyncio.wait_for(anext(subscription), 60)
        assert (update.token_ids, update.finished) == ([4, 5], stopped(sequence_id, 2))
        assert [entry.logprob for entry in update.logprobs] == [-4.0, -5.0]


async def test_many_subscribers_of_many_requests(ledger: Ledger) -> None:
    leader = await PlayLeader.elected(ledger)
    async with following(ledger) as follower:
        tasks = {}
        for index in range(64):
            submitted = await ledger.submit(submit_record(f"r{index}"), b"h")
            subscription = follower.subscribe(
                [submitted.sequence_id], from_seq=submitted.journal_seq
            )
            tasks[submitted.sequence_id] = asyncio.create_task(outputs_of(subscription))
        for step in range(30):
            await leader.step({s: [step * place] for place, s in enumerate(tasks)})
        for index, sequence_id in enumerate(tasks):
            await leader.finish(f"r{index}", sequence_id)
        for place, (sequence_id, task) in enumerate(tasks.items()):
            outputs = await asyncio.wait_for(task, 60)
            assert outputs == {sequence_id: [step * place for step in range(30)]}
        assert follower.sequence_count == 0


async def test_a_thousand_clients_that_come_back_read_the_journal_a_few_times(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside streams that go on; some of what they want is folded, some in the journal."""
    submitted = [await ledger.submit(submit_record(f"r{index}"), b"h") for index in range(64)]
    sequence_ids = [one.sequence_id for one in submitted]
    leader = await PlayLeader.elected(ledger)
    for token in range(20):
        await leader.step({one: [token + n] for n, one in enumerate(sequence_ids)})
    await leader.fold(9, sequence_ids)
    reads: list[int] = []
    histories = ledger.histories

    async def counted(asked: Sequence[int], *, through_seq: int) -> dict[int, History | Exception]:
        reads.append(len(asked))
        return await histories(asked, through_seq=through_seq)

    monkeypatch.setattr(ledger, "histories", counted)
    async with following(ledger) as follower:
        back = [
            follower.subscribe([one], from_seq=0, positions={one: index % 15})
            for index, one in enumerate(sequence_ids * 16)
        ]
        reading = [asyncio.create_task(tokens_of(each)) for each in back]
        for token in range(20, 25):
            await leader.step({one: [token + n] for n, one in enumerate(sequence_ids)})
        for index, one in enumerate(sequence_ids):
            await leader.finish(f"r{index}", one)
        for index, tokens in enumerate(await asyncio.gather(*reading)):
            assert tokens == leader.outputs[sequence_ids[index % 64]][index % 15 :]
    assert 64 <= sum(reads) <= 200
    assert len(reads) <= 10


async def tokens_of(subscription: Subscription) -> list[int]:
    return [token async for update in subscription for token in update.token_ids]


async def test_what_is_no_longer_kept_is_not_found_rather_than_waited_for(
    redis_url: str, cell: str
) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(result_ttl_s=100))
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    await leader.finish("a", sequence_id)
    await leader.fold(leader.seq, [])
    async with following(ledger) as follower, asyncio.timeout(60):
        # As long as the result is kept it is all there is; then it is gone.
        updates = [u async for u in follower.subscribe([sequence_id], from_seq=0)]
        assert [update.finished is not None for update in updates] == [True]
        await outlive_results(redis_url, cell)
        with pytest.raises(NotFound):
            async for _ in follower.subscribe([sequence_id], from_seq=0):
                pass
    await ledger.close()
