"""Workers that give a row several tokens per step: the same text, whatever happens to it.

That every output is the one that a worker of one token per step gives, the cluster checks.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kaiten.client import AsyncClient
from kaiten.mini import CHECKPOINT
from kaiten.v1.common_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH
from kaiten.v1.ledger_pb2 import JournalRecord
from tests.support.answers import until
from tests.support.cluster import Cluster, Flags, gold, is_answering
from tests.support.processes import GATEWAY

SEVERAL: Flags = {"slot_tokens": 4, "step_ms": 4}
PROMPT = [7, 8, 9, 10, 11]


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    """A worker that gives several, and a client of the gateway before it."""
    async with Cluster(tmp_path, worker_flags=SEVERAL) as cluster:
        port = cluster.hold_port()
        flags = {"redis_url": cluster.store.url, "model": CHECKPOINT, "grpc_port": port.number}
        cluster.add("gateway", GATEWAY, {**flags, "http_port": 0}).start()
        await until(partial(is_answering, port.address), "a ready gateway")
        async with AsyncClient(port.address) as client:
            yield cluster, client


async def journal(cluster: Cluster) -> list[JournalRecord]:
    records: list[JournalRecord] = []
    while page := await cluster.ledger.journal_read(
        records[-1].seq if records else 0, block_ms=1, count=256
    ):
        records += page
    return records


async def test_a_gateway_streams_them_in_order_with_their_log_probabilities(tmp_path: Path) -> None:
    async with serving(tmp_path) as (cluster, client):
        tokens: list[int] = []
        async with client.generate(
            token_ids=PROMPT,
            max_tokens=41,
            ignore_eos=True,
            request_id="one",
            logprobs=2,
            prompt_logprobs=1,
            return_token_ids=True,
        ) as generation:
            async for delta in generation:
                assert delta.position == len(tokens)
                assert [each.logprob for each in delta.logprobs] == [-1.0] * len(delta.token_ids)
                tokens += delta.token_ids
            completion = await generation.result()
        result = await cluster.ledger.result("default:one")
        assert result is not None
        assert tokens == gold(result.sequence_id, 41)
        assert list(completion.choices[0].token_ids) == tokens
        assert completion.usage.output_tokens == 41
        assert len(result.choices[0].output.logprobs) == 41
        records = [r for r in await journal(cluster) if result.sequence_id in r.sequence_ids]
        most = max(list(record.sequence_ids).count(result.sequence_id) for record in records)
        assert 1 < most <= 4
        assert len(records) < 41


async def test_a_worker_dies_and_one_of_one_token_per_step_goes_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path, worker_flags=SEVERAL) as cluster:
        answers = await cluster.submit_many(12, max_tokens=160, logprobs=1, prompt_logprobs=0)
        for answer in answers:
            await answer.has_tokens(9)
        cluster.workers[0].kill()
        cluster.add_worker({"step_ms": 1}).start()
        await cluster.all_done()
        assert {reason for one in answers for reason in one.reasons} == {FINISH_REASON_LENGTH}


async def test_few_blocks_and_a_cancel_in_the_middle(tmp_path: Path) -> None:
    flags = {"kv_blocks": 16, "block_size": 4, "context_tokens": 64, "gates": tmp_path / "gates"}
    async with Cluster(tmp_path, workers=0) as cluster:
        cluster.gates(30)
        answers = await cluster.submit_many(8, prompt_tokens=9, max_tokens=45)
        await cluster.all_wait(8)
        cluster.add_worker({**SEVERAL, **flags}).start()
        await answers[0].has_tokens(5)
        await cluster.ledger.cancel(answers[0].record.id)
        cluster.open_gates()
        await cluster.all_done()
        results = [await cluster.ledger.result(answer.record.id) for answer in answers]
        assert sum(one.done.timings.preemptions for one in results if one is not None) > 0
        assert answers[0].reasons == [FINISH_REASON_CANCELLED]
        assert {one.reasons[0] for one in answers[1:]} == {FINISH_REASON_LENGTH}
