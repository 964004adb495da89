"""A place is named by keywords, names and numbers, down to what is wrong by itself."""

from typing import Any

import pytest

from gateway.children.schema_places import place_of

BAD = {"type": "thing"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (BAD, ""),
        (True, ""),
        ({"properties": {"a": {}, "b": BAD}}, "properties.b"),
        ({"properties": {"type": {"items": BAD}}}, "properties.type.items"),
        ({"anyOf": [{}, {"not": BAD}]}, "anyOf.1.not"),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": BAD}}, "items"),
        # What is no schema has none.
        ({"const": BAD, "enum": [BAD], "if": BAD}, "if"),
    ],
)
def test_the_innermost_is_named(schema: Any, place: str) -> None:
    def is_wrong(part: Any) -> bool:
        return "thing" in str({name: part[name] for name in part if name != "$defs"}) or (
            "$ref" in str(part) and "thing" in str(part.get("$defs"))
        )

    assert place_of(schema, is_wrong) == place
