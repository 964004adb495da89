"""Steps on the device: recorded, launched one by one, and as the definition on a CPU has them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import torch

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.model.config import read_config
from gpu_worker.runner import block_copies
from gpu_worker.runner.block_copies import BlockCopies
from gpu_worker.runner.device_streams import DeviceStreams, NotRecorded, streams_for
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.step_graphs import buckets_of
from gpu_worker.runner.step_watch import CudaCounters, Watched
from gpu_worker.runner.stepping import OneAhead
from kernels import dispatch, jit, variants
from kernels.attention import decode_attention, plan, triton_launch
from kernels.kv import fp8
from tests.support import alike
from tests.support.ahead import LateScheduler, Model, Played, SwappingScheduler, play, replay
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.on_device import DEVICE, IS_GPU
from tests.support.random_model import write_random_model
from tests.support.tokenizers import byte_level_bpe, token_id
from tests.unit.gpu_worker.runner import test_grammars as grammars

pytestmark = pytest.mark.gpu

LIMITS: Final = RowLimits(
    slots=5, context_tokens=160, step_tokens=48, block_size=16, block_count=130, vocab_size=97
)
QWEN3: Final = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
GEMMA2: Final = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 16,
    "query_pre_attn_scalar": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 6.0,
    "sliding_window": 24,
}
# A layer that sees everything, and one that sees a window.
QWEN2: Final = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window": 24,
}
MODELS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "llama": ({}, False),
    "qwen3": (QWEN3, False),
    "gemma2": (GEMMA2, False),
    "qwen2-two-layer-groups": (QWEN2, False),
    "llama-fp8": ({}, True),
}
EDITS: Final[dict[str, Any]] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": ((7, 4.0),),
    "bad_words": ((3,), (7, 7)),
    "allowed_token_ids": (*tuple(range(0, 97, 2)), 7),
    "stop_token_ids": (8,),
    "min_tokens": 3,
}
# What each row of a crowd wants, in turns.
WANTED: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"temperature": 0.9, "top_k": 20, "logprobs": 2},
    EDITS,
    {"temperature": 0.7, "top_p": 0.9, **EDITS, "logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 1},
)
# At and beside the borders of blocks; more rows than there are slots, so that some join others
# that decode, and prompts of more than a step.
LENGTHS: Final = (1, 15, 16, 17, 100, 33, 64, 2, 49)
NEVER_CUT: Final = 1 << 30


def model_of(folder: Path, name: str, device: torch.device = DEVICE) -> Model:
    changes, is_kv_fp8 = MODELS[name]
    written = write_random_model(folder, seed=3, **changes)
    limits = replace(LIMITS, windows=read_config(written).groups.windows)
    return Model(written, limits, is_kv_fp8=is_kv_fp8, device=device)


class Unrecorded:
    """Streams of the device, but that nothing can be recorded."""

    def __init__(self) -> None:
        self._streams = streams_for(DEVICE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise NotRecorded("this is asked of launches one by one")


def unrecorded(model: Model) -> GraphRunner:
    streams: DeviceStreams = Unrecorded()
    return model.resident(streams)


def stepper(runner: GraphRunner) -> OneAhead:
    return OneAhead(Rows(runner.limits), runner)


def submit_all(scheduler: MiniScheduler) -> None:
    for index, length in enumerate(LENGTHS):
        params = sampling(max_tokens=12, seed=index, **WANTED[index % len(WANTED)])
        scheduler.submit([(7 * index + 3 * at) % 90 + 5 for at in range(length)], params)


def played(model: Model) -> list[Played]:
    """A crowd through recorded steps, to its end."""
    scheduler = LateScheduler(model.limits, chunk_tokens=40, lease_steps=3)
    submit_all(scheduler)
    found = play(stepper(model.resident()), scheduler, lambda: NEVER_CUT)
    assert not scheduler.errors
    told = [token for output in scheduler.outputs.values() for token in output]
    # Otherwise equality would prove little.
    assert len(scheduler.outputs) == len(LENGTHS)
    assert len(set(told)) >= 10
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_text_is_the_same_alone_in_a_crowd_and_computed_again(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of linears of several parts, where kernels are not interpreted."""
    wide = {"hidden_size": 1536, "intermediate_size": 2100, "num_attention_heads": 12}
    changes = {**wide, "num_key_value_heads": 4} if IS_GPU else {}
    written = write_random_model(tmp_path / "model", seed=3, **changes)
    limits = replace(LIMITS, windows=read_config(written).groups.windows)
    model = Model(written, limits, dtype=dtype, is_deterministic=jit.IS_THERE, device=DEVICE)
    runner = model.resident()
    alike.check(limits, lambda: stepper(runner))


