"""Whether any output of a schema comes to an end: one that must have itself in itself never does,
and whoever writes it writes until it may write no more. Pure.
"""

from typing import Any

from gateway.children.unevaluated import target


def can_end(root: Any) -> bool:
    """False: it never does; True: it may. RecursionError: nobody can read it."""
    ends, before = _Ends(root), None
    while not ends.at(root):
        if ends.known == before:
            return False
        # What was refused before it was known what it needs is asked again.
        before, ends.seen = set(ends.known), set(ends.known)
    return True


class _Ends:
    """The least that is true: to itself a schema does not end, until something else says so."""

    def __init__(self, root: Any) -> None:
        self._root = root
        # References to what ends, and those that were looked at in this round.
        self.known: set[str] = set()
        self.seen: set[str] = set()

    def at(self, schema: Any) -> bool:
        if not isinstance(schema, dict) or schema.keys() & {"enum", "const"}:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._referred(reference):
            return False
        either = filter(None, (_list(schema, "anyOf"), _list(schema, "oneOf")))
        return (
            all(any(map(self.at, ways)) for ways in either)
            and all(map(self.at, _list(schema, "allOf")))
            and all(map(self.at, _needed(schema)))
        )

    def _referred(self, reference: str) -> bool:
        if reference not in self.seen:
            self.seen.add(reference)
            if self.at(target(reference, self._root)):
                self.known.add(reference)
        return reference in self.known


def _needed(schema: dict[str, Any]) -> list[Any]:
    """Parts without which there is none of it."""
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        names = [name for name in _list(schema, "required") if isinstance(name, str)]
        return [schema["properties"][name] for name in names if name in schema["properties"]]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        first = _list(schema, "prefixItems")
        return first[:least] if least <= len(first) else [*first, schema.get("items")]
    return []


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := schema.get(name), list) else []
