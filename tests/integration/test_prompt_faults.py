"""Processes die while prompts are explained: every position is told once, with its own value.

`Cluster` checks that at the end of each story, and that nothing of a request outlives its result.
"""

from pathlib import Path
from typing import Any

from kaiten.v1.common_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH
from tests.integration.test_scheduler_replay import (
    SCHEDULER_FLAGS,
    Recording,
    assert_all_equal,
    workers_at,
)
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster

# A prompt of 700 tokens takes more than thirty steps; before the gate it waits in the middle.
GATE = 400
FLAGS = {"slots": 4, "step_tokens": 24, "context_tokens": 1024, "block_size": 4}


def gated(tmp_path: Path, **options: Any) -> Cluster:
    """Workers explain no prompt to its end until the gate is opened."""
    cluster = Cluster(tmp_path, workers=0, **options)
    cluster.add_worker({**FLAGS, "gates": cluster.gates(GATE)})
    return cluster


async def explained(cluster: Cluster, answer: Answer, least: int) -> None:
    """Wait until so many positions are committed."""

    async def are_there() -> bool:
        return (await cluster.ledger.prompt_logprobs(answer.sequence_id)).token_count >= least

    await until(are_there, f"{least} explained positions")


async def test_a_worker_is_killed_in_the_middle_of_a_prompt(tmp_path: Path) -> None:
    async with gated(tmp_path) as cluster:
        answer = await cluster.submit(prompt_tokens=700, max_tokens=8, prompt_logprobs=2, n=2)
        for least in (50, 200):
            await explained(cluster, answer, least)
            assert not answer.token_count, "the rest is still to come"
            cluster.workers[0].kill()
            cluster.workers[0].start()
        cluster.open_gates()
        await cluster.all_done()
        assert answer.reasons == [FINISH_REASON_LENGTH] * 2
        assert (await cluster.ledger.prompt_logprobs(answer.sequence_id)).token_count == 699


async def test_a_leader_is_killed_in_the_middle_of_a_prompt(tmp_path: Path) -> None:
    async with gated(tmp_path, schedulers=2) as cluster:
        answer = await cluster.submit(prompt_tokens=700, max_tokens=8, prompt_logprobs=0)
        await explained(cluster, answer, 100)
        leader = await cluster.leader()
        assert not answer.token_count, "the rest is still to come"
        leader.kill()
        leader.start()
        cluster.open_gates()
        await cluster.all_done()
        assert answer.reasons == [FINISH_REASON_LENGTH]
        assert (await cluster.ledger.prompt_logprobs(answer.sequence_id)).token_count == 699


async def test_an_abandoned_prompt_leaves_nothing_behind(tmp_path: Path) -> None:
    async with gated(tmp_path) as cluster:
        answer = await cluster.submit(prompt_tokens=700, max_tokens=8, prompt_logprobs=2, n=3)
        await explained(cluster, answer, 50)
        await cluster.ledger.cancel(answer.record.id)
        await cluster.all_done()
        cluster.open_gates()
        assert answer.reasons == [FINISH_REASON_CANCELLED] * 3


async def test_a_journal_with_explained_prompts_replays_to_the_same_decisions(
    tmp_path: Path,
) -> None:
    """Small pools preempt, shared prompts are in the cache, a worker and a leadership end."""
    async with Cluster(
        tmp_path, worker_flags=workers_at(tmp_path), scheduler_flags=SCHEDULER_FLAGS
    ) as cluster:
        recording = Recording(cluster)
        shared = [11 + i for i in range(140)]
        # So that there is something left for the second leader.
        cluster.gates(150)
        for index in range(8):
            wish = {} if index % 3 == 2 else {"prompt_logprobs": index % 2}
            prompt = [*shared, 900 + index]
            await recording.submit(max_tokens=20 + index, prompt=prompt, n=1 + index % 2, **wish)
        await explained(cluster, cluster.answers[0], 20)
        cluster.workers[0].kill()
        cluster.workers[0].start()
        await cluster.answers[0].has_tokens(3)
        cluster.schedulers[0].kill()
        cluster.schedulers[0].start()
        cluster.open_gates()
        await cluster.all_done()
        records = await recording.journal()
        assert len({record.epoch for record in records}) == 2
        steps = [item.result.step for record in records for item in record.inputs]
        rows = [row.logprobs for step in steps for row in step.prompt_logprobs]
        assert sum(run.token_count for run in rows) >= 6 * 140
        assert not any(run.logprobs or run.top_token_ids for run in rows), "counted, not kept"
        assert_all_equal(await recording.compare())
