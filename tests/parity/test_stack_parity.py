"""The whole stack says, token for token, what transformers says to each prompt alone.

Real store, scheduler, worker and gateway processes; up to 64 ragged prompts at once through the
gRPC client. However the work is cut (chunks, preemptions, prefix hits, crowds), the answer is the
same.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kaiten.client import AsyncClient
from kaiten.client.results import Completion
from kaiten.local.health import state_of
from tests.parity import oracle
from tests.parity.oracle import CROWD, CROWD_MAX_TOKENS, ONE_PER_FAMILY, crowd_of
from tests.support.answers import WAIT_S, until
from tests.support.cluster import Cluster, Flags
from tests.support.processes import GATEWAY, WORKER

# As in test_model_parity.
LOGPROB_ERROR_MAX = 1e-4
SLOTS = 8
# Twice the rows: all but the first join rows that go on.
FEW = 16


@asynccontextmanager
async def serving(
    tmp_path: Path, model: Path, *, worker: Flags | None = None
) -> AsyncIterator[AsyncClient]:
    """A client of a whole stack. Leaving checks that the cell is idle with every block free."""
    async with standing(tmp_path, model, worker or {}) as (cluster, client):
        cluster.workers[0].start()
        await cluster.ready(workers=1)
        yield client


@asynccontextmanager
async def standing(
    tmp_path: Path, model: Path, worker: Flags, scheduler: Flags | None = None
) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    """The same with its processes, of which the worker has not begun: see `at_once`."""
    async with Cluster(tmp_path, workers=0, scheduler_flags=scheduler) as cluster:
        flags = {"model": model, "dtype": "fp32", "slots": SLOTS, "threads": 1, "block_size": 4}
        # With a budget that is given, no start measures one, and no machine cuts the work its own
        # way.
        flags |= {"kv_blocks": 1024, "step_tokens": 512}
        cluster.add_worker({**flags, **worker}, WORKER)
        port = cluster.hold_port()
        gateway = {"redis_url": cluster.store.url, "model": model, "grpc_port": port.number}
        gateway |= {"http_port": 0, "accept_without_workers": WAIT_S}
        cluster.add("gateway", GATEWAY, gateway).start()

        async def is_ready() -> bool:
            return await state_of(port.address) == "serving"

        await until(is_ready, "a ready gateway")
        async with AsyncClient(port.address) as client:
            yield cluster, client


async def at_once(cluster: Cluster, asking: Sequence[Awaitable[Completion]]) -> list[Completion]:
    """The worker begins when all are in the queue, always in the same order: who comes one by one
    is never preempted, and who is beside whom says how often.
    """
    answers = []
    for number, one in enumerate(asking):
        before = (await cluster.ledger.load()).choices
        answers.append(asyncio.ensure_future(one))

        async def is_accepted(before: int = before) -> bool:
            return (await cluster.ledger.load()).choices > before

        await until(is_accepted, f"number {number} in the ledger")

    await cluster.all_wait(len(asking))
    cluster.workers[0].start()
    return await asyncio.gather(*answers)


async def ask(client: AsyncClient, prompt: Sequence[int], **options: object) -> Completion:
    chosen = {"max_tokens": CROWD_MAX_TOKENS, "temperature": 0.0, "return_token_ids": True}
    return await client.complete(token_ids=prompt, **{**chosen, **options})  # type: ignore[arg-type]


async def ask_all(
    client: AsyncClient, prompts: Sequence[Sequence[int]], **options: object
) -> list[Completion]:
    return await asyncio.gather(*(ask(client, prompt, **options) for prompt in prompts))


def assert_same(completions: list[Completion], answers: list[oracle.Answer]) -> None:
    said = [completion.choices[0].token_ids for completion in completions]
    assert said == [answer.token_ids for answer in answers]


# In `test_model_parity` every model meets crowds, whole prompts and chunks, by the worker's own
# loader; here each family meets the whole stack, and the stack every size of chunks.
@pytest.mark.parametrize(
    ("name", "chunk_tokens"),
    oracle.each(ONE_PER_FAMILY, [1, 7, 16, 64, 504, 7, 504, 7, 16, 64, 7]),
)
async def test_a_crowd_gets_what_each_gets_alone(
    name: str,
    chunk_tokens: int,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[oracle.Answer]],
) -> None:
    worker = {"step_tokens": SLOTS + chunk_tokens}
    async with serving(tmp_path, folders[name], worker=worker) as client:
        completions = await ask_all(client, crowd_of(name), logprobs=oracle.TOP)
    assert_same(completions, crowd_answers[name])
    for completion, answer in zip(completions, crowd_answers[name], strict=True):
        choice = completion.choices[0]
        logprobs = np.array([each.logprob for each in choice.logprobs])
        tops = np.array([[logprob for _, logprob in each.top] for each in choice.logprobs])
        np.testing.assert_allclose(logprobs, answer.logprobs, atol=LOGPROB_ERROR_MAX)
        np.testing.assert_allclose(tops, answer.top_logprobs, atol=LOGPROB_ERROR_MAX)


# What is computed again is a prompt; how a family computes one was asked above.
@pytest.mark.parametrize(
    "name",
    # Rows within a window hardly grow, and need not go.
    oracle.each(
        [name for name in ONE_PER_FAMILY if name != "mistral-window"],
        daily=["llama-rope-llama3", "qwen3-gqa-tied", "olmo2-7b"],
    ),
)
async def test_preemption_changes_nothing(
    name: str,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[oracle.Answer]],
) -> None:
    # The longest needs (60 + 24) / 4 = 21 blocks: two long ones never fit together.
    async with standing(tmp_path, folders[name], {"kv_blocks": 24}) as (cluster, client):
        completions = await at_once(cluster, [ask(client, prompt) for prompt in CROWD[:FEW]])
    assert_same(completions, crowd_answers[name][:FEW])
    assert sum(completion.timings.preemptions for completion in completions) >= 5


@pytest.mark.parametrize(
    "name", oracle.each(ONE_PER_FAMILY, daily=["mistral-window", "qwen2-gqa-tied"])
)
async def test_prefix_hits_change_nothing(
    name: str,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[oracle.Answer]],
) -> None:
    async with serving(tmp_path, folders[name]) as client:
        first = await ask_all(client, CROWD[:FEW])
        second = await ask_all(client, CROWD[:FEW])
    assert_same(first, crowd_answers[name][:FEW])
    assert_same(second, crowd_answers[name][:FEW])
    assert sum(completion.usage.cached_tokens for completion in second) > 300


@pytest.mark.parametrize(
    "name", oracle.each(ONE_PER_FAMILY, daily=["mistral-window", "qwen2-gqa-tied"])
)
async def test_blocks_in_host_memory_change_nothing(
    name: str,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[oracle.Answer]],
) -> None:
    """What the pool has no room for comes back from there, of who is preempted too."""
    worker = {"kv_blocks": 40, "kv_host_memory_mb": 50}
    async with serving(tmp_path, folders[name], worker=worker) as client:
        first = await ask_all(client, CROWD[:FEW])
        second = await ask_all(client, CROWD[:FEW])
    assert_same(first, crowd_answers[name][:FEW])
    assert_same(second, crowd_answers[name][:FEW])
    # Of blocks of four tokens.
    assert sum(completion.usage.cached_tokens for completion in second) > 2 * 4 * 40


async def test_kv_in_fp8_says_the_same_however_it_is_cut(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Prefix hits, chunks and preemption read the very codes that a prompt in one piece reads."""
    name, fp8 = "qwen3-gqa-tied", {"kv_dtype": "fp8"}
    crowd = CROWD[:FEW]
    async with serving(tmp_path / "whole", folders[name], worker=fp8) as client:
        whole = await ask_all(client, crowd)
        again = await ask_all(client, crowd)
    little = {**fp8, "kv_blocks": 24, "step_tokens": SLOTS + 7}
    async with standing(tmp_path / "cut", folders[name], little) as (cluster, client):
        cut = await at_once(cluster, [ask(client, prompt) for prompt in crowd])
    outputs = [[each.choices[0].token_ids for each in asked] for asked in (whole, again, cut)]
    assert outputs == [outputs[0]] * 3
    assert sum(completion.usage.cached_tokens for completion in again) > 300
    assert sum(completion.timings.preemptions for completion in cut) >= 5


