"""The longest context of a config.json: what a gateway lets in and a worker computes agree."""

import sys
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

# Families whose published length is that of the scaled rope, whatever its type.
_COUNTED: Final = ("gemma3", "phi3")
# Beyond every model, and what all that counts tokens can count.
_MAX: Final = 2**31 - 1
_FACTOR_MAX: Final = sys.float_info.max


def positions_max(config: Mapping[str, Any], published: int) -> int:
    """Tokens, of a model with a length `published` as `max_position_embeddings`, in [1, 2^31 - 1].

    Where rope is stretched the published length may be that before: by Qwen's recipe, yarn with
    factor 4 stands beside the length it was trained with. So yarn reaches its original length times
    its factor (or what is published, if that is more), `linear` the published one times the factor;
    with `llama3` and `longrope` it is the stretched one that is published. vLLM derives it alike,
    but for yarn it takes the product alone. Numbers that are none stretch nothing: who computes
    with them refuses them.
    """
    return int(max(1, min(_stretched(config, min(published, _MAX)), _MAX)))


def _stretched(config: Mapping[str, Any], published: int) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or str(config.get("model_type")).startswith(_COUNTED):
        return published
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor")
    original = (
        rope.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or published
    )
    if not _is_number(factor) or not _is_number(original):
        return published
    if kind == "yarn":
        return max(published, original * float(factor))
    return published * float(factor) if kind == "linear" else published


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and 0 < value <= _FACTOR_MAX