@pytest.mark.parametrize("name", MODELS)
def test_recorded_or_not_and_on_a_cpu(name: str, tmp_path: Path) -> None:
    """The same plans: token for token, and log-probabilities but for their last bits."""
    with dispatch.forced("triton") if IS_GPU else dispatch.forced("torch"):
        model = model_of(tmp_path / "model", name)
        crowd = played(model)
        graphs = {result.timings.is_graph for each in crowd for result in each.results}
        # Of steps that only decode, and of mixed ones; explained prompts are odd.
        assert graphs == {False, True}
        replay(stepper(unrecorded(model)), crowd, lambda: False)
        # Read late, or as soon as they are there.
        replay(stepper(model.resident()), crowd, lambda: True)
    with dispatch.forced("torch"):
        known = model_of(tmp_path / "known", name, torch.device("cpu"))
        if name.endswith("fp8"):
            # A number on the border of two codes falls to either side: see test_triton_parity.
            return
        replay(known.in_turns(), crowd, lambda: True)


def test_attention_on_two_streams_or_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plans, of rows whose attention keeps parts, short and long; recorded or not."""
    for module in (plan, triton_launch, decode_attention):
        monkeypatch.setattr(module, "SPLIT", 32)
    for module in (plan, triton_launch):
        monkeypatch.setattr(module, "LONG_SPLIT", 32)
    with dispatch.forced("triton") if IS_GPU else dispatch.forced("torch"):
        model = model_of(tmp_path / "model", "qwen3")
        crowd = played(model)
        replay(stepper(unrecorded(model)), crowd, lambda: False)
        with variants.forced("chunks-beside-decodes", False):
            replay(stepper(model.resident()), crowd, lambda: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, fp8.DTYPE], ids=str)
@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_swaps_are_made_one_after_the_other(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody waits between them: of many blocks, each of which is soon written again."""
    shape, host_shape = (6, 2, 90, 4, 16, 64), (40, 6, 2, 4, 16, 64)
    generator = torch.Generator().manual_seed(5)
    pages = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    host_blocks = torch.randn(host_shape, generator=generator).to(dtype)
    monkeypatch.setattr(block_copies, "_ROOM_BYTES", at_once * host_blocks[0].nbytes)
    streams = streams_for(DEVICE)
    streams.pin(host_blocks)
    copies = BlockCopies(fp8.as_bytes(pages), fp8.as_bytes(host_blocks))
    draw = random.Random(7)
    pairs = [(draw.randrange(90), 90 + draw.randrange(40)) for _ in range(800)]
    # Mostly in runs of one direction.
    pairs = [pair if index % 60 < 40 else pair[::-1] for index, pair in enumerate(pairs)]
    expected = _bytes_of(pages, host_blocks)
    for source, target in pairs:
        expected[target] = expected[source]
    own = torch.tensor([min(pair) for pair in pairs], device=DEVICE)
    streams.finish()
    with streams.computing():
        copies.swap(tuple(pairs), own)
    streams.finish()
    assert _bytes_of(pages, host_blocks) == expected


def _bytes_of(pages: torch.Tensor, host_blocks: torch.Tensor) -> list[bytes]:
    """Of each block, in the order of their numbers in a plan."""
    blocks = [*pages.cpu().movedim(2, 0), *host_blocks]
    return [each.contiguous().view(torch.uint8).numpy().tobytes() for each in blocks]


