"""Which schemas have an output that ends, and which only such as go on for ever."""

from typing import Any

import pytest

from gateway.children.endings import can_end

SELF = {"$ref": "#"}


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def nodes(**next_: Any) -> dict[str, Any]:
    return {"$defs": {"n": object_of("v", "next", v={"type": "integer"}, next=next_)}}


TO_N = {"$ref": "#/$defs/n"}
DEFS = {"$defs": {"a": object_of("a", a={"$ref": "#/$defs/a"})}}


def chain(levels: int, last: Any) -> dict[str, Any]:
    """Each definition needs the next one twice; the last is defined first."""
    defs = {f"d{levels}": last}
    for level in reversed(range(levels)):
        ref = {"$ref": f"#/$defs/d{level + 1}"}
        defs[f"d{level}"] = object_of("a", "b", a=ref, b=ref)
    return {"$ref": "#/$defs/d0", "$defs": defs}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        object_of("a", "b", a={}),
        # What is optional, or may be empty, is left out.
        object_of(a=SELF),
        {"type": "array", "items": SELF},
        {"type": "array", "prefixItems": [SELF], "minItems": 0},
        {"type": "array", "prefixItems": [{"const": 1}], "items": SELF, "minItems": 1},
        {"anyOf": [SELF, {"type": "string"}]},
        {"oneOf": [{"type": "null"}, object_of("a", a=SELF)]},
        TO_N | nodes(anyOf=[TO_N, {"type": "null"}]),
        # It may be no object.
        {"properties": {"a": SELF}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
        # What is said beside it decides, as far as anybody can tell.
        object_of("a", a=SELF) | {"enum": [{}]},
        {"$ref": "https://example.org/other"},
        {"anyOf": []},
        chain(40, {"type": "integer"}),
        # Only when the second is known to end does the first.
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": object_of("b", b={"$ref": "#/$defs/b"}),
                "b": {"anyOf": [object_of("a", a={"$ref": "#/$defs/a"}), {"const": 0}]},
            },
        },
    ],
    ids=str,
)
def test_it_ends(schema: Any) -> None:
    assert can_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        object_of("a", a=SELF),
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [{}, SELF], "minItems": 2},
        {"anyOf": [SELF, object_of("a", a=SELF)]},
        {"allOf": [{}, SELF]},
        TO_N | nodes(anyOf=[TO_N]),
        DEFS | {"$ref": "#/$defs/a"},
        DEFS | object_of("x", x={"$ref": "#/$defs/a"}),
        chain(40, {"$ref": "#/$defs/d0"}),
    ],
    ids=str,
)
def test_it_never_does(schema: Any) -> None:
    assert not can_end(schema)


def test_so_deep_that_nobody_can_read_it() -> None:
    with pytest.raises(RecursionError):
        can_end(chain(5000, {"type": "integer"}))
