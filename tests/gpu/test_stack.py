"""`kaiten serve` with two workers on one device: real processes, as a user starts them.

The shipped model in float32, greedily. Not a token is lost, repeated or changed, but where two are
as likely but for the last bits of products, which on a GPU depend on the batch (docs/operating.md):
from there on a text may be another. So much is promised, and no more.
"""

import asyncio
import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import psutil
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from kaiten.client import AsyncClient
from kaiten.client.results import Completion
from tests.openai.test_openai_structured import FORMAT, SCHEMA
from tests.support.on_device import DEVICE, IS_GPU
from tests.support.served import ENV, ROOT, WAIT_S, Served
from tests.support.whole_stack import wait_until

pytestmark = pytest.mark.gpu
IN_ORDER = "the last tests kill a worker"

BLOCKS: Final = 2048
# The share is of what other processes leave, so it is large, and the pool's size is given.
WORDS: Final = (
    f"--device {DEVICE} --workers 2 --slots 48 --context-tokens 1024 --kv-blocks {BLOCKS}"
    " --gpu-memory-share 0.7 --log-level info"
)
MESSAGES: Any = [{"role": "user", "content": "One crab, please."}]
# Of log-probabilities: logits of size 30 after sums of a few hundred products in float32.
NEAR: Final = 1e-4
PROMPTS: Final = [
    "Once upon a time " + "there was a chef and a crab and an eel " * (index % 9)
    for index in range(32)
]
LENGTHS: Final = [8 + 29 * index % 120 for index in range(32)]
# A kill meets it in the midst.
LONG_TOKENS: Final = 800 if IS_GPU else 200


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("gpu-stack") / "data", *WORDS.split()) as served:
        wait_until(lambda: connected(served) == 2, "two workers", WAIT_S)
        yield served
        wait_until(lambda: not problem(served), "an idle cell with every block free", WAIT_S)


@pytest.fixture
def client(stack: Served) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{stack.http_url}/v1", api_key="any", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


def problem(stack: Served) -> str:
    """What is not as in an idle cell; empty: nothing."""
    state = stack.state()
    if state.waiting or state.running:
        return f"{state.waiting} wait and {state.running} run"
    held = [worker.block_count - worker.blocks_free for worker in state.workers]
    return f"held: {held}" if any(held) else ""


def connected(stack: Served) -> int:
    return sum(worker.is_connected for worker in stack.state().workers)


def check_same(own: Completion, known: Completion) -> None:
    """Greedy texts of as many tokens, the same ones up to the first that was nearly a tie."""
    (one,), (other,) = own.choices, known.choices
    told = [len(choice.token_ids) for choice in (one, other)]
    assert told == [one.output_tokens, other.output_tokens]
    assert told[0] == told[1]
    for index, (first, second) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if first != second:
            best, next_best = (logprob for _, logprob in other.logprobs[index].top)
            assert best - next_best < NEAR, f"token {index} is another"
            return
    assert one.text == other.text


def model_of(client: OpenAI) -> str:
    return client.models.list().data[0].id


def test_it_says_what_it_computes_on(stack: Served) -> None:
    assert f"fp32 on {DEVICE.type}" in stack.said
    if IS_GPU:
        assert torch.cuda.get_device_name(DEVICE) in stack.said


def test_a_streamed_answer(client: OpenAI) -> None:
    asked: Any = {"model": model_of(client), "messages": MESSAGES, "temperature": 0}
    asked |= {"max_tokens": 60}
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    whole = client.chat.completions.create(**asked)
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 5
    assert chunks[-1].usage == whole.usage


def test_log_probabilities(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, temperature=0, max_tokens=20, logprobs=True,
        top_logprobs=5,
    )  # fmt: skip
    told = reply.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert reply.usage is not None
    assert len(told.content) >= reply.usage.completion_tokens - 1
    for each in told.content:
        best = [other.logprob for other in each.top_logprobs]
        assert best == sorted(best, reverse=True)
        # Greedy: what was chosen is the likeliest.
        assert each.logprob == best[0] <= 0.0


def test_a_structured_answer(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, response_format=FORMAT, n=8, temperature=1.5,
        seed=1,
    )  # fmt: skip
    texts = [choice.message.content or "" for choice in reply.choices]
    assert len(set(texts)) > 4
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


