"""Rotary position frequencies from a config's rope parameters, in either spelling.

`inverse_frequencies` computes in float32 in the same order as the published definitions, so that
angles agree to the last bit with the checkpoints' own training code.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from service_kit.errors import ConfigError

_THETA_DEFAULT: Final = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    kind: str
    theta: float
    rotary_dim: int
    # 1 for the default kind.
    factor: float = 1.0
    positions_original: int = 0
    # llama3
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    # longrope: one of two sets divides the frequencies, [rotary_dim / 2] each.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    # Times the cosines and sines.
    attention_scale: float = 1.0

    def for_context(self, tokens: int) -> "RopeConfig":
        """With the factors for rows of up to so many tokens.

        One set for all rows: keys that are cached must not turn when a row grows long.
        """
        if self.kind != "longrope":
            return self
        return replace(self, is_long=tokens > self.positions_original)


def read_rope(
    given: Mapping[str, Any], *, rotary_dim: int, positions_max: int, name: str
) -> RopeConfig:
    """From `rope_parameters`, or `rope_scaling` with `rope_theta` put beside it."""
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"{name}: rope parameters per layer type are not supported")
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in _FREQUENCIES:
        raise ConfigError(
            f"{name}: rope type {kind!r} is not supported ({_hint(kind)}); kaiten computes "
            + ", ".join(_FREQUENCIES)
        )
    _refuse_unknown(given, kind, name)
    try:
        rope = _READERS[kind](given, rotary_dim, positions_max)
        _check(rope)
    except KeyError as error:
        raise ConfigError(f"{name}: rope type {kind!r} needs {error.args[0]!r}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{name}: rope parameters of type {kind!r}: {error}") from error
    return rope


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] float32."""
    return _FREQUENCIES[rope.kind](rope)


def _refuse_unknown(given: Mapping[str, Any], kind: str, name: str) -> None:
    """What is null says nothing; nor does a factor of 1."""
    read = _READ_EVERYWHERE | _READ[kind]
    unknown = [key for key, value in given.items() if key not in read and value is not None]
    if unknown and not (unknown == ["factor"] and given["factor"] == 1):
        raise ConfigError(
            f"{name}: rope parameters of type {kind!r} have {', '.join(map(str, unknown))}, which "
            "kaiten does not compute"
        )


def _check(rope: RopeConfig) -> None:
    """ValueError says which number is none, or cannot be."""
    numbers = {
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "attention_factor": rope.attention_scale,
        "low_freq_factor": rope.low_frequency_factor,
        "high_freq_factor": rope.high_frequency_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "original_max_position_embeddings": rope.positions_original or 1,
    }
    for key, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{key} must be a number > 0, not {number}")
    if rope.kind == "yarn" and rope.theta == 1:
        raise ValueError("rope_theta must not be 1")
    if not inverse_frequencies(rope).isfinite().all():
        raise ValueError("some frequency is not a number")


def _hint(kind: str) -> str:
    if kind == "dynamic":
        return "its angles depend on the length reached, so cached keys would be wrong"
    return "no such kind is known here"


def _read_default(given: Mapping[str, Any], rotary_dim: int, _positions_max: int) -> RopeConfig:
    return RopeConfig(kind="default", theta=_theta(given), rotary_dim=rotary_dim)


def _read_linear(given: Mapping[str, Any], rotary_dim: int, _positions_max: int) -> RopeConfig:
    return RopeConfig(
        kind="linear", theta=_theta(given), rotary_dim=rotary_dim, factor=float(given["factor"])
    )


def _read_llama3(given: Mapping[str, Any], rotary_dim: int, positions_max: int) -> RopeConfig:
    return RopeConfig(
        kind="llama3",
        theta=_theta(given),
        rotary_dim=rotary_dim,
        factor=float(given["factor"]),
        positions_original=_original(given, positions_max),
        low_frequency_factor=float(given["low_freq_factor"]),
        high_frequency_factor=float(given["high_freq_factor"]),
    )


