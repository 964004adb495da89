"""A tiny checkpoint with random weights, written without transformers in milliseconds."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu_worker.model.config import config_from_json
from gpu_worker.model.weights import expected_shapes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor that the config needs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config_from_json(config)).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise
    return tensors


def write_random_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A Llama by default; `changes` replace keys of its config."""
    config = LLAMA | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), folder / "model.safetensors")
    return folder