async def all_at_once(stack: Served, indices: list[int]) -> list[Completion]:
    async with AsyncClient(stack.address) as client:
        return list(
            await asyncio.gather(
                *(
                    client.complete(
                        PROMPTS[index], max_tokens=LENGTHS[index], temperature=0.0,
                        ignore_eos=True, return_token_ids=True, logprobs=2,
                    )
                    for index in indices
                )
            )
        )  # fmt: skip


async def test_many_at_once_get_what_each_gets_alone(stack: Served) -> None:
    together = await all_at_once(stack, list(range(32)))
    assert [one.choices[0].output_tokens for one in together] == LENGTHS
    for index in (0, 5, 8, 31):
        (alone,) = await all_at_once(stack, [index])
        check_same(together[index], alone)


async def test_who_goes_away_leaves_no_block_behind(stack: Served) -> None:
    async with AsyncOpenAI(base_url=f"{stack.http_url}/v1", api_key="any") as client:
        model = (await client.models.list()).data[0].id
        streams = [
            await client.completions.create(
                model=model, prompt=PROMPTS[index], max_tokens=900, stream=True,
                extra_body={"ignore_eos": True},
            )
            for index in range(8)
        ]  # fmt: skip
        for stream in streams:
            async for _ in stream:
                break
        held = sum(worker.blocks_free < worker.block_count for worker in stack.state().workers)
        assert held >= 1
        for stream in streams:
            await stream.close()
    await asyncio.to_thread(wait_until, lambda: not problem(stack), "every block free")


async def long_stories(stack: Served, started: asyncio.Event | None = None) -> list[Completion]:
    """16 of them; `started` is set when each has got some of its output."""
    async with AsyncClient(stack.address, resume_s=WAIT_S) as client:
        streaming = set[int]()

        async def one(index: int) -> Completion:
            generation = client.generate(
                PROMPTS[index], temperature=0.0, max_tokens=LONG_TOKENS, ignore_eos=True,
                return_token_ids=True, logprobs=2,
            )  # fmt: skip
            async for _ in generation:
                streaming.add(index)
                if started is not None and len(streaming) == 16:
                    started.set()
            return await generation.result()

        return list(await asyncio.gather(*(one(index) for index in range(16))))


async def test_of_a_worker_that_serves_there_is_a_profile(stack: Served, tmp_path: Path) -> None:
    """Steps with their plans, and what the device computed in them."""
    out = tmp_path / "trace.json.gz"
    words = ["--worker", "worker-0", "--data-dir", str(stack.data_dir)]
    words += ["--steps", "4", "--out", str(out)]
    profiling = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kaiten", "profile", *words, cwd=ROOT, env=ENV,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    talking = asyncio.create_task(profiling.communicate())
    while not talking.done():
        await all_at_once(stack, list(range(16)))
    said, _ = await talking
    assert profiling.returncode == 0, said.decode()
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) >= 4
    assert all(step["args"]["plan_id"] >= 1 for step in steps)
    kinds = {event.get("cat") for event in events}
    assert "cpu_op" in kinds
    if IS_GPU:
        kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
        assert any("decode_kernel" in name or "attend_kernel" in name for name in kernels)


async def test_a_worker_that_is_killed_is_not_seen_by_clients(stack: Served) -> None:
    """Every stream goes on on the other: none lost, repeated or changed."""
    undisturbed = await asyncio.wait_for(long_stories(stack), WAIT_S)
    started = asyncio.Event()
    disturbed = asyncio.create_task(long_stories(stack, started))
    begun = asyncio.create_task(started.wait())
    await asyncio.wait((disturbed, begun), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert begun.done(), disturbed
    victim = busiest(stack)
    victim.send_signal(signal.SIGKILL)
    assert not disturbed.done(), "nothing was left to go on with"
    results = await asyncio.wait_for(disturbed, WAIT_S)
    assert {result.choices[0].output_tokens for result in results} == {LONG_TOKENS}
    for own, known in zip(results, undisturbed, strict=True):
        check_same(own, known)
    await asyncio.to_thread(victim.wait, WAIT_S)
    # And another has taken its place.
    await asyncio.to_thread(wait_until, lambda: connected(stack) == 2, "two workers again", WAIT_S)


def busiest(stack: Served) -> psutil.Process:
    """The worker that computes the most streams now."""
    state = max(stack.state().workers, key=lambda worker: worker.running)
    assert state.running
    socket = state.address.removeprefix("unix:")
    (process,) = [each for each in stack.children("worker-0") if socket in each.cmdline()]
    return process
