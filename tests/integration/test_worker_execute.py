"""WorkerService over a local port with a real model: what a leader gets back, however it asks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from gpu_worker.loading import Loaded, load
from gpu_worker.plans import FinishReason, Join
from gpu_worker.settings import WorkerSettings
from kernels import native
from tests.support.mini_scheduler import MiniScheduler, checksum, plan, sampling
from tests.support.random_model import write_random_model
from tests.support.worker_server import LeaderStream, outcome_from_proto, run_to_end, serving

PROMPTS = [[5], [7] * 16, list(range(3, 90)), [11, 12, 13], list(range(90, 20, -1)), [40] * 33]


@pytest.fixture(scope="module", params=["auto", "off"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    """With the compiled kernels where this machine has them, and with torch's."""
    folder = write_random_model(tmp_path_factory.mktemp("model") / "tiny")
    yield load(
        WorkerSettings(
            model=str(folder),
            native=request.param,
            slots=4,
            step_tokens=128,
            block_size=4,
            kv_blocks=160,
            threads=1,
        )
    )
    native.disable("not chosen by this test")


async def outputs(loaded: Loaded, *, chunk_tokens: int, lease_steps: int) -> MiniScheduler:
    scheduler = MiniScheduler(loaded.limits, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
    for index, prompt in enumerate(PROMPTS):
        params = sampling(temperature=index % 2, seed=index, logprobs=2, max_tokens=9 + index)
        scheduler.submit(prompt, params)
    async with serving(loaded.device, loaded.limits) as served:
        stream = await LeaderStream.open(served)
        await run_to_end(stream, scheduler)
        await stream.close()
    assert set(scheduler.reasons.values()) == {FinishReason.LENGTH}
    return scheduler


async def test_chunks_and_leases_do_not_change_a_bit(loaded: Loaded) -> None:
    whole = await outputs(loaded, chunk_tokens=1000, lease_steps=1)
    assert [len(tokens) for tokens in whole.outputs.values()] == [9, 10, 11, 12, 13, 14]
    for chunk_tokens in (1, 7, 16, 64):
        chunked = await outputs(loaded, chunk_tokens=chunk_tokens, lease_steps=5)
        assert chunked.outputs == whole.outputs, chunk_tokens
        for serial, items in chunked.logprobs.items():
            expected = whole.logprobs[serial]
            # The torch path of attention may sum a row in another order when chunks differ: about
            # 100 float32 terms of size 5, so 100 * 5 * 2^-24 = 3e-5. The compiled path may not.
            error_max = 0.0 if native.available() else 3e-5
            for item, other in zip(items, expected, strict=True):
                assert abs(item.logprob - other.logprob) <= error_max
                assert item.top_logprobs == pytest.approx(other.top_logprobs, abs=error_max, rel=0)


async def test_alone_and_in_a_crowd_are_the_same(loaded: Loaded) -> None:
    crowd = await outputs(loaded, chunk_tokens=7, lease_steps=3)
    for index, prompt in enumerate(PROMPTS):
        alone = MiniScheduler(loaded.limits)
        params = sampling(temperature=index % 2, seed=index, max_tokens=9 + index)
        alone.submit(prompt, params)
        async with serving(loaded.device, loaded.limits) as served:
            await run_to_end(await LeaderStream.open(served), alone)
        assert alone.outputs[0] == crowd.outputs[index]


async def test_a_prefix_already_computed_gives_the_same_tokens(loaded: Loaded) -> None:
    """Preemption and prefix hits: another row starts from blocks that hold a part of it."""
    whole = await outputs(loaded, chunk_tokens=1000, lease_steps=1)
    prompt, expected = PROMPTS[2], whole.outputs[2]
    params = sampling(max_tokens=11)
    join = Join(
        slot=0,
        serial=50,
        token_ids=tuple(prompt),
        prompt_tokens=len(prompt),
        tokens_done=0,
        blocks=tuple(range(30)),
        sampling=params,
    )
    # Resumed with four output tokens known; 40 tokens are shared, the block at 40 is a copy.
    again = Join(
        slot=1,
        serial=51,
        token_ids=(*prompt, *expected[:4]),
        prompt_tokens=len(prompt),
        tokens_done=42,
        blocks=(*range(10), *range(100, 120)),
        sampling=params,
    )
    async with serving(loaded.device, loaded.limits) as served:
        stream = await LeaderStream.open(served)
        first = plan(
            1,
            joins=(join,),
            chunks=((0, len(prompt)),),
            membership_checksum=checksum([(0, 50)]),
        )
        await stream.send(first)
        await stream.step()
        await stream.send(
            plan(
                2,
                leaves=(0,),
                joins=(again,),
                copies=((10, 100),),
                chunks=((1, len(prompt) + 4 - 42),),
                lease_steps=20,
                membership_checksum=checksum([(1, 51)]),
            )
        )
        tokens: list[int] = []
        is_last = False
        while not is_last:
            step = await stream.step()
            tokens += outcome_from_proto(step).token_ids
            is_last = step.is_last
        await stream.close()
    assert tokens == expected[4:]


async def test_min_tokens_masks_stop_tokens_and_then_no_longer(loaded: Loaded) -> None:
    """A row whose every likely token is a stop token ends exactly when it may."""
    stops = tuple(range(0, 97, 2))
    for min_tokens in (0, 1, 5):
        scheduler = MiniScheduler(loaded.limits)
        for index in range(4):
            params = sampling(
                stop_token_ids=stops,
                min_tokens=min_tokens,
                temperature=1.0,
                seed=index,
                max_tokens=40,
            )
            scheduler.submit(PROMPTS[index], params)
        async with serving(loaded.device, loaded.limits) as served:
            await run_to_end(await LeaderStream.open(served), scheduler)
        for serial, tokens in scheduler.outputs.items():
            assert scheduler.reasons[serial] is FinishReason.STOP
            assert len(tokens) > min_tokens
            assert [token in stops for token in tokens] == [False] * (len(tokens) - 1) + [True]


def test_the_fingerprint_tells_weights_and_dtypes_apart(loaded: Loaded, tmp_path: Path) -> None:
    path: Literal["auto", "off"] = "auto" if native.available() else "off"

    def fingerprint(seed: int, dtype: Literal["fp32", "bf16"]) -> str:
        folder = write_random_model(tmp_path / f"{seed}", seed=seed)
        settings = WorkerSettings(
            model=str(folder), dtype=dtype, native=path, kv_blocks=8, threads=1
        )
        return load(settings).fingerprint

    assert fingerprint(0, "fp32") == loaded.fingerprint
    assert len({fingerprint(0, "fp32"), fingerprint(1, "fp32"), fingerprint(0, "bf16")}) == 3
