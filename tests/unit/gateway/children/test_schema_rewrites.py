"""A rewritten schema is valid for what the schema is valid for: jsonschema is the oracle."""

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.children.schema_rewrites import rewritten

names = st.sampled_from(["a", "b", "ab", ""])
scalars = st.one_of(st.none(), st.booleans(), st.integers(-2, 4), names)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=5,
)
plain = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["string", "number", "object", "null"])),
    st.builds(lambda kinds: {"type": kinds}, st.just(["boolean", "array"])),
    st.builds(lambda value: {"const": value}, scalars),
    st.builds(lambda each: {"enum": each}, st.lists(scalars, min_size=1, max_size=3)),
    st.builds(lambda name, bound: {name: bound},
              st.sampled_from(["minimum", "exclusiveMaximum", "maxLength", "minItems"]),
              st.integers(0, 3)),
    st.builds(lambda each: {"required": each}, st.lists(names, max_size=2, unique=True)),
)  # fmt: skip
schemas = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.builds(lambda each: {"properties": each}, st.dictionaries(names, inner, max_size=2)),
        st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda each: {"oneOf": each}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"not": one}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, b: {"if": a, "else": b}, inner, inner),
        st.builds(lambda a, b: {"type": "object", "dependentSchemas": {a: b}}, names, inner),
        st.builds(lambda a, b: {"dependentRequired": {a: [b]}}, names, names),
        st.builds(lambda each: {"propertyNames": {"enum": each}}, st.lists(names, min_size=1)),
        st.builds(lambda least: {"propertyNames": {"minLength": least}}, st.integers(0, 2)),
        st.builds(lambda a, b: {"properties": {"a": a}, "unevaluatedProperties": b}, inner, inner),
        st.builds(lambda a, b: {"prefixItems": [a], "unevaluatedItems": b}, inner, inner),
        st.builds(lambda a, b, c: {"allOf": [a, b], "unevaluatedProperties": c}, *3 * [inner]),
        st.builds(lambda a, b, c: {"allOf": [a, b], "unevaluatedItems": c}, *3 * [inner]),
        st.builds(
            lambda a, b: {
                "properties": {"b": a},
                "$ref": "#/$defs/one",
                "unevaluatedProperties": b,
            },
            *2 * [inner],
        ),
        st.builds(
            lambda a, b: {"patternProperties": {"^a": a}, "unevaluatedProperties": b}, *2 * [inner]
        ),
    ),
    max_leaves=6,
)


def in_pythons_words(schema: str) -> Any:
    """Rust's regular expressions name characters otherwise."""
    named = re.compile(r"\\\\u\{([0-9a-f]+)\}")
    return json.loads(
        named.sub(lambda found: json.dumps(re.escape(chr(int(found[1], 16))))[1:-1], schema)
    )


definitions = st.one_of(
    st.builds(lambda each: {"properties": each}, st.dictionaries(names, plain, max_size=2)),
    st.builds(lambda each: {"prefixItems": each}, st.lists(plain, min_size=1, max_size=2)),
    st.just({"additionalProperties": {"type": "number"}}),
)


@settings(max_examples=600, deadline=None)
@given(schemas, definitions, st.lists(values, min_size=1, max_size=8))
def test_the_same_values_are_valid(schema: Any, definition: Any, instances: list[Any]) -> None:
    if isinstance(schema, dict):
        schema = schema | {"$defs": {"one": definition}}
    asked = json.dumps(schema)
    text = rewritten(asked) or asked
    assume('"unevaluated' not in text)  # it is refused
    meant, told = Draft202012Validator(schema), Draft202012Validator(in_pythons_words(text))
    for value in instances:
        assert told.is_valid(value) == meant.is_valid(value)


items = st.one_of(
    st.just({"type": "boolean"}),
    st.builds(lambda each: {"enum": each}, st.lists(scalars, min_size=1, max_size=6)),
    st.builds(lambda value: {"const": value}, scalars),
    st.just({"$ref": "#/$defs/one"}),
    st.just(True),
)
bounds = st.dictionaries(st.sampled_from(["minItems", "maxItems"]), st.integers(0, 3))
different = st.builds(
    lambda how, bound: {"uniqueItems": True} | how | bound,
    st.one_of(
        st.builds(lambda each: {"items": each}, items),
        st.builds(
            lambda each: {"prefixItems": each, "items": False},
            st.lists(items, min_size=1, max_size=3),
        ),
    ),
    bounds,
)
contained = st.builds(
    lambda matching, least, most, bound: {"contains": matching} | least | most | bound,
    plain,
    st.dictionaries(st.just("minContains"), st.sampled_from([0, 1, 2.0])),
    st.dictionaries(st.just("maxContains"), st.integers(0, 3)),
    bounds,
)
lists: st.SearchStrategy[list[Any]] = st.lists(
    st.one_of(scalars, st.just([]), st.just(1.0)), max_size=4
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(different, contained), st.lists(st.one_of(lists, scalars), max_size=8))
def test_of_arrays_some_orders_are_left_and_nothing_comes_in(
    schema: Any, instances: list[Any]
) -> None:
    schema = schema | {"$defs": {"one": {"title": "One", "enum": ["a", 1, True, None]}}}
    asked = json.dumps(schema)
    meant = Draft202012Validator(schema)
    told = Draft202012Validator(in_pythons_words(rewritten(asked) or asked))
    for value in instances:
        orders = itertools.permutations(value) if isinstance(value, list) else [value]
        ways = [list(each) if isinstance(value, list) else each for each in orders]
        are_valid = [meant.is_valid(way) for way in ways]
        are_told = [told.is_valid(way) for way in ways]
        assert all(valid for valid, is_told in zip(are_valid, are_told, strict=True) if is_told)
        assert any(are_told) == any(are_valid)


