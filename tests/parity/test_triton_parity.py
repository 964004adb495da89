"""The whole worker on its GPU kernels, interpreted, says what it says on the torch path.

Rows, plans, leases, decoder and sampler are the real ones; only the kernels differ.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import warm_python
from tests.support.once import made_once
from tests.support.random_model import write_random_model

pytest.importorskip("triton", reason="no triton here")

KERNELS = {
    "attend_kernel",
    "decode_kernel",
    "_draw_kernel",
    "_merge_kernel",
    "_plan_kernel",
    "_rms_norm_kernel",
    "_rope_write_kv_kernel",
    "_gate_mul_kernel",
}
ON_ROWS = {"_step_rows_kernel", "_advance_rows_kernel"}
# Float32 through two layers; the bound of the parity with transformers. In fp8 a number that lies
# on a border between two codes may fall to either side, by 2^-3 of itself: one of 16 numbers of one
# position, so less than 2^-3 / 16 of a logit of size 1.
LOGPROB_ERROR_MAX = {"auto": 1e-4, "fp8": 2.0**-7}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 6,
}
OLMO2 = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
PHI3 = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "head_dim": 16,
    "partial_rotary_factor": 0.75,
}
GEMMA = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 16}
GEMMA2 = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 16,
    "query_pre_attn_scalar": 1,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 6.0,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "sliding_window_pattern": 2,
    # The longest row is three of them.
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
}
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window": 6,
}
GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
}
SMOLLM3 = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "no_rope_layers": [1, 0],
}


# Each kernel is compared alone, for every dtype and shape, in tests/unit/kernels/interpreted. Here
# each kind of layer and of KV meets the whole worker once; each kind of KV one step ahead, too,
# which knows nothing of layers.
DAILY: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "qwen2-two-layer-groups": (QWEN2, "auto"),
    "qwen3-fp8": (QWEN3, "fp8"),
    "olmo2-auto": (OLMO2, "auto"),
    "phi3-fp8": (PHI3, "fp8"),
}
BRIEF: Final = ("olmo2-auto", "phi3-fp8")
NIGHTLY: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "llama-auto": ({}, "auto"),
    "mistral-fp8": (MISTRAL, "fp8"),
    "gemma-auto": (GEMMA, "auto"),
    "gemma2-auto": (GEMMA2, "auto"),
    "gemma3-auto": (GEMMA3, "auto"),
    "granite-auto": (GRANITE, "auto"),
    "smollm3-auto": (SMOLLM3, "auto"),
}


def runs(root: Path, models: Mapping[str, tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Of all these models, in one process: its imports are dearer than what a model says."""
    words = []
    for name, (changes, kv_dtype) in models.items():
        words += ["brief" if name in BRIEF else "whole", kv_dtype]
        words += [str(write_random_model(root / name, seed=3, **changes))]
    done = warm_python.run(
        *("-m", "tests.parity.triton_process", *words),
        imports=warm_python.TORCH,
        environ={"TRITON_INTERPRET": "1"},
    )
    assert done.code == 0, done.err[-4000:]
    return [json.loads(line) for line in done.out.splitlines() if line.startswith('{"path"')]


@pytest.fixture(scope="module")
def daily(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def tell(folder: Path) -> None:
        (folder / "told").write_text(json.dumps(runs(folder, DAILY)))

    told: list[dict[str, Any]] = json.loads(
        (made_once(tmp_path_factory, "triton-parity", tell) / "told").read_text()
    )
    return told


@pytest.mark.parametrize("name", DAILY)
def test_token_for_token(name: str, daily: list[dict[str, Any]]) -> None:
    check(daily, name, DAILY[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NIGHTLY)
def test_token_for_token_of_other_families(name: str, tmp_path: Path) -> None:
    check(runs(tmp_path, {name: NIGHTLY[name]}), name, NIGHTLY[name][1])


def check(told: list[dict[str, Any]], name: str, kv_dtype: str) -> None:
    results = [one for one in told if Path(one["folder"]).name == name]
    ways = ["torch", "triton"] if name in BRIEF else ["ahead", "torch", "triton"]
    assert [result["path"] for result in results] == ways
    expected = results[-2]
    # Otherwise equality would prove little.
    assert len({token for row in expected["tokens"] for token in row}) >= 10
    for result in results:
        assert result["tokens"] == expected["tokens"]
        for own, known in zip(result["logprobs"], expected["logprobs"], strict=True):
            assert own == pytest.approx(known, abs=LOGPROB_ERROR_MAX[kv_dtype])
    assert not expected["launches"]
    assert results[-1]["launches"].keys() >= KERNELS
    if name not in BRIEF:
        assert results[0]["launches"].keys() >= KERNELS | ON_ROWS