@pytest.mark.parametrize(
    "name", oracle.each(ONE_PER_FAMILY, daily=["qwen3-gqa-tied", "mistral-window"])
)
async def test_draft_tokens_change_nothing(
    name: str,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[oracle.Answer]],
) -> None:
    worker, whole_journal = {"num_speculative_tokens": 3, "kv_blocks": 40}, {"fold_records": 10_000}
    async with standing(tmp_path, folders[name], worker, whole_journal) as (cluster, client):
        completions = await at_once(
            cluster, [ask(client, prompt, logprobs=oracle.TOP) for prompt in CROWD[:FEW]]
        )
        records = await cluster.ledger.journal_read(0, block_ms=1, count=10_000)
    assert_same(completions, crowd_answers[name][:FEW])
    for completion in completions:
        choice = completion.choices[0]
        assert len(choice.logprobs) == len(choice.token_ids)
    counts = [item.result.step.token_counts for each in records for item in each.inputs]
    assert max(map(max, filter(None, counts)), default=1) > 1, "some drafts were accepted"


async def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    chosen = {"temperature": 1.0, "top_p": 0.9, "seed": 1234, "n": 2, "ignore_eos": True}
    probes = [CROWD[index] for index in (0, 1, 17)]
    flags = {"kv_blocks": 80}
    async with serving(tmp_path, folders["llama-gqa-tied"], worker=flags) as client:
        alone = [await ask(client, probe, **chosen) for probe in probes]
        crowd = asyncio.gather(*(ask(client, p, temperature=1.0, seed=5) for p in CROWD))
        together = await asyncio.gather(*(ask(client, probe, **chosen) for probe in probes))
        await crowd
    outputs = [[choice.token_ids for choice in each.choices] for each in alone]
    assert outputs == [[choice.token_ids for choice in each.choices] for each in together]
    assert all(first != second for first, second in outputs), "choices have noise of their own"
