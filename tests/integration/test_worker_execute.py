"""WorkerService over a local port with a real model: what a leader gets back, however it asks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.batch.plans import BlockTable, FinishReason, Join
from gpu_worker.service.loading import Loaded, load
from gpu_worker.settings import WorkerSettings
from kernels import native
from kernels.linear.linear_int4 import Int4Weight
from kernels.linear.linear_int8 import Int8Weight
from kernels.linear.packed_linear import WeightDtype
from tests.support.mini_scheduler import MiniScheduler, checksum, plan, sampling
from tests.support.random_model import write_random_model
from tests.support.worker_server import LeaderStream, outcome_from_proto, run_to_end, serving

PROMPTS = [[5], [7] * 16, list(range(3, 50)), [11, 12, 13], list(range(90, 60, -1)), [40] * 17]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    native: Literal["auto", "off"]
    weight_dtype: WeightDtype = "auto"
    kv_dtype: Literal["auto", "fp8"] = "auto"

    def load(self, folder: Path) -> Loaded:
        settings = WorkerSettings(
            model=str(folder),
            native=self.native,
            weight_dtype=self.weight_dtype,
            kv_dtype=self.kv_dtype,
            slots=4,
            step_tokens=128,
            block_size=4,
            kv_blocks=160,
            threads=1,
        )
        return load(settings)


# With the compiled kernels where this machine has them, and with torch's.
PATHS = [Kind(native=native) for native in ("auto", "off")]
KINDS = [
    *PATHS,
    *(replace(kind, weight_dtype="int8") for kind in PATHS),
    *(replace(kind, weight_dtype="int4") for kind in PATHS),
    *(replace(kind, kv_dtype="fp8") for kind in PATHS),
]


def tiny_model(folder: Path, **changes: Any) -> Path:
    """Its widths are groups of int4 weights."""
    return write_random_model(folder, intermediate_size=64, **changes)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    yield request.param.load(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))
    native.disable("not chosen by this test")
    TOLD.clear()


# By chunk and lease, what the model that is loaded said.
TOLD: dict[tuple[int, int], MiniScheduler] = {}


async def told(loaded: Loaded, *, chunk_tokens: int, lease_steps: int) -> MiniScheduler:
    """Its outputs, asked for once."""
    asked = chunk_tokens, lease_steps
    if asked not in TOLD:
        TOLD[asked] = await outputs(loaded, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
    return TOLD[asked]


async def outputs(loaded: Loaded, *, chunk_tokens: int, lease_steps: int) -> MiniScheduler:
    scheduler = MiniScheduler(loaded.limits, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
    for index, prompt in enumerate(PROMPTS):
        params = sampling(temperature=index % 2, seed=index, logprobs=2, max_tokens=9 + index)
        scheduler.submit(prompt, params)
    async with serving(loaded.runner, loaded.limits) as served:
        stream = await LeaderStream.open(served)
        await run_to_end(stream, scheduler)
        await stream.close()
    assert set(scheduler.reasons.values()) == {FinishReason.LENGTH}
    return scheduler


async def test_chunks_and_leases_do_not_change_a_bit(loaded: Loaded) -> None:
    whole = await told(loaded, chunk_tokens=1000, lease_steps=1)
    assert [len(tokens) for tokens in whole.outputs.values()] == [9, 10, 11, 12, 13, 14]
    for chunk_tokens in (1, 7, 16):
        chunked = await told(loaded, chunk_tokens=chunk_tokens, lease_steps=5)
        assert chunked.outputs == whole.outputs, chunk_tokens
        for sequence_id, items in chunked.logprobs.items():
            expected = whole.logprobs[sequence_id]
            # The torch path of attention may sum a row in another order when chunks differ: about
            # 100 float32 terms of size 5, so 100 * 5 * 2^-24 = 3e-5. The compiled path may not. In
            # fp8 what lies on a border between two codes may then move by 2^-3 of itself: one of 16
            # numbers of one of up to 100 positions, so less than 2^-3 / 16 of a logit of size 1.
            by_torch = 3e-5 if loaded.kv_dtype == "fp32" else 2.0**-7
            error_max = 0.0 if native.available() else by_torch
            for item, other in zip(items, expected, strict=True):
                assert abs(item.logprob - other.logprob) <= error_max
                assert item.top_logprobs == pytest.approx(other.top_logprobs, abs=error_max, rel=0)


async def test_alone_and_in_a_crowd_are_the_same(loaded: Loaded) -> None:
    crowd = await told(loaded, chunk_tokens=7, lease_steps=5)
    for index, prompt in enumerate(PROMPTS):
        alone = MiniScheduler(loaded.limits)
        params = sampling(temperature=index % 2, seed=index, max_tokens=9 + index)
        alone.submit(prompt, params)
        async with serving(loaded.runner, loaded.limits) as served:
            await run_to_end(await LeaderStream.open(served), alone)
        assert alone.outputs[0] == crowd.outputs[index]


async def test_a_prefix_already_computed_gives_the_same_tokens(loaded: Loaded) -> None:
    """Preemption and prefix hits: another row starts from blocks that hold a part of it."""
    whole = await told(loaded, chunk_tokens=1000, lease_steps=1)
    prompt, expected = PROMPTS[2], whole.outputs[2]
    params = sampling(max_tokens=11)
    join = Join(
        slot=0,
        sequence_id=50,
        token_ids=tuple(prompt),
        prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_tables=(BlockTable(tuple(range(30))),),
        sampling=params,
    )
    # Resumed with four output tokens known; 40 tokens are shared, the block at 40 is a copy.
    again = Join(
        slot=1,
        sequence_id=51,
        token_ids=(*prompt, *expected[:4]),
        prompt_tokens=len(prompt),
        num_computed_tokens=42,
        block_tables=(BlockTable((*range(10), *range(100, 110))),),
        sampling=params,
    )
    async with serving(loaded.runner, loaded.limits) as served:
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
        async with serving(loaded.runner, loaded.limits) as served:
            await run_to_end(await LeaderStream.open(served), scheduler)
        for sequence_id, tokens in scheduler.outputs.items():
            assert scheduler.reasons[sequence_id] is FinishReason.STOP
            assert len(tokens) > min_tokens
            assert [token in stops for token in tokens] == [False] * (len(tokens) - 1) + [True]


def fingerprint(folder: Path, seed: int, **changes: str) -> str:
    model = tiny_model(folder / f"{seed}", seed=seed)
    path: Literal["auto", "off"] = "auto" if native.available() else "off"
    told = {"model": str(model), "native": path, "kv_blocks": 8, "threads": 1}
    return load(WorkerSettings.model_validate(told | changes)).fingerprint


INT8, INT4, FP8 = {"weight_dtype": "int8"}, {"weight_dtype": "int4"}, {"kv_dtype": "fp8"}


def test_the_same_checkpoint_has_the_same_fingerprint(loaded: Loaded, tmp_path: Path) -> None:
    weights = next((kind for kind in (INT8, INT4) if kind["weight_dtype"] in loaded.dtype), {})
    own = weights | (FP8 if loaded.kv_dtype == "fp8" else {})
    assert fingerprint(tmp_path, 0, **own) == loaded.fingerprint


def test_the_fingerprint_tells_weights_and_dtypes_apart(tmp_path: Path) -> None:
    rounded = [{}, INT8, INT4, {"weight_dtype": "int4_asym"}, FP8, INT8 | FP8]
    known = {fingerprint(tmp_path, 0, dtype="bf16", **each) for each in rounded}
    others = {fingerprint(tmp_path, 0, dtype="fp32"), fingerprint(tmp_path, 1, dtype="bf16")}
    assert len(known | others) == 8


def rounded(weight: torch.Tensor, kind: WeightDtype) -> torch.Tensor:
    if kind == "int8":
        return Int8Weight.of(weight).rows(torch.arange(len(weight)))
    return Int4Weight.of(weight, is_symmetric=kind == "int4").rows(slice(None))


@pytest.mark.parametrize("path", ["auto", "off"])
@pytest.mark.parametrize(
    ("is_tied", "asked"),
    [(False, "int8"), (True, "int8"), (False, "int4"), (True, "int4_asym")],
)
async def test_rounded_weights_say_what_they_stand_for(
    tmp_path: Path, path: Literal["auto", "off"], is_tied: bool, asked: WeightDtype
) -> None:
    folder = tiny_model(tmp_path / "model", tie_word_embeddings=is_tied)
    stood_for = tiny_model(tmp_path / "stood_for", tie_word_embeddings=is_tied)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2 and (is_tied or "embed" not in name):
            is_of_layer = name.startswith("model.layers")
            tensors[name] = rounded(weight, asked if is_of_layer else "int8")
    save_file(tensors, stood_for / "model.safetensors")
    kind = Kind(native=path)
    floats = await outputs(kind.load(stood_for), chunk_tokens=16, lease_steps=3)
    codes = await outputs(
        replace(kind, weight_dtype=asked).load(folder), chunk_tokens=16, lease_steps=3
    )
    assert codes.outputs == floats.outputs
    for sequence_id, items in codes.logprobs.items():
        for item, other in zip(items, floats.logprobs[sequence_id], strict=True):
            # Float32 through two layers, as in tests/parity.
            assert item.logprob == pytest.approx(other.logprob, abs=1e-4, rel=0)
    native.disable("not chosen by this test")
