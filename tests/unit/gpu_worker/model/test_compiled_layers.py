"""All layers in one compiled call: bit for bit what the operators say one by one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.batch.logits_indices import logits_indices
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import StepTables
from gpu_worker.model.decoder import Decoder, StepTensors
from gpu_worker.runner.dummy_steps import step_of
from gpu_worker.runner.eager_runner import EagerRunner
from kernels import dispatch, native
from kernels.linear.packed_linear import WeightDtype
from tests.support.ahead import Model
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=8, context_tokens=64, step_tokens=64, block_size=4, block_count=64, vocab_size=97
)


def family(name: str) -> dict[str, Any]:
    return {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]}


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "gemma": {**family("Gemma"), "head_dim": 16},
    "gemma2": {
        **family("Gemma2"),
        "head_dim": 16,
        "query_pre_attn_scalar": 1,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "sliding_window_pattern": 2,
    },
    # Two layer groups of two layers each, which take turns.
    "gemma3-windows": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "sliding_window": 5,
    },
    "granite": {**family("Granite"), "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    "olmo2": {**family("Olmo2"), "num_key_value_heads": 4},
    "phi3": {**family("Phi3"), "head_dim": 16, "partial_rotary_factor": 0.75},
    "smollm3": {**family("SmolLM3"), "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "wide-heads": {"head_dim": 24},
    "one-kv-head": {"num_key_value_heads": 1, "hidden_size": 56, "intermediate_size": 96},
}
STEPS = {"decode": [1, 1, 1], "chunks": [7, 1, 13, 9], "one": [1], "long": [50, 1]}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    skip_without_linear(kind)
    return kind


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    skip_without_linear(torch.float32)
    return model(tmp_path / "model", torch.float32)


def skip_without_linear(dtype: torch.dtype) -> None:
    if not native.build() or not native.compiled().has_linear(torch.ones(4, 4, dtype=dtype)):
        pytest.skip(f"no compiled linear for {dtype} here: {native.reason()}")


def model(folder: Path, dtype: torch.dtype, **changes: Any) -> Model:
    return Model(write_random_model(folder, **changes), LIMITS, dtype=dtype)


def step(
    counts: Sequence[int],
    sampled: Sequence[int],
    device: EagerRunner,
    limits: RowLimits = LIMITS,
) -> StepTensors:
    """Every row in blocks of its own, from its fourth token on: what came before is noise."""
    whole, done = step_of(counts, limits), 3
    contexts = whole.context_lengths + done
    width = -(-int(contexts.max()) // LIMITS.block_size)
    shape = limits.groups, len(counts), width
    tables = np.arange(np.prod(shape), dtype=np.int32)[::-1].reshape(shape).copy()
    rows, positions = np.repeat(np.arange(len(counts)), counts), whole.positions + done
    blocks = tables[:, rows, positions // LIMITS.block_size].astype(np.int64, order="C")
    inputs = replace(
        whole,
        context_lengths=contexts,
        positions=positions,
        token_ids=np.arange(5, 5 + whole.token_count) % LIMITS.vocab_size,
        tables=lambda: StepTables(
            block_tables=tables,
            slot_mapping=blocks * LIMITS.block_size + positions % LIMITS.block_size,
        ),
        sampled_rows=np.array(sampled, np.int64),
        sampled_tokens=whole.query_starts[1:].astype(np.int64)[list(sampled)] - 1,
    )
    return device._on_device(inputs, logits_indices(inputs))


@pytest.mark.parametrize("counts", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_the_bits_of_the_operators(
    changes: dict[str, Any], counts: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    check_bits(model(tmp_path / "model", dtype, **changes), counts)


@pytest.mark.parametrize("kind", ["int8", "int4_asym"])
def test_the_bits_of_rounded_weights(kind: WeightDtype, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", attention_bias=True, intermediate_size=64)
    check_bits(Model(folder, LIMITS, dtype=dtype, weight_dtype=kind), STEPS["chunks"])


def check_bits(own: Model, counts: list[int]) -> None:
    decoder, pages = own.decoder()
    compiled = decoder.compiled
    assert compiled is not None
    limits = replace(LIMITS, windows=own.config.groups.windows)
    before = pages.normal_(generator=torch.Generator().manual_seed(7)).clone()
    for sampled in ([0], list(range(len(counts))), []):
        tensors = step(counts, sampled, EagerRunner(decoder, pages), limits)
        found = {}
        for name, layers in (("at once", compiled), ("one by one", None)):
            pages.copy_(before)
            decoder.compiled = layers
            with torch.inference_mode():
                states = decoder.forward(tensors)
            found[name] = (states.hidden, states.residual, pages.clone())
        for at_once, one_by_one in zip(*found.values(), strict=True):
            assert torch.equal(at_once, one_by_one)
        assert not torch.equal(pages, before)


def test_memory_shared_with_a_larger_step_changes_nothing(tiny: Model) -> None:
    decoder, pages = tiny.decoder()
    device = EagerRunner(decoder, pages)
    with torch.inference_mode():
        first = decoder.forward(step([3, 1], [0, 1], device))
        kept = first.hidden.clone()
        decoder.forward(step([40, 9], [1], device))
        assert torch.equal(first.hidden, kept)
        assert torch.equal(decoder.forward(step([3, 1], [0, 1], device)).hidden, kept)


def small_step(device: EagerRunner, **changes: Any) -> StepTensors:
    return replace(step([3, 1], [0, 1], device), **changes)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("positions", torch.tensor([0, 1, 2, 64]), "positions: 64"),
        ("slot_mapping", torch.tensor([[0, 1, 2, 256]]), "slots: 256"),
        ("block_tables", torch.full((1, 2, 2), 64, dtype=torch.int32), "block 64 of 64"),
    ],
)
def test_what_is_outside_is_refused_before_anything_is_written(
    name: str, value: torch.Tensor, told: str, tiny: Model
) -> None:
    decoder, pages = tiny.decoder()
    before = pages.clone()
    with torch.inference_mode(), pytest.raises(IndexError, match=told):
        decoder.forward(small_step(EagerRunner(decoder, pages), **{name: value}))
    assert torch.equal(pages, before)


def test_another_path_serves_where_one_is_asked_for(tiny: Model) -> None:
    decoder, pages = tiny.decoder()
    tensors = small_step(EagerRunner(decoder, pages))

    def must_not_run(*arguments: object) -> None:
        raise AssertionError("the compiled layers ran")

    decoder.compiled = must_not_run  # type: ignore[assignment]
    dispatch.force("torch")
    try:
        with torch.inference_mode():
            assert decoder.forward(tensors).hidden.isfinite().all()
    finally:
        dispatch.force(None)


def test_pages_of_another_dtype_have_no_compiled_layers(tiny: Model) -> None:
    wide = tiny.decoder()[1].to(torch.bfloat16)
    assert Decoder(tiny.config, tiny.weights, wide, context_tokens=64).compiled is None
