"""Reads a Hugging Face config.json into `ModelConfig`, or says why this model cannot be served.

Architectures are an allow-list: each row of `FAMILIES` says what its family always or never has.
An activation, a kind of layer, a rope parameter or a quantization that is not known here is
refused, never ignored. Keys beside these that no family reads are ignored, as `transformers` does.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_worker.model.families import FAMILIES, PARTS_MISSING, Family
from gpu_worker.model.layer_spec import Activation, LayerSpec
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.rope import RopeConfig, read_rope
from service_kit.errors import ConfigError
from service_kit.positions import positions_max

_ARCHITECTURES: Final = {family.model_type: name for name, family in FAMILIES.items()}
# More than any model has, and what a list of them may take.
_LAYERS_MAX: Final = 4096
_SOFTCAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
# Of `layer_types`, whether a layer attends to a window only.
_SLIDES: Final = {"full_attention": False, "sliding_attention": True}
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class _HfConfig(BaseModel):
    """The keys that are read; others (training, generation) touch the computation of no family."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    quantization_config: dict[str, Any] | None = None
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1, le=_LAYERS_MAX)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    hidden_act: str = "silu"
    hidden_activation: str | None = "silu"
    query_pre_attn_scalar: float = Field(default=256, gt=0, allow_inf_nan=False)
    rope_local_base_freq: float = Field(default=10_000.0, gt=0, allow_inf_nan=False)
    sliding_window_pattern: int = Field(default=6, ge=1)
    attn_logit_softcapping: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    final_logit_softcapping: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    use_bidirectional_attention: bool | None = None
    rms_norm_eps: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    max_position_embeddings: int = Field(ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    partial_rotary_factor: float | None = None
    rope_theta: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = Field(default=4, ge=1)
    embedding_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    attention_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    residual_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logits_scaling: float = Field(default=1.0, gt=0, allow_inf_nan=False)
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
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config_from_json(raw, name=str(path))


def config_from_json(raw: dict[str, Any], *, name: str = "config.json") -> ModelConfig:
    architecture = _architecture(raw, name)
    family = FAMILIES[architecture]
    hf = _parsed({**family.defaults, **raw}, name)
    _refuse_unknown(hf, family, name)
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = hf.head_dim or family.head_dim or _even_share(hf, name)
    _require(
        hf.num_attention_heads % kv_heads == 0,
        f"{name}: {hf.num_attention_heads} heads are not a multiple of {kv_heads} key/value heads",
    )
    _require(head_dim % 2 == 0, f"{name}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    reached = positions_max(raw | {"model_type": family.model_type}, hf.max_position_embeddings)
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        inner_size=hf.intermediate_size,
        heads=hf.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=hf.rms_norm_eps,
        positions_max=reached,
        blocks=_blocks(hf, family, head_dim, reached, name),
        has_tied_embeddings=hf.tie_word_embeddings,
        checkpoint_dtype=hf.dtype or hf.torch_dtype or "float32",
        norm_offset=1.0 if family.has_norms_of_one else 0.0,
        logits_softcap=hf.final_logit_softcapping,
        **_multipliers(hf, family, head_dim),
    )


def _parsed(raw: dict[str, Any], name: str) -> _HfConfig:
    try:
        return _HfConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {field}: {first['msg'].lower()}") from None


def _multipliers(hf: _HfConfig, family: Family, head_dim: int) -> dict[str, float]:
    """Fields of `ModelConfig` that are not one."""
    if family.has_multipliers:
        return {
            "attention_scale": hf.attention_multiplier,
            "embedding_scale": hf.embedding_multiplier,
            "residual_scale": hf.residual_multiplier,
            "logits_divisor": hf.logits_scaling,
        }
    query_scalar = hf.query_pre_attn_scalar if family.has_query_scalar else head_dim
    return {
        "attention_scale": query_scalar**-0.5,
        "embedding_scale": hf.hidden_size**0.5 if family.scales_embeddings else 1.0,
    }


def _blocks(
    hf: _HfConfig, family: Family, head_dim: int, reached: int, name: str
) -> tuple[LayerSpec, ...]:
    rope = _rope(hf, family, head_dim, name)
    local = _local_rope(hf, head_dim, name) if family.has_local_rope else rope
    is_rotated, slides = _rotated(hf, family, name), _slides(hf, family, name)
    window = hf.sliding_window
    if window is not None and window >= reached:
        window = None
    common = LayerSpec(
        norms=family.norms,
        qk_norm=family.qk_norm,
        rope=rope,
        softcap=hf.attn_logit_softcapping,
        activation=_activation(hf, family, name),
        has_qkv_bias=_given(family.has_qkv_bias, hf.attention_bias),
        has_output_bias=_given(family.has_output_bias, hf.attention_bias),
        has_mlp_bias=family.may_have_mlp_bias and hf.mlp_bias,
        is_stacked=family.is_stacked,
    )
    sliding = replace(common, rope=local, window_tokens=window)
    blocks = [sliding if each else common for each in slides]
    return tuple(
        each if rotates else replace(each, rope=None)
        for each, rotates in zip(blocks, is_rotated, strict=True)
    )


def _activation(hf: _HfConfig, family: Family, name: str) -> Activation:
    said = str(getattr(hf, family.activation_key))
    said = family.activations.get(said, said)
    _require(
        said in _ACTIVATIONS,
        f"{name}: activation {said!r} is not supported; kaiten computes " + ", ".join(_ACTIVATIONS),
    )
    return _ACTIVATIONS[said]


def _rotated(hf: _HfConfig, family: Family, name: str) -> list[bool]:
    """Of each layer, whether it knows positions."""
    count = hf.num_hidden_layers
    if not family.has_layers_without_rope:
        return [True] * count
    if hf.no_rope_layers is None:
        return [(layer + 1) % hf.no_rope_layer_interval != 0 for layer in range(count)]
    _require(
        len(hf.no_rope_layers) == count,
        f"{name}: no_rope_layers has {len(hf.no_rope_layers)} entries for {count} layers",
    )
    return [bool(each) for each in hf.no_rope_layers]


def _architecture(raw: dict[str, Any], name: str) -> str:
    kind = str(raw.get("model_type") or "nothing")
    given = raw.get("architectures") or [_ARCHITECTURES.get(kind, kind)]
    named = list(map(str, given)) if isinstance(given, list) else [str(given)]
    family = FAMILIES.get(named[0])
    if raw.get("auto_map") and not (family and family.may_name_code):
        raise ConfigError(
            f"{name} asks to run code from the checkpoint (auto_map), which kaiten never does; use "
            "a checkpoint in one of the built-in architectures: " + ", ".join(FAMILIES)
        )
    if len(named) != 1 or family is None:
        parts = f" ({PARTS_MISSING[named[0]]})" if named[0] in PARTS_MISSING else ""
        raise ConfigError(
            f"{name} names the architecture {', '.join(named)}, which is not one that kaiten "
            f"computes{parts}: " + ", ".join(FAMILIES)
        )
    return named[0]


def _refuse_unknown(hf: _HfConfig, family: Family, name: str) -> None:
    if hf.quantization_config is not None and not _scales_only_kv(hf.quantization_config):
        method = hf.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"{name}: the checkpoint is quantized ({method}), which kaiten cannot read; use the "
            "original checkpoint in bfloat16, float16 or float32"
        )
    softcaps = () if family.has_softcaps else _SOFTCAPS
    for key in (*softcaps, "use_bidirectional_attention"):
        _require(
            not getattr(hf, key),
            f"{name}: {key} is {getattr(hf, key)}, which is not supported in this family; only "
            "null or without it",
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


def _slides(hf: _HfConfig, family: Family, name: str) -> list[bool]:
    """Of each layer, whether it attends to a window only."""
    count, window = hf.num_hidden_layers, hf.sliding_window
    is_on = window is not None and (hf.use_sliding_window or not family.has_window_switch)
    typed = None if hf.layer_types is None else _typed_as_sliding(hf.layer_types, count, name)
    if not family.may_slide:
        slides = [False] * count
    elif typed is not None and family.has_layer_types:
        slides = typed
    elif family.has_window_pattern:
        slides = [(layer + 1) % hf.sliding_window_pattern != 0 for layer in range(count)]
    elif family.has_layers_without_rope:
        slides = [is_on and not rotates for rotates in _rotated(hf, family, name)]
    else:
        # The first `max_window_layers` layers see everything.
        first = (hf.max_window_layers or 0) if family.has_window_switch else 0
        slides = [is_on and layer >= first for layer in range(count)]
    of_family = "all slide, as sliding_window says" if any(slides) else "none slides"
    _require(
        typed in (None, slides),
        f"{name}: layer_types has sliding_attention for other layers than slide in this family, of "
        f"which {of_family}",
    )
    if any(slides):
        off = "use_sliding_window is false" if window is not None else "sliding_window is null"
        _require(
            is_on,
            f"{name}: layer {slides.index(True)} is a sliding one and {off}; say how many tokens "
            "it attends to, or that its layer_types are full_attention",
        )
        _require(
            window is not None and window >= 1,
            f"{name}: sliding_window {window} is not a number of tokens, at least 1",
        )
    return slides


def _typed_as_sliding(types: list[str], count: int, name: str) -> list[bool]:
    _require(
        len(types) == count, f"{name}: layer_types has {len(types)} entries for {count} layers"
    )
    unknown = [kind for kind in types if kind not in _SLIDES]
    _require(
        not unknown,
        f"{name}: layer_types has {', '.join(dict.fromkeys(unknown))}, which kaiten does not "
        f"compute; it computes {', '.join(_SLIDES)}",
    )
    return [_SLIDES[kind] for kind in types]


def _rope(hf: _HfConfig, family: Family, head_dim: int, name: str) -> RopeConfig:
    given = dict(hf.rope_parameters or hf.rope_scaling or {})
    if family.has_local_rope and isinstance(given.get("full_attention"), dict):
        given = dict(given["full_attention"])
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        value = getattr(hf, key)
        if value is not None:
            given.setdefault(key, value)
    kind = str(given.get("rope_type", given.get("type", "default")))
    given["rope_type"] = family.rope_kinds.get(kind, kind)
    rotary_dim = _rotary_dim(given.pop("partial_rotary_factor", 1.0), family, head_dim, name)
    return read_rope(
        given, rotary_dim=rotary_dim, positions_max=hf.max_position_embeddings, name=name
    )


def _local_rope(hf: _HfConfig, head_dim: int, name: str) -> RopeConfig:
    """Of sliding layers, where they have one of their own."""
    given = (hf.rope_parameters or {}).get("sliding_attention")
    given = {"rope_theta": hf.rope_local_base_freq} | (given if isinstance(given, dict) else {})
    return read_rope(
        given, rotary_dim=head_dim, positions_max=hf.max_position_embeddings, name=name
    )


def _rotary_dim(part: object, family: Family, head_dim: int, name: str) -> int:
    """How many elements of a head are rotated: the first."""
    if part in (None, 1):
        return head_dim
    if not family.may_rotate_partly:
        raise ConfigError(f"{name}: a partial rotary embedding is not supported in this family")
    rotary_dim = int(head_dim * part) if isinstance(part, int | float) and 0 < part < 1 else 0
    _require(
        rotary_dim > 0 and rotary_dim % 2 == 0,
        f"{name}: partial_rotary_factor {part} rotates {rotary_dim} of {head_dim} elements; "
        "rotary embedding needs pairs",
    )
    return rotary_dim


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
