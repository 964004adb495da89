"""Maps a checkpoint's tensors to the decoder's weights by one table of names.

The table is complete both ways: a tensor that the model needs and the checkpoint lacks is named,
and so is one that the checkpoint has and this model would not use, because it would change the
result if it were used.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor

from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.kv_scales import scale_names
from gpu_worker.model.layer_spec import NORM_NAMES
from gpu_worker.model.model import ModelConfig
from kernels.linear.packed_linear import PackedLinear, WeightDtype, is_int4
from kernels.norms_rope.rms_norm import rms_norm, rms_norm_rows
from service_kit.errors import ConfigError

# Buffers that old checkpoints saved and the config determines.
_REDUNDANT: Final = ("rotary_emb.inv_freq",)
# As safetensors names them.
_DTYPES: Final = ("BF16", "F16", "F32", "F64")
_NAMES_SHOWN_MAX: Final = 5
_DIGEST_BYTES: Final = 4096

_EMBEDDING: Final = "model.embed_tokens.weight"
_NORM: Final = "model.norm.weight"
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    # None: the layer has no norm there (`layer_spec`).
    attention_norm: Tensor | None = None
    attention_output_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    # The head itself where embeddings are tied and its layout can be read back.
    embedding: Tensor | PackedLinear
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: PackedLinear
    embedding_scale: float = 1.0
    # Whether a GPU computes a token to the same bits whatever is computed with it. What a CPU's
    # kernels promise, they always do.
    is_deterministic: bool = False

    def embed(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.embedding, PackedLinear):
            rows = self.embedding.rows(token_ids)
        else:
            rows = self.embedding.index_select(0, token_ids)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale

    def embed_and_norm(self, token_ids: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(embeddings as the first layer takes them, embeddings)."""
        norm, embedding = self.layers[0].attention_norm, self.embedding
        table = embedding.plain if isinstance(embedding, PackedLinear) else embedding
        if norm is not None and table is not None and self.embedding_scale == 1:
            return rms_norm_rows(table, token_ids, norm, eps)
        rows = self.embed(token_ids)
        return rows if norm is None else rms_norm(rows, norm, eps), rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinearNames:
    """Tensors of the checkpoint that are one linear, one below the other, and their rows."""

    rows: dict[str, int]
    columns: int
    has_bias: bool
    # Times what comes out: rounded once, with the weight.
    scale: float = 1.0


Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor the model needs, with its shape."""
    shapes: Shapes = {_EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, layer).items()}
    shapes[_NORM] = (config.hidden_size,)
    if not config.has_tied_embeddings:
        shapes[_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width,) for name, width in _norms(config, layer).values()}
    for linear in _linears(config, layer).values():
        for name, rows in linear.rows.items():
            shapes[f"{name}.weight"] = (rows, linear.columns)
            if linear.has_bias:
                shapes[f"{name}.bias"] = (rows,)
    return shapes


def _norms(config: ModelConfig, layer: int) -> dict[str, tuple[str, int]]:
    """Field of `LayerWeights` -> (name, elements)."""
    spec = config.blocks[layer]
    norms = {field: (name, config.hidden_size) for field, name in NORM_NAMES[spec.norms].items()}
    if spec.qk_norm is not None:
        by_head = spec.qk_norm == "head"
        heads, kv_heads = (1, 1) if by_head else (config.heads, config.kv_heads)
        norms["q_norm"] = ("self_attn.q_norm", heads * config.head_dim)
        norms["k_norm"] = ("self_attn.k_norm", kv_heads * config.head_dim)
    return norms


def _linears(config: ModelConfig, layer: int) -> dict[str, _LinearNames]:
    """Field of `LayerWeights` -> what it is made of."""
    spec, hidden, inner = config.blocks[layer], config.hidden_size, config.inner_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if spec.is_stacked:
        qkv = {"self_attn.qkv_proj": queries + 2 * keys}
        gate_up = {"mlp.gate_up_proj": 2 * inner}
    else:
        rows = {"q": queries, "k": keys, "v": keys}
        qkv = {f"self_attn.{part}_proj": count for part, count in rows.items()}
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    output, down = {"self_attn.o_proj": hidden}, {"mlp.down_proj": hidden}
    of, added = _LinearNames, config.residual_scale
    return {
        "qkv": of(rows=qkv, columns=hidden, has_bias=spec.has_qkv_bias),
        "output": of(rows=output, columns=queries, has_bias=spec.has_output_bias, scale=added),
        "gate_up": of(rows=gate_up, columns=hidden, has_bias=spec.has_mlp_bias),
        "down": of(rows=down, columns=inner, has_bias=spec.has_mlp_bias, scale=added),
    }


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
        if checkpoint.dtype(name) not in _DTYPES:
            raise ConfigError(
                f"tensor {name} is of {checkpoint.dtype(name)}, which is none of {_DTYPES}: "
                "quantized weights cannot be read; use the original checkpoint"
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
    weight_dtype: WeightDtype = "auto",
    is_deterministic: bool = False,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Weights:
    """Read, convert, fuse and pack. `on_layer(n)` after each of `config.layers` layers.

    `weight_dtype` is of the linears. With int4 the head, and an embedding tied to it, keep int8.
    """
    check_tensors(checkpoint, config)
    path = _path(is_deterministic)

    def read(name: str) -> Tensor:
        return checkpoint.tensor(name).to(device=device, dtype=dtype, copy=True)

    def read_norm(name: str) -> Tensor:
        weight = checkpoint.tensor(f"{name}.weight")
        wide = weight.float() + config.norm_offset if config.norm_offset else weight
        return wide.to(device=device, dtype=dtype, copy=True)

    def view(name: str, scale: float = 1.0) -> Tensor:
        """For weights that are packed at once: without a copy of what the file has."""
        tensor = checkpoint.tensor(name)
        return (tensor if scale == 1 else tensor.float() * scale).to(device=device, dtype=dtype)

    def linear(prefix: str, of: _LinearNames) -> PackedLinear:
        weight = _stacked([view(f"{prefix}{name}.weight", of.scale) for name in of.rows])
        biases = [view(f"{prefix}{name}.bias", of.scale) for name in of.rows if of.has_bias]
        bias = _stacked(biases).clone() if biases else None
        return PackedLinear(weight, bias, path=path, weight_dtype=weight_dtype)

    layers = []
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        parts: dict[str, Any] = {
            field: linear(prefix, of) for field, of in _linears(config, layer).items()
        }
        for field, (name, _) in _norms(config, layer).items():
            parts[field] = read_norm(prefix + name)
        layers.append(LayerWeights(**parts))
        on_layer(layer + 1)
    is_tied = config.has_tied_embeddings
    head_dtype: WeightDtype = "int8" if is_int4(weight_dtype) else weight_dtype
    head = PackedLinear(view(_EMBEDDING if is_tied else _HEAD), path=path, weight_dtype=head_dtype)
    embedding = head if is_tied and head.has_rows else read(_EMBEDDING)
    return Weights(
        embedding=embedding,
        layers=tuple(layers),
        norm=read_norm(_NORM.removesuffix(".weight")),
        head=head,
        # As a number of the dtype, which is how the checkpoints' own code multiplies.
        embedding_scale=torch.tensor(config.embedding_scale, dtype=dtype).item(),
        is_deterministic=is_deterministic,
    )


def without_memory(weights: Weights) -> Weights:
    """Of the same shapes and kinds, on torch's device that has no memory; of plain ones."""
    return _mapped(weights, lambda x: x.to("meta"), is_deterministic=weights.is_deterministic)


