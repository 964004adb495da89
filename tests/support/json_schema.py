"""As much of JSON schema as the OpenAPI document needs, read from its text alone."""

import re
from collections.abc import Mapping
from typing import Any, Final

Schema = Mapping[str, Any]
TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
# Words that say nothing about a value.
SILENT: Final = {"title", "description", "default", "else", "discriminator"}


def is_valid(document: Schema, schema: Schema | bool, value: Any) -> bool:
    """Whether the schema allows the value. A word it does not know is a KeyError, not a yes."""
    if isinstance(schema, bool):
        return schema
    return all(
        KEYWORDS[word](document, schema, value) for word in schema if word not in SILENT | {"then"}
    )


def resolved(document: Schema, schema: Schema) -> Schema:
    """What a reference stands for."""
    if "$ref" not in schema:
        return schema
    found: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def has_type(value: Any, name: str) -> bool:
    """JSON's types: true is no number."""
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name])


def _ref(document: Schema, schema: Schema, value: Any) -> bool:
    return is_valid(document, resolved(document, schema), value)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _any_of(document: Schema, schema: Schema, value: Any) -> bool:
    return any(is_valid(document, each, value) for each in schema["anyOf"])


def _one_of(document: Schema, schema: Schema, value: Any) -> bool:
    return sum(is_valid(document, each, value) for each in schema["oneOf"]) == 1


def _all_of(document: Schema, schema: Schema, value: Any) -> bool:
    return all(is_valid(document, each, value) for each in schema["allOf"])


def _not(document: Schema, schema: Schema, value: Any) -> bool:
    return not is_valid(document, schema["not"], value)


def _if(document: Schema, schema: Schema, value: Any) -> bool:
    return not is_valid(document, schema["if"], value) or is_valid(document, schema["then"], value)


def _items(document: Schema, schema: Schema, value: Any) -> bool:
    return not isinstance(value, list) or all(
        is_valid(document, schema["items"], each) for each in value
    )


def _properties(document: Schema, schema: Schema, value: Any) -> bool:
    return not isinstance(value, dict) or all(
        is_valid(document, inner, value[name])
        for name, inner in schema["properties"].items()
        if name in value
    )


def _required(_document: Schema, schema: Schema, value: Any) -> bool:
    return not isinstance(value, dict) or value.keys() >= set(schema["required"])


def _additional(document: Schema, schema: Schema, value: Any) -> bool:
    if not isinstance(value, dict):
        return True
    others = [value[name] for name in value if name not in schema.get("properties", ())]
    inner = schema["additionalProperties"]
    return not others if inner is False else all(is_valid(document, inner, each) for each in others)


def _names(document: Schema, schema: Schema, value: Any) -> bool:
    return not isinstance(value, dict) or all(
        is_valid(document, schema["propertyNames"], name) for name in value
    )


def _pattern(_document: Schema, schema: Schema, value: Any) -> bool:
    # Python's $ lets a newline follow, JSON schema's does not.
    pattern = schema["pattern"].replace("$", r"\Z")
    return not isinstance(value, str) or re.search(pattern, value) is not None


def _number(value: Any) -> bool:
    return has_type(value, "number")


KEYWORDS: Final[Mapping[str, Any]] = {
    "$ref": _ref,
    "type": lambda _, s, v: has_type(v, s["type"]),
    "const": lambda _, s, v: _same(v, s["const"]),
    "enum": lambda _, s, v: any(_same(v, each) for each in s["enum"]),
    "minimum": lambda _, s, v: not _number(v) or v >= s["minimum"],
    "maximum": lambda _, s, v: not _number(v) or v <= s["maximum"],
    "exclusiveMinimum": lambda _, s, v: not _number(v) or v > s["exclusiveMinimum"],
    "minLength": lambda _, s, v: not isinstance(v, str) or len(v) >= s["minLength"],
    "maxLength": lambda _, s, v: not isinstance(v, str) or len(v) <= s["maxLength"],
    "minItems": lambda _, s, v: not isinstance(v, list) or len(v) >= s["minItems"],
    "maxItems": lambda _, s, v: not isinstance(v, list) or len(v) <= s["maxItems"],
    "maxProperties": lambda _, s, v: not isinstance(v, dict) or len(v) <= s["maxProperties"],
    "pattern": _pattern,
    "items": _items,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "allOf": _all_of,
    "not": _not,
    "if": _if,
}
