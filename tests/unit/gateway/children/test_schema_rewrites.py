"""A rewritten schema is valid for what the schema is valid for: jsonschema is the oracle."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
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
    ),
    max_leaves=6,
)


def in_pythons_words(schema: str) -> Any:
    """Rust's regular expressions name characters otherwise."""
    named = re.compile(r"\\\\u\{([0-9a-f]+)\}")
    return json.loads(
        named.sub(lambda found: json.dumps(re.escape(chr(int(found[1], 16))))[1:-1], schema)
    )


@settings(max_examples=400, deadline=None)
@given(schemas, st.lists(values, min_size=1, max_size=8))
def test_the_same_values_are_valid(schema: Any, instances: list[Any]) -> None:
    asked = json.dumps(schema)
    told = Draft202012Validator(in_pythons_words(rewritten(asked) or asked))
    for value in instances:
        assert told.is_valid(value) == Draft202012Validator(schema).is_valid(value)


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
        {"not": {"const": "x" * 101}},
        {"oneOf": [{"enum": [f"{index} {one}" for index in range(200)]} for one in range(8)]},
        {"oneOf": [{"items": True}, {"format": "date"}]},
        {"propertyNames": {"format": "date"}},
        {"allOf": [True], "unevaluatedProperties": False},
        {"dependentRequired": 3},
        {"propertyNames": {"enum": 3}},
    ],
)
def test_what_has_no_opposite_stays_to_be_refused_by_name(schema: Any) -> None:
    told = rewritten(json.dumps(schema))
    assert told is None or json.loads(told) == schema


def test_names_in_values_are_no_keywords() -> None:
    schema = {"const": {"not": {"type": "null"}}, "properties": {"if": {"enum": ["not"]}}}
    assert json.loads(rewritten(json.dumps(schema)) or "") == schema
    assert rewritten('{"not": ') is None
    assert rewritten("[" * 50_000 + '"not"') is None
