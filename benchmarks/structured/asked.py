"""What is asked of the models: JSON Schemas by the feature they are about, and other constraints.

Each schema has both answers that fit and answers that do not. Draft 2020-12.
"""

import json
from typing import Any, Final

_NODE: Final = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
_TREE: Final = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "n": {"enum": ["a", "b"]},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["n", "kids"],
            "additionalProperties": False,
        }
    },
}
_EXPRESSION: Final = {
    "$ref": "#/$defs/e",
    "$defs": {
        "e": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"$ref": "#/$defs/op"}]},
        "op": {
            "type": "array",
            "prefixItems": [{"enum": ["+", "-"]}, {"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}],
            "items": False,
            "minItems": 3,
        },
    },
}


def _object(required: Any = None, *, open_: Any = False, **properties: Any) -> Any:
    told: dict[str, Any] = {"type": "object", "properties": properties}
    told["required"] = list(properties) if required is None else required
    if open_ is not None:
        told["additionalProperties"] = open_
    return told


def _array(items: Any, least: int = 0, most: int = 4) -> Any:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(least: int = 0, most: int = 12, **more: Any) -> Any:
    return {"type": "string", "minLength": least, "maxLength": most, **more}


def _deep(levels: int) -> Any:
    told: Any = {"type": "boolean"}
    for level in range(levels):
        told = _object(**{f"l{level}": told}) if level % 2 else _array(told, 1, 2)
    return told