@pytest.mark.parametrize(
    ("schema", "instances"),
    [
        (
            {"items": {"enum": [*"abcdefgh"]}, "uniqueItems": True},
            {"[]": True, '["a", "h"]': True, '["h", "a"]': False, '["a", "a"]': False},
        ),
        (
            {"items": {"$ref": "#/$defs/tag"}, "uniqueItems": True,
             "$defs": {"tag": {"type": "string", "enum": ["a", "b"]}}},
            {'["b", "a"]': True, '["b", "b"]': False, '["c"]': False, "7": True},
        ),
        (
            {"contains": {"type": "number"}, "prefixItems": [{"type": "string"}]},
            {'["a", 1]': True, "[1]": False, "[]": False, '["a", "b", 1]': True},
        ),
        ({"maxItems": 1, "uniqueItems": True}, {"[[]]": True, "[1, 2]": False}),
    ],
)  # fmt: skip
def test_what_is_written_of_an_array(schema: Any, instances: dict[str, bool]) -> None:
    told = Draft202012Validator(json.loads(rewritten(json.dumps(schema)) or ""))
    assert {text: told.is_valid(json.loads(text)) for text in instances} == instances


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"items": {"type": "string"}, "uniqueItems": True},
        {"items": {"enum": [*"abcdefghij"]}, "uniqueItems": True},
        {"items": {"enum": ["a"], "minLength": 1}, "uniqueItems": True},
        {"prefixItems": [{"type": "boolean"}], "uniqueItems": True},
        {"contains": True, "minContains": 17},
        {"contains": True, "maxContains": 17},
        {"contains": True, "maxContains": 10**30},
        {"contains": True, "minContains": -1},
        {"contains": True, "minContains": 1e300, "maxContains": 1e300},
        {"contains": {"pattern": "a"}, "maxContains": 1},
        {"not": {"contains": True}},
        {"not": {"items": {"enum": [1, 2]}, "uniqueItems": True}},
        {"anyOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
        {"$ref": "#/$defs/none", "unevaluatedProperties": False},
        {"$id": "x:y", "$ref": "#/$defs/a", "$defs": {"a": True}, "unevaluatedItems": False},
        {"contains": {"pattern": "a"}, "maxContains": 2, "unevaluatedItems": False},
    ],
)
def test_what_cannot_be_said_of_arrays_stays(schema: Any) -> None:
    told = json.loads(rewritten(json.dumps(schema)) or json.dumps(schema))
    names = ("uniqueItems", "contains", "not", "unevaluatedProperties", "unevaluatedItems")
    assert {name for name in names if name in told} == {name for name in names if name in schema}


def test_a_text_is_told_from_its_beginnings_and_its_continuations() -> None:
    told = in_pythons_words(rewritten('{"not": {"const": "a]b"}}') or "")
    for text in ("", "a", "a]", "a]c", "a]bc", "b", "a]b\\n"):
        assert Draft202012Validator(told).is_valid(text)
    assert not Draft202012Validator(told).is_valid("a]b")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"not": {"type": "integer"}},
        {"if": {"const": [1]}, "then": {"type": "null"}},
        {"not": {"type": "nothing"}},
        {"not": {"minimum": True}},
        {"not": {"const": "x" * 101}},
        {"oneOf": [{"enum": [f"{index} {one}" for index in range(200)]} for one in range(8)]},
        {"oneOf": [{"items": True}, {"format": "date"}]},
        {"propertyNames": {"format": "date"}},
        {"dependentRequired": 3},
        {"propertyNames": {"enum": 3}},
    ],
)
def test_what_has_no_opposite_stays_to_be_refused_by_name(schema: Any) -> None:
    told = rewritten(json.dumps(schema))
    assert told is None or json.loads(told) == schema


def test_names_in_values_are_no_keywords() -> None:
    schema = {"const": {"not": {"type": "null"}}, "properties": {"if": {"enum": ["not"]}}}
    assert rewritten(json.dumps(schema)) is None
    assert rewritten('{"not": ') is None
    assert rewritten("[" * 50_000 + '"not"') is None