@pytest.mark.parametrize("is_kv_fp8", [False, True])
def test_who_is_swapped_out_and_in_goes_on_as_if_nothing_was(
    is_kv_fp8: bool, tmp_path: Path
) -> None:
    """Recorded steps beside swaps of which the host waits for none."""
    limits = replace(LIMITS, host_block_count=40)
    model = Model(
        write_random_model(tmp_path / "model", seed=3),
        limits,
        is_kv_fp8=is_kv_fp8,
        is_deterministic=jit.IS_THERE,
        device=DEVICE,
    )
    plain, swapping = (kind(limits, lease_steps=3) for kind in (LateScheduler, SwappingScheduler))
    for scheduler in (plain, swapping):
        for index, length in enumerate(LENGTHS):
            prompt = [(7 * index + 3 * at) % 90 + 5 for at in range(length)]
            scheduler.submit(prompt, sampling(max_tokens=24, temperature=0.8, seed=index))
    turns = count()

    def preempt_somebody() -> None:
        if next(turns) % 3 == 2:
            for slot in sorted(swapping.running)[:2]:
                swapping.preempt(slot)

    with dispatch.forced("triton") if IS_GPU else dispatch.forced("torch"):
        play(stepper(model.resident()), plain, lambda: NEVER_CUT)
        runner = model.resident()
        watched = Watched(runner, CudaCounters(DEVICE)) if IS_GPU else runner
        crowd = play(OneAhead(Rows(limits), watched), swapping, lambda: NEVER_CUT, preempt_somebody)
        replay(stepper(unrecorded(model)), crowd, lambda: False)
    assert swapping.outputs == plain.outputs
    swaps = [pair for each in crowd for pair in each.plan.swaps]
    assert sum(source >= limits.block_count for source, _ in swaps) >= 8


def test_most_steps_are_recorded(tmp_path: Path) -> None:
    """Mixed ones, too: otherwise the above compares nothing."""
    model = model_of(tmp_path / "model", "llama")
    assert {bucket.is_decode for bucket in buckets_of(LIMITS)} == {False, True}
    with dispatch.forced("triton") if IS_GPU else dispatch.forced("torch"):
        results = [result for each in played(model) for result in each.results]
    mixed = [one for one in results if one.timings.tokens_computed > one.timings.rows]
    decodes = [one for one in results if one.timings.tokens_computed == one.timings.rows]
    for some in (mixed, decodes):
        assert sum(one.timings.is_graph for one in some) >= len(some) // 2 >= 2


def test_grammars(tmp_path: Path) -> None:
    """Masks come from the host between two recorded halves; beside rows that have none."""
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    write_random_model(folder, seed=5, vocab_size=grammars.VOCAB)
    stop = token_id(byte_level_bpe(), "<|end|>")
    with dispatch.forced("triton") if IS_GPU else dispatch.forced("torch"):
        model = Model(folder, grammars.LIMITS, device=DEVICE)
        stack = grammars.Stack(model, folder / "tokenizer.json", stop)
        wishes = [
            stack.wish(
                seed=seed, **({"grammar": grammars.of_schema(grammars.SCHEMA)} if seed % 3 else {})
            )
            for seed in range(9)
        ]
        scheduler = MiniScheduler(grammars.LIMITS, lease_steps=5)
        for index, wish in enumerate(wishes):
            scheduler.submit([5 + index, 6, 7], wish)
        crowd = play(stack.one_ahead(), scheduler, lambda: NEVER_CUT)
        assert not scheduler.errors
        ended = [
            stack.text(output)
            for index, output in scheduler.outputs.items()
            if index % 3 and output[-1] == stop
        ]
        for text in ended:
            jsonschema.validate(json.loads(text), grammars.SCHEMA)
        assert len(ended) >= 3
        replay(OneAhead(stack.rows(), unrecorded(model)), crowd, lambda: False)