_DIGIT: Final = {"type": "integer", "minimum": 0, "maximum": 9}
_TOOLS: Final = {
    "anyOf": [
        _object(name={"const": "search"}, arguments=_object(query=_text(1), limit=_DIGIT)),
        _object(name={"const": "open"}, arguments=_object(path=_text(1, pattern=r"^/[a-z/]+$"))),
        _object(name={"const": "stop"}, arguments={"type": "object", "maxProperties": 0}),
    ]
}
SCHEMAS: Final[dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "boolean_schema": _object(anything=True, number={"type": "integer"}),
    "true_items": _array(True, 1, 3),
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "integer_bounds": {"type": "integer", "minimum": -17, "maximum": 2043},
    "integer_exclusive": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 101},
    "integer_least": {"type": "integer", "minimum": 1000},
    "integer_most": {"type": "integer", "maximum": -5},
    "number_bounds": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "number_exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number_least": {"type": "number", "minimum": 0.1},
    "multiple_of": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "multiple_of_tenth": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 99},
    "string": {"type": "string"},
    "string_length": _text(3, 9),
    "string_exact": _text(5, 5),
    "string_empty": _text(0, 0),
    "string_pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    "string_pattern_inside": {"type": "string", "pattern": "ab+c"},
    "string_pattern_unicode": {"type": "string", "pattern": "^[à-ÿ日本]{2,5}$"},
    "string_pattern_quotes": {"type": "string", "pattern": '^["\\\\/\\n]{1,4}$'},
    "string_pattern_length": {"type": "string", "pattern": "^[a-z ]+$", "maxLength": 8},
    "enum_strings": {"enum": ["fox", "dog", "café", ""]},
    "enum_mixed": {"enum": [None, True, 3, -2.5, "x", [1, 2], {"a": [None]}]},
    "enum_escapes": {
        "enum": ['say "hi"', "back\\slash", "tab\there", "line\nbreak", "\u0001", "/"]
    },
    "enum_unicode": {"enum": ["日本語", "русский", "😀😎", "e\u0301", "\u2028"]},
    "const_text": {"const": "only this"},
    "const_object": {"const": {"a": 1, "b": ["x", {"c": None}]}},
    "const_number": {"const": 12.5},
    "object_closed": _object(a=_DIGIT, b={"type": "boolean"}),
    "object_optional": _object(["b"], a=_DIGIT, b={"type": "boolean"}, c={"type": "null"}),
    "object_all_optional": _object([], a=_DIGIT, b=_DIGIT, c=_DIGIT),
    "object_open": _object(["a"], open_=None, a=_DIGIT),
    "object_extra_schema": _object(["a"], open_={"type": "boolean"}, a=_DIGIT),
    "object_map": {"type": "object", "additionalProperties": _array(_DIGIT, 0, 2)},
    "object_empty": {"type": "object", "additionalProperties": False},
    "object_count": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    "object_pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "required_unknown": {"type": "object", "required": ["k"], "additionalProperties": _DIGIT},
    "names_unicode": _object(**{"naïve": _DIGIT, "日本": _DIGIT, "😀": {"type": "null"}}),
    "names_escaped": _object(**{'a"b': _DIGIT, "c\\d": _DIGIT, "e\nf": _DIGIT, "": _DIGIT}),
    "names_spaces": _object(**{" lead": _DIGIT, "trail ": _DIGIT, "in side": _DIGIT}),
    "array": _array(_DIGIT),
    "array_least": _array({"type": "boolean"}, 3, 6),
    "array_exact": _array({"enum": ["a", "b"]}, 4, 4),
    "array_empty": _array(_DIGIT, 0, 0),
    "array_of_arrays": _array(_array(_DIGIT, 1, 2), 1, 3),
    "tuple": {
        "type": "array",
        "prefixItems": [_DIGIT, {"type": "boolean"}, _text()],
        "items": False,
        "minItems": 3,
    },
    "tuple_open": {
        "type": "array",
        "prefixItems": [{"const": "x"}],
        "items": _DIGIT,
        "maxItems": 4,
    },
    "tuple_short": {
        "type": "array",
        "prefixItems": [_DIGIT, _DIGIT, _DIGIT],
        "minItems": 1,
        "maxItems": 2,
    },
    "type_list": {"type": ["integer", "null", "boolean"]},
    "type_list_object": {"type": ["object", "null"], "properties": {"a": _DIGIT}},
    "no_type": {"properties": {"a": _DIGIT}, "maxLength": 4, "maximum": 10, "maxItems": 2},
    "any_of": {"anyOf": [_DIGIT, _text(), {"type": "null"}]},
    "any_of_objects": _TOOLS,
    "any_of_beside": {
        "type": "object",
        "properties": {"k": _DIGIT},
        "anyOf": [{"required": ["k"]}, {"properties": {"m": {"type": "null"}}, "required": ["m"]}],
    },
    "one_of": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "one_of_const": {"oneOf": [_object(t={"const": name}, v=_DIGIT) for name in "abc"]},
    "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
    "all_of_objects": {
        "allOf": [
            {"type": "object", "properties": {"a": _DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"b": _text()}, "required": ["b"]},
        ]
    },
    "all_of_strings": {"allOf": [{"type": "string", "pattern": "^[a-f]+$"}, {"maxLength": 5}]},
    "ref": {"$defs": {"d": _DIGIT}, "type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3},
    "ref_beside": {
        "$defs": {"d": {"type": "integer"}},
        "$ref": "#/$defs/d",
        "minimum": 5,
        "maximum": 8,
    },
    "ref_escaped": {"$defs": {"a/b~c": _DIGIT}, "$ref": "#/$defs/a~1b~0c"},
    "ref_list": _NODE,
    "ref_tree": _TREE,
    "ref_expression": _EXPRESSION,
    "format_date": {"type": "string", "format": "date"},
    "format_date_time": {"type": "string", "format": "date-time"},
    "format_time": {"type": "string", "format": "time"},
    "format_duration": {"type": "string", "format": "duration"},
    "format_uuid": {"type": "string", "format": "uuid"},
    "format_ipv4": {"type": "string", "format": "ipv4"},
    "format_ipv6": {"type": "string", "format": "ipv6"},
    "format_email": {"type": "string", "format": "email"},
    "format_hostname": {"type": "string", "format": "hostname"},
    "format_uri": {"type": "string", "format": "uri"},
    "if": {
        **_object(kind={"enum": ["text", "none", "café"]}, value={"anyOf": [_text(), _DIGIT]}),
        "if": {"properties": {"kind": {"const": "text"}}},
        "then": {"properties": {"value": {"type": "string"}}},
        "else": {"properties": {"value": {"type": "integer"}}},
    },
    "not": {"type": ["integer", "null", "boolean"], "not": {"enum": [True, None]}},
    "not_texts": {"type": "string", "maxLength": 4, "not": {"enum": ["a", "ab", ""]}},
    "one_of_overlapping": {
        "type": "string",
        "oneOf": [{"maxLength": 3}, {"minLength": 2, "maxLength": 6}],
    },
    "dependent_required": {
        **_object([], a=_DIGIT, b=_DIGIT, c=_DIGIT),
        "dependentRequired": {"a": ["b"], "b": ["c"]},
    },
    "dependent_schemas": {
        **_object([], a=_DIGIT, b={"type": ["integer", "null"]}),
        "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}, "required": ["b"]}},
    },
    "property_names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{1,2}$"},
        "additionalProperties": _DIGIT,
        "maxProperties": 3,
    },
    "contains": {**_array(_DIGIT), "contains": {"minimum": 7}},
    "contains_between": {
        **_array({"type": ["integer", "null"], "maximum": 9, "minimum": 0}),
        "contains": {"type": "null"},
        "minContains": 1,
        "maxContains": 2.0,
    },
    "unique": {**_array({"enum": ["a", "b", 3, None]}), "uniqueItems": True},
    "unique_of_references": {
        "$defs": {"tag": {"type": "string", "enum": [*"abcdefgh"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/tag"},
        "uniqueItems": True,
        "minItems": 1,
    },
    "unevaluated_of_several": {
        "$defs": {"base": {"type": "object", "properties": {"a": _DIGIT}, "required": ["a"]}},
        "$ref": "#/$defs/base",
        "allOf": [{"properties": {"b": _text()}}],
        "properties": {"c": {"type": "null"}},
        "unevaluatedProperties": False,
    },
    "unevaluated_items": {
        "type": "array",
        "allOf": [{"prefixItems": [_DIGIT, {"type": "null"}]}],
        "unevaluatedItems": {"const": "x"},
        "maxItems": 4,
    },
    "unevaluated": {"type": "object", "properties": {"a": _DIGIT}, "unevaluatedProperties": False},
    "annotations": {"title": "T", "description": "D", "default": 1, "examples": [2], **_DIGIT},
    "deep": _deep(12),
    "wide": _object(**{f"field_{index}": {"type": "boolean"} for index in range(40)}),
    "wide_optional": _object([], **{f"f{index}": {"type": "null"} for index in range(60)}),
    "wide_enum": {"enum": [f"value {index * 37}" for index in range(300)]},
    "record": _object(
        id={"type": "integer", "minimum": 1},
        name=_text(1, 20),
        tags=_array(_text(1, 6), 0, 3),
        place=_object(lat={"type": "number"}, lon={"type": "number"}),
        note={"anyOf": [{"type": "null"}, _text()]},
    ),
}
REGEXES: Final = {
    "digits": "[0-9]{3,8}",
    "words": "(fox|dog|cat)(, (fox|dog|cat)){0,4}",
    "spaced": " [a-z]{2,6} [a-z]{2,6} ",
    "any_text": ".{4,20}",
    "unicode": "[日本語テキストé]{2,6}",
    "classes": r"\d{2}:\d{2}\.[0-9a-f]+",
    "lines": "(a+\n){1,3}",
    "optional": "-?(0|[1-9][0-9]*)(\\.[0-9]+)?",
    "negated": '[^a-z"]{3,6}',
    "empty_too": "(ab)*",
}
CHOICES: Final = {
    "labels": ["positive", "negative", "neutral"],
    "prefixes": ["a", "ab", "abc", "abcd"],
    "spaces": [" lead", "trail ", "  ", " in side "],
    "escapes": ['"quoted"', "back\\slash", "line\nbreak", "tab\t", "{json: 1}"],
    "unicode": ["日本語", "café", "😀", "👩‍👩‍👧‍👦", "русский"],
    "many": [f"choice number {index}" for index in range(200)],
}
# Each with a regex of the same language.
GRAMMARS: Final = {
    "lark": ('start: item ("," item)* ";"\nitem: /[a-z]{1,5}/ | NUMBER\nNUMBER: /[0-9]+/\n',
             "([a-z]{1,5}|[0-9]+)(,([a-z]{1,5}|[0-9]+))*;"),
    "lark_space": ('start: " " WORD "."\nWORD: /[a-z]{2,4}/\n', r" [a-z]{2,4}\."),
    "gbnf": ('root ::= "say " word ("!" | "?")\nword ::= [a-z]+ [0-9]?\n', r"say [a-z]+[0-9]?[!?]"),
    "gbnf_unicode": ('root ::= [à-ÿ]+ " = " ("日本" | "x")\n', "[à-ÿ]+ = (日本|x)"),
}  # fmt: skip
# More than 8,000 tokens, and right.
LONG: Final = _array({"type": "integer", "minimum": 0, "maximum": 99999999}, 3000, 3000)


def constraints() -> list[tuple[str, dict[str, Any], Any]]:
    """Name, what the gateway's compiler is asked, and what an answer is checked by."""
    asked: list[tuple[str, dict[str, Any], Any]] = []
    for index, (name, schema) in enumerate(SCHEMAS.items()):
        question = {"form": "json", "value": json.dumps(schema), "is_tight": index % 2 == 0}
        asked.append((name, question, schema))
    asked.append(("json_object", _question("json_object", True), {"type": "object"}))
    asked += [(f"regex {name}", _question("regex", told), told) for name, told in REGEXES.items()]
    asked += [(f"choice {name}", _question("choice", told), told) for name, told in CHOICES.items()]
    for name, (grammar, regex) in GRAMMARS.items():
        asked.append((f"grammar {name}", _question("grammar", grammar), regex))
    return asked


def _question(form: str, value: Any) -> dict[str, Any]:
    return {"form": form, "value": value, "is_tight": False}