def _read_yarn(given: Mapping[str, Any], rotary_dim: int, positions_max: int) -> RopeConfig:
    original = _original(given, positions_max)
    factor = given.get("factor")
    factor = positions_max / original if factor is None else float(factor)
    return RopeConfig(
        kind="yarn",
        theta=_theta(given),
        rotary_dim=rotary_dim,
        factor=factor,
        positions_original=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        is_truncated=bool(given.get("truncate", True)),
        attention_scale=_yarn_scale(given, factor),
    )


def _read_longrope(given: Mapping[str, Any], rotary_dim: int, positions_max: int) -> RopeConfig:
    original = _original(given, positions_max)
    factor = float(given.get("factor") or positions_max / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = [tuple(map(float, given[f"{name}_factor"])) for name in ("short", "long")]
    for each in factors:
        if len(each) != rotary_dim // 2:
            raise ValueError(f"{len(each)} factors, where {rotary_dim // 2} pairs are rotated")
        if not all(0 < factor < math.inf for factor in each):
            raise ValueError("a factor is a number > 0")
    return RopeConfig(
        kind="longrope",
        theta=_theta(given),
        rotary_dim=rotary_dim,
        positions_original=original,
        short_factors=factors[0],
        long_factors=factors[1],
        attention_scale=float(given.get("attention_factor") or scale),
    ).for_context(positions_max)


def _theta(given: Mapping[str, Any]) -> float:
    return float(given.get("rope_theta", _THETA_DEFAULT))


def _original(given: Mapping[str, Any], positions_max: int) -> int:
    return int(given.get("original_max_position_embeddings") or positions_max)


def _yarn_scale(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all:
        return _magnitude(factor, float(mscale)) / _magnitude(factor, float(mscale_all))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _default(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (rope.theta**exponents)


def _linear(rope: RopeConfig) -> Tensor:
    return _default(rope) / rope.factor


def _llama3(rope: RopeConfig) -> Tensor:
    """Short waves stay, long ones are stretched by the factor, those between are blended."""
    plain = _default(rope)
    wave = 2 * math.pi / plain
    low_wave = rope.positions_original / rope.low_frequency_factor
    high_wave = rope.positions_original / rope.high_frequency_factor
    stretched = torch.where(wave > low_wave, plain / rope.factor, plain)
    span = rope.high_frequency_factor - rope.low_frequency_factor
    smooth = (rope.positions_original / wave - rope.low_frequency_factor) / span
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    return torch.where((wave >= high_wave) & (wave <= low_wave), blended, stretched)


def _yarn(rope: RopeConfig) -> Tensor:
    """A ramp over the dimensions from the plain frequencies to the stretched ones."""
    powers = rope.theta ** (torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim)
    plain, stretched = 1.0 / powers, 1.0 / (rope.factor * powers)
    low, high = _yarn_dimension(rope, rope.beta_fast), _yarn_dimension(rope, rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # Equal ends would divide by zero.
    span = high - low or 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2).float() - low) / span).clamp(0, 1)
    keep = 1 - ramp
    return stretched * (1 - keep) + plain * keep


def _yarn_dimension(rope: RopeConfig, rotations: float) -> float:
    """The dimension whose wave turns this many times over the original positions."""
    turns = math.log(rope.positions_original / (rotations * 2 * math.pi))
    return rope.rotary_dim * turns / (2 * math.log(rope.theta))


def _longrope(rope: RopeConfig) -> Tensor:
    factors = torch.tensor(rope.long_factors if rope.is_long else rope.short_factors)
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (factors * rope.theta**exponents)


_READERS: Final[dict[str, Callable[[Mapping[str, Any], int, int], RopeConfig]]] = {
    "default": _read_default,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
    "yarn": _read_yarn,
}
# What the readers read, besides `type` and what every kind may have.
_READ: Final[dict[str, set[str]]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        # Whether the checkpoint was trained so.
        "finetuned",
    },
}
_READ_EVERYWHERE: Final = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
_FREQUENCIES: Final[dict[str, Callable[[RopeConfig], Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
