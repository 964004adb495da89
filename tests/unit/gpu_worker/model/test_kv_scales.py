"""KV in fp8: where its scales come from, which of them are refused, and blocks that are copied."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, Join, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import config_from_json, read_config
from gpu_worker.model.kv_scales import read_scales
from gpu_worker.model.weights import fingerprint, load_weights
from gpu_worker.runner.stepping import InTurns, Stepper
from kernels import dispatch
from kernels.kv import fp8
from service_kit.errors import ConfigError
from tests.support.ahead import Model
from tests.support.mini_scheduler import checksum, plan, sampling
from tests.support.random_model import LLAMA, write_random_model

# 2 layers, 2 KV heads.
K, V = "model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"
MODELOPT = (
    "model.layers.{}.self_attn.k_proj.k_scale",
    "model.layers.{}.self_attn.v_proj.v_scale",
)
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    write_random_model(folder)
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    return folder


def read(folder: Path) -> torch.Tensor:
    with Checkpoint(folder) as checkpoint:
        return read_scales(checkpoint, read_config(folder))


def test_without_scales_all_are_one(tmp_path: Path) -> None:
    scales = read(write_random_model(tmp_path))
    assert scales.dtype == torch.float32
    assert scales.tolist() == [[[1.0, 1.0]] * 2] * 2


@pytest.mark.parametrize("names", [(K, V), MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_scales_of_a_checkpoint_are_taken(tmp_path: Path, names: tuple[str, str]) -> None:
    """One number for all heads, or one for each, in any shape that has as many."""
    given = {
        names[0].format(0): torch.tensor(0.5, dtype=torch.bfloat16),
        names[1].format(0): torch.tensor([0.25]),
        names[0].format(1): torch.tensor([0.5, 2.0]),
        names[1].format(1): torch.tensor([[[0.125]], [[4.0]]]),
    }
    folder = with_scales(tmp_path, given)
    assert read(folder).tolist() == [[[0.5, 0.5], [0.25, 0.25]], [[0.5, 2.0], [0.125, 4.0]]]
    # Whatever KV is kept in, they are no reason to refuse the weights.
    with Checkpoint(folder) as checkpoint:
        config = read_config(folder)
        load_weights(checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({K.format(1): torch.ones(1)}, "no model.layers.0.self_attn.k_scale and"),
        (
            {K.format(0): torch.ones(1), V.format(0): torch.ones(1), K.format(1): torch.ones(1)},
            "no model.layers.1.self_attn.k_scale and model.layers.1.self_attn.v_scale",
        ),
        (
            {K.format(0): torch.ones(3), V.format(0): torch.ones(1)},
            "k_scale has shape [3]; a scale of KV is one number, or one for each of the 2",
        ),
        (
            {K.format(0): torch.ones(2), V.format(0): torch.tensor([1.0, 0.0])},
            "v_scale is [1.0, 0.0]; a scale of KV is finite and more than 0",
        ),
        ({K.format(0): torch.tensor(float("nan")), V.format(0): torch.ones(1)}, "k_scale is [nan]"),
    ],
)
def test_what_cannot_scale(tmp_path: Path, given: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(with_scales(tmp_path, given))
    assert said in str(caught.value)


def test_scales_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        scales = read_scales(checkpoint, config)
        known = {fingerprint(checkpoint, config, "x", each) for each in (None, scales, scales * 2)}
    assert len(known) == 3


def test_a_checkpoint_quantised_in_nothing_but_kv_is_read() -> None:
    assert config_from_json(LLAMA | {"quantization_config": KV_ONLY}) == config_from_json(LLAMA)


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {"quant_method": "fp8"},
    ],
)
def test_any_other_quantisation_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is quantized"):
        config_from_json(LLAMA | {"quantization_config": KV_ONLY | changes})


LIMITS = RowLimits(
    slots=2, context_tokens=64, step_tokens=48, block_size=4, block_count=40, vocab_size=97
)
PROMPT = tuple(range(3, 33))
# Every token: what rounding changes is then what is compared, and not what is computed next.
ALWAYS = {"logit_bias": ((5, 100.0),)}


def tokens_of(stepper: Stepper, **chosen: Any) -> tuple[list[int], list[int]]:
    """Of a prompt, and of one that goes on from a copy of its last block in another place."""
    first = plan(
        1,
        joins=(joined(0, PROMPT, 0, blocks=tuple(range(12)), **chosen),),
        chunks=((0, len(PROMPT)),),
        membership_checksum=checksum([(0, 0)]),
        lease_steps=8,
    )
    results: list[StepResult] = []
    stepper.run(first, 0, results.append, lambda: False)
    stepper.land()
    whole = [token for result in results for token in result.outcome.token_ids]
    results.clear()
    # 27 of 30 tokens are done: six blocks are shared, the seventh is a copy.
    again = plan(
        2,
        leaves=(0,),
        joins=(joined(1, (*PROMPT, *whole[:2]), 27, blocks=(*range(6), *range(30, 36)), **chosen),),
        copies=((6, 30),),
        chunks=((1, len(PROMPT) + 2 - 27),),
        membership_checksum=checksum([(1, 1)]),
        lease_steps=6,
    )
    stepper.run(again, 0, results.append, lambda: False)
    stepper.land()
    return whole, [token for result in results for token in result.outcome.token_ids]


def joined(
    slot: int, known: tuple[int, ...], done: int, *, blocks: tuple[int, ...], **chosen: Any
) -> Join:
    return Join(
        slot=slot,
        sequence_id=slot,
        token_ids=known,
        prompt_tokens=len(PROMPT),
        num_computed_tokens=done,
        block_tables=(BlockTable(blocks),),
        sampling=sampling(max_tokens=8, **chosen),
    )


def pages_of(model: Model) -> torch.Tensor:
    device = model.turn_device()
    tokens_of(InTurns(Rows(LIMITS), device), **ALWAYS)
    return device._pages


def test_every_layer_and_head_has_a_scale_of_its_own(tmp_path: Path) -> None:
    scales = 2.0 ** -torch.arange(8).view(2, 2, 2)
    names = [[name.format(layer) for name in (K, V)] for layer in range(2)]
    given = {names[i][j]: scales[i, j].clone() for i in range(2) for j in range(2)}
    folder = with_scales(tmp_path, given)
    whole = pages_of(Model(folder, LIMITS))
    codes = pages_of(Model(folder, LIMITS, is_kv_fp8=True)).view(fp8.DTYPE).float()
    step = scales.view(2, 2, 1, 2, 1, 1)
    error = (codes * step - whole).abs()
    # What the first layer writes is rounded once; the second is given what comes of it. A scale of
    # another layer or head would be wrong by a factor of two.
    assert bool((error <= torch.maximum(whole.abs() / 16, step / 1024) * 1.0001)[0].all())
    assert float(error[1].norm() / whole[1].norm()) < 2.0**-3


@pytest.mark.parametrize("is_kv_fp8", [False, True], ids=["fp32", "fp8"])
def test_a_copied_block_stands_for_its_source(tmp_path: Path, is_kv_fp8: bool) -> None:
    dispatch.force("torch")
    model = Model(write_random_model(tmp_path, seed=3), LIMITS, is_kv_fp8=is_kv_fp8)
    try:
        told = [tokens_of(stepper) for stepper in (model.in_turns(), model.one_ahead())]
    finally:
        dispatch.force(None)
    for whole, rest in told:
        assert len(whole) == 8
        assert rest == whole[2:]
    assert told[0] == told[1]
