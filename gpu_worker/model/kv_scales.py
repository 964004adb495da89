"""The scales of KV in fp8, one per layer, keys or values, and KV head: the checkpoint's, or 1.

A scale only moves the window in which a code has its full precision (2^-4 of the number, over
fifteen powers of two up to 448 times the scale), so its order of size is all that matters. Keys and
values of trained models lie well inside the window of 1, and what would push them out of it, biases
and outliers, is large, not small. Nothing is measured at start: the tokens of a request would then
depend on when and where its worker came up.
"""

from typing import Final

import torch
from torch import Tensor

from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.model import ModelConfig
from service_kit.errors import ConfigError

DEFAULT: Final = 1.0
# Of keys and of values; as compressed-tensors writes them, then as ModelOpt does.
_NAMES: Final = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
)


def scale_names(config: ModelConfig) -> frozenset[str]:
    """Tensors that scale KV in fp8, and mean nothing to KV in any other dtype."""
    return frozenset(
        f"model.layers.{layer}.{name}"
        for layer in range(config.layers)
        for pair in _NAMES
        for name in pair
    )


def read_scales(checkpoint: Checkpoint, config: ModelConfig) -> Tensor:
    """[layers, 2 (keys, values), kv_heads] float32 on the CPU.

    ConfigError names what is missing where a checkpoint has only some, and what cannot be a scale.
    """
    if not any(name in checkpoint for name in scale_names(config)):
        return torch.full((config.layers, 2, config.kv_heads), DEFAULT)
    layers = [_of_layer(checkpoint, config, layer) for layer in range(config.layers)]
    return torch.stack(layers)


def _of_layer(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> Tensor:
    prefix = f"model.layers.{layer}."
    for pair in _NAMES:
        names = [prefix + name for name in pair]
        if all(name in checkpoint for name in names):
            return torch.stack([_scale(checkpoint, name, config.kv_heads) for name in names])
    raise ConfigError(
        f"the checkpoint scales KV in some layers, but has no {prefix}{_NAMES[0][0]} and "
        f"{prefix}{_NAMES[0][1]}; copy it again, or take --kv-dtype auto"
    )


def _scale(checkpoint: Checkpoint, name: str, kv_heads: int) -> Tensor:
    """[kv_heads]; one number is every head's."""
    scale = checkpoint.tensor(name).float().reshape(-1)
    if len(scale) not in (1, kv_heads):
        raise ConfigError(
            f"tensor {name} has shape {list(checkpoint.shape(name))}; a scale of KV is one number, "
            f"or one for each of the {kv_heads} key/value heads"
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ConfigError(
            f"tensor {name} is {scale.tolist()}; a scale of KV is finite and more than 0"
        )
    return scale.expand(kv_heads)
