"""Reads a Hugging Face config.json into `ModelConfig`, or says why this model cannot be served.

Architectures are an allow-list: each row of `_FAMILIES` states what its family always or never has.
Whatever would change the computation and is not known here is refused, never ignored.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_worker.model import ModelConfig
from gpu_worker.rope_config import RopeConfig, read_rope
from service_kit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    model_type: str
    has_qk_norm: bool = False
    # None: config's `attention_bias` says.
    has_qkv_bias: bool | None = None
    has_output_bias: bool | None = None
    may_have_mlp_bias: bool = False
    head_dim: int | None = None
    # Sliding only when `use_sliding_window` says so.
    has_window_switch: bool = False


_FAMILIES: Final = {
    "LlamaForCausalLM": _Family(model_type="llama", may_have_mlp_bias=True),
    "MistralForCausalLM": _Family(model_type="mistral", has_qkv_bias=False, has_output_bias=False),
    "Qwen2ForCausalLM": _Family(
        model_type="qwen2", has_qkv_bias=True, has_output_bias=False, has_window_switch=True
    ),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3", has_qk_norm=True, head_dim=128, has_window_switch=True
    ),
}
_ARCHITECTURES: Final = {family.model_type: name for name, family in _FAMILIES.items()}
_ACTIVATIONS: Final = ("silu", "swish")


class _HfConfig(BaseModel):
    """The keys that are read; others (training, generation) do not touch the computation."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: list[str] | None = None
    model_type: str = ""
    auto_map: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(default=1e-6, ge=0)
    max_position_embeddings: int = Field(ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    partial_rotary_factor: float | None = None
    rope_theta: float | None = Field(default=None, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def read_config(folder: Path) -> ModelConfig:
    """The model in `folder`. ConfigError says what cannot be served and what to do."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no config.json; --model must name a Hugging Face checkpoint folder"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config_from_json(raw, name=str(path))


def config_from_json(raw: dict[str, Any], *, name: str = "config.json") -> ModelConfig:
    try:
        hf = _HfConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {field}: {first['msg'].lower()}") from None
    architecture = _architecture(hf, name)
    family = _FAMILIES[architecture]
    _refuse_unknown(hf, name)
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = hf.head_dim or family.head_dim or _even_share(hf, name)
    _require(
        hf.num_attention_heads % kv_heads == 0,
        f"{name}: {hf.num_attention_heads} heads are not a multiple of {kv_heads} key/value heads",
    )
    _require(head_dim % 2 == 0, f"{name}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        inner_size=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=hf.rms_norm_eps,
        positions_max=hf.max_position_embeddings,
        window_tokens=_window(hf, family),
        rope=_rope(hf, head_dim, name),
        has_tied_embeddings=hf.tie_word_embeddings,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=_given(family.has_qkv_bias, hf.attention_bias),
        has_output_bias=_given(family.has_output_bias, hf.attention_bias),
        has_mlp_bias=family.may_have_mlp_bias and hf.mlp_bias,
        checkpoint_dtype=hf.dtype or hf.torch_dtype or "float32",
    )


def _architecture(hf: _HfConfig, name: str) -> str:
    named = hf.architectures or [_ARCHITECTURES.get(hf.model_type, hf.model_type or "nothing")]
    if hf.auto_map:
        raise ConfigError(
            f"{name} asks to run code from the checkpoint (auto_map), which kaiten never does; use "
            "a checkpoint in one of the built-in architectures: " + ", ".join(_FAMILIES)
        )
    if len(named) != 1 or named[0] not in _FAMILIES:
        raise ConfigError(
            f"{name} names the architecture {', '.join(named)}, which is not one that kaiten "
            "computes: " + ", ".join(_FAMILIES)
        )
    return named[0]


def _refuse_unknown(hf: _HfConfig, name: str) -> None:
    if hf.quantization_config is not None and not _scales_only_kv(hf.quantization_config):
        method = hf.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"{name}: the checkpoint is quantized ({method}), which kaiten cannot read; use the "
            "original checkpoint in bfloat16, float16 or float32"
        )
    _require(
        hf.hidden_act in _ACTIVATIONS,
        f"{name}: activation {hf.hidden_act!r} is not supported; only silu is",
    )


def _scales_only_kv(quantization: dict[str, Any]) -> bool:
    """The weights are as they were; what is added are scales of KV in fp8 (`kv_scales`)."""
    scheme = quantization.get("kv_cache_scheme")
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and not quantization.get("config_groups")
        and isinstance(scheme, dict)
        and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    )


def _window(hf: _HfConfig, family: _Family) -> int | None:
    """The sliding window if any layer has one that can matter."""
    window = hf.sliding_window
    if window is None or (family.has_window_switch and not hf.use_sliding_window):
        return None
    if hf.layer_types is not None:
        slides = "sliding_attention" in hf.layer_types
    elif family.has_window_switch:
        # The first `max_window_layers` layers see everything.
        slides = (hf.max_window_layers or 0) < hf.num_hidden_layers
    else:
        slides = True
    return window if slides and window < hf.max_position_embeddings else None


def _rope(hf: _HfConfig, head_dim: int, name: str) -> RopeConfig:
    given = dict(hf.rope_parameters or hf.rope_scaling or {})
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        value = getattr(hf, key)
        if value is not None:
            given.setdefault(key, value)
    return read_rope(given, head_dim=head_dim, positions_max=hf.max_position_embeddings, name=name)


def _even_share(hf: _HfConfig, name: str) -> int:
    _require(
        hf.hidden_size % hf.num_attention_heads == 0,
        f"{name}: hidden_size {hf.hidden_size} is not a multiple of {hf.num_attention_heads} "
        "heads and head_dim is not given",
    )
    return hf.hidden_size // hf.num_attention_heads


def _given(fixed: bool | None, said: bool) -> bool:
    return said if fixed is None else fixed


def _require(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise ConfigError(rule)
