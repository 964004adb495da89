"""What is beside each other at one place, through references and in each other."""

from typing import Any

import pytest

from gateway.children.alternatives import alternatives, longest_run, longest_text

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = OPEN | {"additionalProperties": False}
FIVE = {"anyOf": [OPEN] * 5}


def chain(levels: int, **last: Any) -> dict[str, Any]:
    """Each definition is the next one twice."""
    defs: dict[str, Any] = {f"d{levels}": last}
    for level in range(levels):
        defs[f"d{level}"] = {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2}
    return {"$ref": "#/$defs/d0", "$defs": defs}


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        (OPEN, 0),
        (FIVE, 5),
        ({"oneOf": [FIVE, FIVE, {"type": "null"}, True, {}]}, 11),
        ({"anyOf": [CLOSED, {"enum": [{}]}, {"const": {}}, {"type": ["string", "null"]}]}, 0),
        ({"anyOf": [{"type": ["object", "null"], "required": ["a"]}, CLOSED]}, 1),
        # Of two places each has its own.
        ({"type": "object", "properties": {"a": FIVE, "b": {"anyOf": [OPEN, FIVE]}}}, 6),
        # Kept to at once: pairs.
        ({"allOf": [FIVE, {"anyOf": [OPEN] * 3}, OPEN]}, 15),
        ({"allOf": [OPEN] * 200}, 1),
        ({"$defs": {"five": FIVE}, "anyOf": [{"$ref": "#/$defs/five"}, OPEN]}, 6),
        ({"$defs": {"five": FIVE}, "items": {"anyOf": [{"$ref": "#/$defs/five"}] * 4}}, 20),
        # One to itself, once.
        ({"anyOf": [{"$ref": "#"}, OPEN]}, 2),
        (chain(40, type="integer"), 0),
        (chain(10, **OPEN), 1024),
        (chain(40, **OPEN), 1_000_000),
        # As `dependentRequired` is said by others: one of the two names nothing.
        ({"allOf": [{"anyOf": [{"properties": {"a": False}}, {"required": ["a", "b"]}]}] * 9}, 2),
        ({"anyOf": [{"properties": {"a": False}}] * 3}, 3),
        # Arrays are as many as what is in them.
        ({"anyOf": [{"type": "array", "items": CLOSED}] * 3}, 3),
        ({"anyOf": [{"type": "array", "items": {"anyOf": [FIVE, OPEN]}}] * 3}, 18),
        ({"anyOf": [{"type": ["array", "null"], "items": {"type": "array"}}, OPEN]}, 2),
        # What stands where in them is known.
        ({"anyOf": [{"type": "array", "prefixItems": [OPEN], "items": False}] * 3}, 0),
        ({"anyOf": {"not": "a list"}}, 1),
        ({"anyOf": [{"$ref": 7}, {"$ref": "elsewhere"}]}, 1),
        ([1, "a", None], 0),
    ],
)
def test_alternatives(schema: Any, count: int) -> None:
    assert alternatives(schema) == count


@pytest.mark.parametrize(
    ("schema", "chars"),
    [
        ({"enum": ["abc", {"a": "abcde"}]}, 5),
        ({"properties": {"a": {"const": "abcdefghijk"}}}, 11),
        ({"properties": {"a" * 30: True}}, 30),
        ({"pattern": "a" * 40}, 40),
        # Said to people.
        ({"description": "a" * 50, "title": "b" * 50}, len("description")),
        (True, 0),
    ],
)
def test_the_longest_text(schema: Any, chars: int) -> None:
    assert longest_text(schema) == chars


@pytest.mark.parametrize(
    ("expression", "chars"),
    [("", 0), ("a" * 9, 9), ("(abc|de)fghi*", 4), ('start: "a" /bcd/\n', 7)],
)
def test_the_longest_run(expression: str, chars: int) -> None:
    assert longest_run(expression) == chars
