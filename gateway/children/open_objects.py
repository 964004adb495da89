"""How many open objects a JSON Schema has beside each other at one place. Pure.

Each is read beside all others for as long as the output may be any of them, by every name that
none of them knows: 300 of them are 0.1 s of a processor for a token.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, Final

from gateway.children.unevaluated import target

OPEN_OBJECTS_MAX: Final = 128
# Alternatives of alternatives are soon more than can be written down.
_COUNTED_MAX: Final = 1_000_000


class _Counter:
    def __init__(self, root: Any) -> None:
        self._root = root
        # By reference; 0 while it is counted: one to itself adds nothing.
        self._of: dict[str, int] = {}

    def at(self, schema: Any) -> int:
        """At the place of this schema."""
        if not isinstance(schema, dict):
            return 0
        ways = [self.at(each) for each in _listed(schema, "anyOf", "oneOf")]
        if isinstance(reference := schema.get("$ref"), str):
            ways.append(self._referred(reference))
        together = [self.at(each) for each in _listed(schema, "allOf")]
        if not ways and not together:
            return int(_is_open(schema))
        # All are kept to at once: every pair of their alternatives is one.
        pairs = prod(max(each, 1) for each in together) * sum(ways) if ways else prod(together)
        return min(pairs, _COUNTED_MAX)

    def _referred(self, reference: str) -> int:
        if reference not in self._of:
            self._of[reference] = 0
            self._of[reference] = self.at(target(reference, self._root))
        return self._of[reference]


def open_objects(root: Any) -> int:
    """At the place that has the most. RecursionError: nobody can read it."""
    counter = _Counter(root)
    return max(map(counter.at, _places(root)), default=0)


def _places(value: Any) -> Iterator[dict[str, Any]]:
    """Where alternatives are, or may be: a property's name is not told from a keyword."""
    if isinstance(value, dict):
        if value.keys() & {"anyOf", "oneOf", "allOf"}:
            yield value
        for each in value.values():
            yield from _places(each)
    elif isinstance(value, list):
        for each in value:
            yield from _places(each)


def _listed(schema: dict[str, Any], *names: str) -> Iterator[Any]:
    for name in names:
        if isinstance(value := schema.get(name), list):
            yield from value


def _is_open(schema: dict[str, Any]) -> bool:
    kind = schema.get("type", "object")
    is_object = "object" in kind if isinstance(kind, list) else kind == "object"
    has_values = schema.keys() & {"enum", "const"}
    return is_object and not has_values and schema.get("additionalProperties") is not False
