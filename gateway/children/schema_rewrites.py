"""JSON Schema in fewer keywords: some that llguidance does not know, by those that it knows. Pure.

dependentRequired  {a: [b]}    no a, or b as well
dependentSchemas   {a: S}      no a, or S
if S, then T, else E           S and T, or not S and E
not S                          any keyword of S, turned round
oneOf [S, T]                   S and not T, or T and not S
propertyNames S                no other properties than those of such a pattern
unevaluatedProperties          additionalProperties, where no other schema has a say; as of items

Exact or not at all: what cannot be turned round stays, and is refused by its name.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.children import array_rewrites
from gateway.children.unevaluated import evaluate

# Of more, all pairs are too many.
_ONE_OF_MAX: Final = 8
# Another text's regex grows with the square of its length.
_TEXT_CHARS_MAX: Final = 100
# Opposites of opposites may double with every level.
_GROWN_CHARS_MAX: Final = 64 << 10
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
ONES: Final = (
    *("additionalProperties", "items", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
_SAY_NOTHING: Final = ("title", "description", "default", "examples", "$comment", "deprecated")
_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
# Each with its opposite, its type, and how far the opposite's value is from its own.
_BOUNDS: Final = {
    "minimum": ("exclusiveMaximum", "number", 0),
    "maximum": ("exclusiveMinimum", "number", 0),
    "exclusiveMinimum": ("maximum", "number", 0),
    "exclusiveMaximum": ("minimum", "number", 0),
    "minLength": ("maxLength", "string", -1),
    "maxLength": ("minLength", "string", 1),
    "minItems": ("maxItems", "array", -1),
    "maxItems": ("minItems", "array", 1),
    "minProperties": ("maxProperties", "object", -1),
    "maxProperties": ("minProperties", "object", 1),
}
# With true, in draft 4 and OpenAPI 3.0, they say how the other is meant.
_STRICT: Final = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
# Whole numbers, which JSON may write as 2.0.
_COUNTS: Final = {name for name, (_, _, by) in _BOUNDS.items() if by} | {
    *("minContains", "maxContains"),
}


class _Unsayable(Exception):
    """No schema is the opposite."""


def rewritten(schema: str) -> str | None:
    """The schema in fewer keywords; None: it has none of these, or is no JSON, or too large."""
    try:
        asked = json.loads(schema)
        # With identifiers in it, references are relative to another base than the document.
        root = None if '"$id"' in schema else asked
        same, told = json.dumps(asked), json.dumps(_rewrite(asked, root))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    is_too_large = len(told) > max(_GROWN_CHARS_MAX, len(schema))
    return None if told == same or is_too_large else told


def _rewrite(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    told = {name: _inside(name, value, root) for name, value in schema.items()}
    for name in _COUNTS & told.keys():
        if isinstance(told[name], float) and told[name].is_integer():
            told[name] = int(told[name])
    for strict, bound in _STRICT.items():
        if isinstance(told.get(strict), bool) and told.pop(strict) and bound in told:
            told[strict] = told.pop(bound)
    evaluate(told, schema, root)
    more = [
        *_contained(told),
        *array_rewrites.different(told, root),
        *_dependents(told),
        *_condition(told),
        *_opposite_of(told),
        *_one_of(told),
        *_property_names(told),
    ]
    if more:
        own = told.get("allOf", [])
        told["allOf"] = [*own, *more] if isinstance(own, list) else own
    return told


def _inside(name: str, value: Any, root: Any) -> Any:
    """A keyword's value, the schemas in it rewritten."""
    if name in MAPS and isinstance(value, dict):
        return {key: _rewrite(each, root) for key, each in value.items()}
    if name in LISTS and isinstance(value, list):
        return [_rewrite(each, root) for each in value]
    return _rewrite(value, root) if name in ONES else value


def _contained(told: dict[str, Any]) -> list[Any]:
    try:
        return array_rewrites.contained(told, _negated)
    except _Unsayable:
        return []


def _dependents(told: dict[str, Any]) -> list[Any]:
    needs = [(name, {"required": list(value)}) for name, value in _taken(told, "dependentRequired")]
    needs += _taken(told, "dependentSchemas")
    return [
        {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, need]}]}
        for name, need in needs
    ]


