"""What is beside each other at one place, through references and in each other."""

from typing import Any

import pytest

from gateway.children.open_objects import open_objects

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
        ({"anyOf": [{"type": ["object", "null"]}, CLOSED]}, 1),
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
        ({"anyOf": {"not": "a list"}}, 1),
        ({"anyOf": [{"$ref": 7}, {"$ref": "elsewhere"}]}, 1),
        ([1, "a", None], 0),
    ],
)
def test_open_objects(schema: Any, count: int) -> None:
    assert open_objects(schema) == count
