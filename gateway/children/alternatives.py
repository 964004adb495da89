"""What makes a grammar slow to keep to, counted before it is compiled. Pure.

Of open objects and arrays beside each other at one place each is read beside all others for as long
as the output may be any of them: 300 open objects, or 30 arrays of any of 30, are 0.1 s of a
processor for a token. So is a text of 60,000 letters: at each of them all of its rest is looked at.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import Any, Final

from gateway.children.unevaluated import target

ALTERNATIVES_MAX: Final = 128
# In a grammar that goes on behind it each is more to read: of 91 no token would be let in.
ALTERNATIVES_WITHIN_MAX: Final = 80
TEXT_CHARS_MAX: Final = 16_384
_MEANS_ELSE: Final = re.compile(r"[|()\[\]{}*+?.\"/\n]")
# Alternatives of alternatives are soon more than can be written down.
_COUNTED_MAX: Final = 1_000_000


class _Counter:
    def __init__(self, root: Any) -> None:
        self._root = root
        # By reference; 0 while it is counted: one to itself adds nothing.
        self._of: dict[str, int] = {}

    def at(self, schema: Any, *, is_part: bool = False) -> int:
        """At the place of this schema, or of one that it is a part of by allOf: there a name that
        must not be is one less to read.
        """
        if not isinstance(schema, dict) or (is_part and _forbids(schema)):
            return 0
        either = _listed(schema, "anyOf", "oneOf")
        ways = [self.at(each, is_part=is_part) for each in either]
        if isinstance(reference := schema.get("$ref"), str):
            ways.append(self._referred(reference))
        together = [self.at(each, is_part=True) for each in _listed(schema, "allOf")]
        if not ways and not together:
            return self._own(schema)
        # All are kept to at once: every pair of their alternatives is one.
        pairs = prod(max(each, 1) for each in together) * sum(ways) if ways else prod(together)
        return min(pairs, _COUNTED_MAX)

    def _referred(self, reference: str) -> int:
        if reference not in self._of:
            self._of[reference] = 0
            self._of[reference] = self.at(target(reference, self._root))
        return self._of[reference]

    def _own(self, schema: dict[str, Any]) -> int:
        kinds = schema.get("type", ["object", "array"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if schema.keys() & {"enum", "const"}:
            return 0
        is_open = "object" in kinds and schema.get("additionalProperties") is not False
        # Of whatever its items may be: all begin with the same bracket.
        is_array = "array" in kinds and schema.get("items", False) is not False
        items = max(1, self.at(schema["items"])) if is_array else 0
        return max(int(is_open), items)


def alternatives(root: Any) -> int:
    """At the place that has the most. RecursionError: nobody can read it."""
    counter = _Counter(root)
    return max(map(counter.at, _places(root)), default=0)


def longest_text(value: Any, *, is_text: bool = False) -> int:
    """Characters of the longest text that an output may have to be written by, names included."""
    if isinstance(value, str):
        return len(value) if is_text else 0
    if isinstance(value, dict):
        said = ("enum", "const", "pattern")
        inside = [longest_text(v, is_text=is_text or name in said) for name, v in value.items()]
        return max([*map(len, value), *inside], default=0)
    inside = [longest_text(each, is_text=is_text) for each in value] if type(value) is list else []
    return max(inside, default=0)


def longest_run(expression: str) -> int:
    """Of a regex or a grammar: characters between those that mean something else."""
    return max(map(len, _MEANS_ELSE.split(expression)))


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


def _forbids(schema: dict[str, Any]) -> bool:
    """As `dependentRequired` says it by others: {"properties": {"a": false}}."""
    names = schema.get("properties")
    is_all = isinstance(names, dict) and all(each is False for each in names.values())
    return is_all and schema.keys() <= {"properties", "type"}


def _listed(schema: dict[str, Any], *names: str) -> Iterator[Any]:
    for name in names:
        if isinstance(value := schema.get(name), list):
            yield from value
