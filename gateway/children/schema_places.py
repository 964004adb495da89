"""Where in a schema it is wrong: llguidance says what, and not where. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.children.schema_rewrites import LISTS, MAPS, ONES

# Of a document, what references in any part of it are to.
_DEFINITIONS = ("$defs", "definitions")


def place_of(schema: Any, is_wrong: Callable[[Any], bool]) -> str:
    """The path of the innermost part that is as wrong as all of it; empty: the schema itself."""
    if not isinstance(schema, dict):
        return ""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    path: list[str] = []
    part: Mapping[str, Any] = schema
    while found := next((each for each in _inside(part) if is_wrong(definitions | each[1])), None):
        path += found[0]
        part = found[1]
    return ".".join(path)


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The objects among a schema's own parts, by their paths."""
    for name, value in schema.items():
        several: Iterator[tuple[tuple[str, ...], Any]] = iter(())
        if name in MAPS and isinstance(value, dict):
            several = (((name, key), each) for key, each in value.items())
        elif name in LISTS and isinstance(value, list):
            several = (((name, str(index)), each) for index, each in enumerate(value))
        elif name in ONES:
            several = iter((((name,), value),))
        yield from (each for each in several if isinstance(each[1], dict))