def made_deterministic(weights: Weights) -> Weights:
    """The same tensors as a deterministic worker has them; of plain ones."""
    return _mapped(weights, lambda x: x, is_deterministic=True)


def _mapped(
    weights: Weights, change: Callable[[Tensor], Tensor], *, is_deterministic: bool
) -> Weights:
    def tensor(x: Tensor | None) -> Any:
        return None if x is None else change(x)

    def linear(of: PackedLinear) -> PackedLinear:
        assert of.plain is not None, "packed weights have a device's layout"
        return PackedLinear(change(of.plain), tensor(of.bias), path=_path(is_deterministic))

    def layer(of: LayerWeights) -> LayerWeights:
        parts: dict[str, Any] = {field.name: getattr(of, field.name) for field in fields(of)}
        for name, part in parts.items():
            parts[name] = linear(part) if isinstance(part, PackedLinear) else tensor(part)
        return LayerWeights(**parts)

    head, embedding = linear(weights.head), weights.embedding
    return Weights(
        embedding=head if isinstance(embedding, PackedLinear) else tensor(embedding),
        layers=tuple(map(layer, weights.layers)),
        norm=tensor(weights.norm),
        head=head,
        embedding_scale=weights.embedding_scale,
        is_deterministic=is_deterministic,
    )


def _path(is_deterministic: bool) -> str:
    """Of `PackedLinear`."""
    return "triton" if is_deterministic else "auto"


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