def _taken(told: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    value = told.get(name)
    return list(told.pop(name).items()) if isinstance(value, dict) else []


def _condition(told: dict[str, Any]) -> list[Any]:
    if "if" not in told or not ("then" in told or "else" in told):
        # One without the other says nothing.
        for name in ("if", "then", "else"):
            told.pop(name, None)
        return []
    try:
        opposite = _negated(told["if"])
    except _Unsayable:
        return []
    asked, then, other = told.pop("if"), told.pop("then", True), told.pop("else", True)
    return [{"anyOf": [{"allOf": [asked, then]}, {"allOf": [opposite, other]}]}]


def _opposite_of(told: dict[str, Any]) -> list[Any]:
    if "not" not in told:
        return []
    try:
        opposite = _negated(told["not"])
    except _Unsayable:
        return []
    del told["not"]
    return [opposite]


def _one_of(told: dict[str, Any]) -> list[Any]:
    schemas = told.get("oneOf")
    if not isinstance(schemas, list) or not 1 <= len(schemas) <= _ONE_OF_MAX:
        return []
    try:
        opposites = [_negated(schema) for schema in schemas]
    except _Unsayable:
        return []
    del told["oneOf"]
    return [
        {
            "anyOf": [
                {"allOf": [schema, *opposites[:index], *opposites[index + 1 :]]}
                for index, schema in enumerate(schemas)
            ]
        }
    ]


def _property_names(told: dict[str, Any]) -> list[Any]:
    schema = told.get("propertyNames")
    if isinstance(schema, bool):
        del told["propertyNames"]
        return [] if schema else [{"maxProperties": 0}]
    if not isinstance(schema, dict):
        return []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    names = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if set(schema) - {*_SAY_NOTHING, "type", "pattern", "enum", "const", "minLength", "maxLength"}:
        return []
    if schema.get("type", "string") != "string":
        return []
    del told["propertyNames"]
    ways: list[dict[str, Any]] = []
    if "pattern" in schema:
        ways.append({"patternProperties": {schema["pattern"]: True}})
    if least or most != "":
        ways.append({"patternProperties": {rf"^[\s\S]{{{least},{most}}}$": True}})
    if names is not None:
        ways.append({"properties": {name: True for name in names if isinstance(name, str)}})
    return [{**way, "additionalProperties": False} for way in ways]


def _negated(schema: Any) -> Any:
    """_Unsayable: no schema says it."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise _Unsayable
    ways: list[Any] = []
    for name, value in schema.items():
        if name in _SAY_NOTHING:
            continue
        if name in _BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
            opposite, kind, by = _BOUNDS[name]
            if by == 0 or value + by >= 0:
                ways.append({"type": kind, opposite: value + by})
            continue
        if name not in _NEGATIONS:
            raise _Unsayable
        try:
            ways += _NEGATIONS[name](value)
        except (TypeError, AttributeError, KeyError) as error:
            raise _Unsayable from error
    return {"anyOf": ways} if ways else False


def _other_types(value: Any) -> list[Any]:
    kinds = {value} if isinstance(value, str) else set(value)
    if ("integer" in kinds and "number" not in kinds) or kinds - {*_TYPES, "integer"}:
        raise _Unsayable
    others = [kind for kind in _TYPES if kind not in kinds]
    return [{"type": others}] if others else []


def _other_values(values: Any) -> list[Any]:
    """Of an enum."""
    texts = [each for each in values if isinstance(each, str)]
    flags = [each for each in values if isinstance(each, bool)]
    numbers = [each for each in values if isinstance(each, int | float) and each not in flags]
    if any(len(text) > _TEXT_CHARS_MAX for text in texts):
        raise _Unsayable
    if len(texts) + len(flags) + len(numbers) + values.count(None) < len(values):
        # Arrays and objects, or 1 beside true.
        raise _Unsayable
    kinds = {"string": texts, "boolean": flags, "number": numbers, "null": values.count(None)}
    ways: list[Any] = [{"type": [kind for kind in _TYPES if not kinds.get(kind)]}]
    if texts:
        ways.append({"allOf": [{"type": "string", "pattern": _other_text(each)} for each in texts]})
    if len(set(flags)) == 1:
        ways.append({"const": not flags[0]})
    if numbers:
        sides = (("exclusiveMaximum", "exclusiveMinimum") for _ in numbers)
        ways.append({"allOf": [
            {"anyOf": [{"type": "number", side: number} for side in both]}
            for number, both in zip(numbers, sides, strict=True)
        ]})  # fmt: skip
    return ways


def _other_text(text: str) -> str:
    """A regex of every text but this one: they part at some character, or one goes on."""
    codes = [rf"\u{{{ord(character):x}}}" for character in text]
    parts = [rf"{''.join(codes[:at])}([^{code}][\s\S]*)?" for at, code in enumerate(codes)]
    whole = "|".join([*parts, "".join(codes) + r"[\s\S]+"])
    return f"^({whole})$"


_NEGATIONS: Final[Mapping[str, Callable[[Any], list[Any]]]] = {
    "type": _other_types,
    "enum": _other_values,
    "const": lambda value: _other_values([value]),
    "required": lambda names: [
        {"type": "object", "properties": {name: False}} for name in names
    ],
    "properties": lambda each: [
        {"type": "object", "required": [name], "properties": {name: _negated(schema)}}
        for name, schema in each.items()
    ],
    "allOf": lambda each: [_negated(schema) for schema in each],
    "anyOf": lambda each: [{"allOf": [_negated(schema) for schema in each]}],
    "not": lambda schema: [schema],
}  # fmt: skip
