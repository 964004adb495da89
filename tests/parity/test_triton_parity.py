"""The whole worker on its GPU kernels, interpreted, says what it says on the torch path.

Rows, plans, leases, decoder and sampler are the real ones; only the kernels differ.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.random_model import write_random_model

pytest.importorskip("triton", reason="no triton here")

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 280
KERNELS = {
    "attend_kernel",
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


def runs(folder: Path, kv_dtype: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.triton_process", str(folder), kv_dtype],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"path"')]


# Each kernel is compared alone, for every dtype and shape, in tests/unit/kernels/interpreted. Here
# each kind of layer and of KV meets the whole worker once.
@pytest.mark.parametrize(
    ("changes", "kv_dtype"),
    [
        pytest.param({}, "auto", id="llama-auto", marks=pytest.mark.slow),
        pytest.param(QWEN2, "auto", id="qwen2-two-layer-groups"),
        pytest.param(QWEN3, "fp8", id="qwen3-fp8"),
        pytest.param(OLMO2, "auto", id="olmo2-auto"),
        pytest.param(PHI3, "fp8", id="phi3-fp8"),
        pytest.param(MISTRAL, "fp8", id="mistral-fp8", marks=pytest.mark.slow),
        pytest.param(GEMMA, "auto", id="gemma-auto", marks=pytest.mark.slow),
        pytest.param(GEMMA2, "auto", id="gemma2-auto", marks=pytest.mark.slow),
        pytest.param(GEMMA3, "auto", id="gemma3-auto", marks=pytest.mark.slow),
        pytest.param(GRANITE, "auto", id="granite-auto", marks=pytest.mark.slow),
        pytest.param(SMOLLM3, "auto", id="smollm3-auto", marks=pytest.mark.slow),
    ],
)
def test_token_for_token(changes: dict[str, Any], kv_dtype: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", seed=3, **changes)
    ahead, *results = runs(folder, kv_dtype)
    assert [result["path"] for result in results] == ["torch", "triton"]
    expected = results[0]
    # Otherwise equality would prove little.
    assert len({token for row in expected["tokens"] for token in row}) >= 10
    for result in results:
        assert result["tokens"] == expected["tokens"]
        for own, known in zip(result["logprobs"], expected["logprobs"], strict=True):
            assert own == pytest.approx(known, abs=LOGPROB_ERROR_MAX[kv_dtype])
    for result in results[1::2]:
        assert result["launches"].keys() >= KERNELS
    assert not results[0]["launches"]
    assert ahead["tokens"] == expected["tokens"]
    assert ahead["launches"].keys() >= (KERNELS - {"_merge_kernel"}) | ON_ROWS
