"""Maps a checkpoint's tensors to the decoder's weights by one table of names.

The table is complete both ways: a tensor that the model needs and the checkpoint lacks is named,
and so is one that the checkpoint has and this model would not use, because it would change the
result if it were used.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gpu_worker.checkpoint import Checkpoint
from gpu_worker.kv_scales import scale_names
from gpu_worker.model import ModelConfig
from kernels.linear import PackedLinear
from kernels.rms_norm import rms_norm, rms_norm_rows
from service_kit.errors import ConfigError

# Buffers that old checkpoints saved and the config determines.
_REDUNDANT: Final = ("rotary_emb.inv_freq",)
_NAMES_SHOWN_MAX: Final = 5
_DIGEST_BYTES: Final = 4096

_EMBEDDING: Final = "model.embed_tokens.weight"
_NORM: Final = "model.norm.weight"
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    attention_norm: Tensor
    qkv: PackedLinear
    # Of one head; None unless queries and keys are normalised.
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    # The head itself where embeddings are tied and its layout can be read back.
    embedding: Tensor | PackedLinear
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: PackedLinear

    def embed(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.embedding, PackedLinear):
            return self.embedding.rows(token_ids)
        return self.embedding.index_select(0, token_ids)

    def embed_and_norm(self, token_ids: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(embeddings normed for the first layer, embeddings)."""
        norm, embedding = self.layers[0].attention_norm, self.embedding
        table = embedding.plain if isinstance(embedding, PackedLinear) else embedding
        if table is not None:
            return rms_norm_rows(table, token_ids, norm, eps)
        rows = self.embed(token_ids)
        return rms_norm(rows, norm, eps), rows


Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor the model needs, with its shape."""
    shapes: Shapes = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    shapes[_NORM] = (config.hidden_size,)
    if not config.has_tied_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.inner_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ConfigError naming the tensors that are missing, misshapen or unknown."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in checkpoint]
    if missing:
        raise ConfigError(f"the checkpoint lacks {_listed(missing)}; it is incomplete")
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise ConfigError(
                f"tensor {name} has shape {list(checkpoint.shape(name))} in the checkpoint, but "
                f"config.json makes it {list(shape)}"
            )
    known = expected.keys() | scale_names(config)
    unused = [name for name in checkpoint if name not in known and not _is_redundant(name)]
    if unused and not (unused == [_HEAD] and config.has_tied_embeddings):
        raise ConfigError(
            f"the checkpoint has {_listed(unused)}, which {config.architecture} with this "
            "config.json does not use; the two do not belong together"
        )


def _is_redundant(name: str) -> bool:
    return name.endswith(_REDUNDANT)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN_MAX])
    more = len(names) - _NAMES_SHOWN_MAX
    return f"{shown} and {more} more tensors" if more > 0 else f"the tensor(s) {shown}"


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_int8: bool = False,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Weights:
    """Read, convert, fuse and pack. `on_layer(n)` after each of `config.layers` layers.

    With `is_int8` linears keep a byte per weight; so does an embedding that is tied to the head.
    """
    check_tensors(checkpoint, config)

    def read(name: str) -> Tensor:
        return checkpoint.tensor(name).to(device=device, dtype=dtype, copy=True)

    def view(name: str) -> Tensor:
        """For weights that are packed at once: without a copy of what the file has."""
        return checkpoint.tensor(name).to(device=device, dtype=dtype)

    def linear(*names: str) -> PackedLinear:
        """The named linears one below the other."""
        weight = _stacked([view(f"{name}.weight") for name in names])
        has_bias = f"{names[0]}.bias" in expected
        bias = _stacked([read(f"{name}.bias") for name in names]) if has_bias else None
        return PackedLinear(weight, bias, is_int8=is_int8)

    expected = expected_shapes(config)
    layers = []
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        layers.append(
            LayerWeights(
                attention_norm=read(prefix + "input_layernorm.weight"),
                qkv=linear(*(f"{attention}{part}_proj" for part in "qkv")),
                q_norm=read(attention + "q_norm.weight") if config.has_qk_norm else None,
                k_norm=read(attention + "k_norm.weight") if config.has_qk_norm else None,
                output=linear(attention + "o_proj"),
                mlp_norm=read(prefix + "post_attention_layernorm.weight"),
                gate_up=linear(mlp + "gate_proj", mlp + "up_proj"),
                down=linear(mlp + "down_proj"),
            )
        )
        on_layer(layer + 1)
    is_tied = config.has_tied_embeddings
    head = PackedLinear(view(_EMBEDDING if is_tied else _HEAD), is_int8=is_int8)
    embedding = head if is_tied and head.has_rows else read(_EMBEDDING)
    return Weights(embedding=embedding, layers=tuple(layers), norm=read(_NORM), head=head)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def fingerprint(
    checkpoint: Checkpoint,
    config: ModelConfig,
    numeric_class: str,
    kv_scales: Tensor | None = None,
) -> str:
    """Hex SHA-256 over what decides the tokens: config, numeric class, KV scales, and the tensors.

    Names, shapes and dtypes of all tensors count in full; of the contents the first and the last
    4 KiB of each, which tells fine-tunes apart without reading gigabytes.
    """
    scales = None if kv_scales is None else kv_scales.tolist()
    digest = hashlib.sha256(f"{config!r} {numeric_class} {scales}".encode())
    for part in _samples(checkpoint, config):
        digest.update(part)
    return digest.hexdigest()


def weights_digest(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """The same of the tensors alone: it stays as it is however they are computed with."""
    digest = hashlib.sha256()
    for part in _samples(checkpoint, config):
        digest.update(part)
    return digest.hexdigest()


def _samples(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[bytes]:
    """Name, shape, dtype, first and last bytes of each tensor."""
    for name in sorted(expected_shapes(config)):
        yield f"{name} {checkpoint.shape(name)} {checkpoint.dtype(name)}".encode()
        content = checkpoint.tensor(name).reshape(-1).view(torch.uint8)
        yield content[:_DIGEST_BYTES].numpy().tobytes()
        yield content[-_DIGEST_BYTES:].numpy().tobytes()
