"""What chat templates know from transformers and jinja2, and minijinja has otherwise."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

# Names a message's reasoning comes under; templates read the first, those of gpt-oss the second.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")


class TemplateRefused(Exception):
    """What a template's raise_exception raises."""


class WholeFloat:
    """2.0, which minijinja hands to filters as 2. Written and told as Python does it."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def raise_exception(message: object) -> None:
    raise TemplateRefused(str(message))


def strftime_now(format_: str) -> str:
    return datetime.now().astimezone().strftime(format_)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: no HTML escapes, and \\u escapes only if asked for."""
    item, colon = separators or (None, None)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(item, colon) if item is not None and colon is not None else None,
        sort_keys=sort_keys,
        default=_json_value,
    )


def _json_value(value: object) -> float:
    if isinstance(value, WholeFloat):
        return value.value
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)


def is_sequence(value: object) -> bool:
    """Texts and mappings are, too."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def is_number(value: object) -> bool:
    return isinstance(value, int | float | WholeFloat)


def is_float(value: object) -> bool:
    return isinstance(value, float | WholeFloat)


def as_templates_read(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning under each name that templates ask for."""
    told = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if told is None:
        return message
    return {"thinking": told, **message, "reasoning_content": told}


def with_whole_floats(value: Any) -> Any:
    """JSON in which no float looks like an integer: a copy of what holds anything but texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return WholeFloat(value) if value.is_integer() else value
    if isinstance(value, dict):
        if all(type(item) is str for item in value.values()):
            return value
        return {key: with_whole_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_whole_floats(item) for item in value]
    return value
