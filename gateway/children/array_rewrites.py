"""`contains` and `uniqueItems` of arrays, by keywords that llguidance knows. Pure.

contains S, minContains, maxContains   those that match stand side by side, from one of the first
                                       places on; before them and after them none does, where a
                                       maximum is given
uniqueItems                            each array of a finite number of different items, one by one

Narrower than what was asked for and never wider: of an array's orders only some are written.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from gateway.children.unevaluated import target

# Places from which the items that match may begin, where no prefixItems ask for more.
_STARTS: Final = 4
_STARTS_MAX: Final = 9
_MATCHES_MAX: Final = 16
_COUNTS_MAX: Final = 9
# Arrays of different items: of five all orders, of nine one.
_ARRAYS_MAX: Final = 520
_PLACES_MAX: Final = 5
_NO_ARRAY: Final = ["null", "boolean", "number", "string", "object"]

Negation = Callable[[Any], Any]


def contained(told: dict[str, Any], negation: Negation) -> list[Any]:
    """What stands for `contains` and its bounds, which it takes out. `negation` may raise."""
    if "contains" not in told:
        # Alone they say nothing.
        told.pop("minContains", None)
        told.pop("maxContains", None)
        return []
    least, most = told.get("minContains", 1), told.get("maxContains")
    starts = range(max(_STARTS, 1 + len(told.get("prefixItems", ()))))
    if not 0 <= least <= _MATCHES_MAX or len(starts) > _STARTS_MAX:
        return []
    if most is not None and most - least >= _COUNTS_MAX:
        return []
    counts = range(least, least + 1 if most is None else most + 1)
    matching = told["contains"]
    other = True if most is None else negation(matching)
    for name in ("contains", "minContains", "maxContains"):
        told.pop(name, None)
    if most is None and not least:
        return []
    ways = [
        _array([*[other] * start, *[matching] * count], other)
        for count in counts
        for start in (starts if count else range(1))
    ]
    return [{"anyOf": [{"type": _NO_ARRAY}, *ways]}]


def _array(first: list[Any], after: Any) -> dict[str, Any]:
    """Of at least these items."""
    told: dict[str, Any] = {"type": "array", "minItems": len(first)}
    if first:
        told["prefixItems"] = first
    return told if after is True else told | {"items": after}


def different(told: dict[str, Any], root: Any) -> list[Any]:
    """What stands for `uniqueItems`, which it takes out where the items are of a finite number."""
    asked, most = told.get("uniqueItems"), told.get("maxItems")
    if asked is False or (asked is True and isinstance(most, int) and most <= 1):
        del told["uniqueItems"]
    if told.get("uniqueItems") is not True:
        return []
    arrays = _arrays(told, root)
    if arrays is None:
        return []
    del told["uniqueItems"]
    ways = [
        {"type": "array", "minItems": len(items), "maxItems": len(items)}
        | ({"prefixItems": [{"const": item} for item in items]} if items else {})
        for items in arrays
    ]
    for name in ("items", "prefixItems"):
        told.pop(name, None)
    return [{"anyOf": [{"type": _NO_ARRAY}, *ways]}]


def _arrays(told: dict[str, Any], root: Any) -> list[tuple[Any, ...]] | None:
    """All that the items allow, of different items; None: too many, or without end."""
    first = [_values(each, root) for each in told.get("prefixItems", ())]
    if first:
        if told.get("items") is not False or None in first or len(first) > _PLACES_MAX:
            return None
        lengths = range(len(first) + 1)
        rows = (row for size in lengths for row in itertools.product(*first[:size]))  # type: ignore[arg-type]
        return _few(row for row in rows if len({*map(_key, row)}) == len(row))
    items = _values(told.get("items", True), root)
    if items is None:
        return None
    least, most = told.get("minItems", 0), told.get("maxItems", len(items))
    lengths = range(least, min(most, len(items)) + 1)
    found = _few(row for size in lengths for row in itertools.permutations(items, size))
    if found is None:
        found = _few(row for size in lengths for row in itertools.combinations(items, size))
    return found


def _few(rows: Iterator[tuple[Any, ...]]) -> list[tuple[Any, ...]] | None:
    found = list(itertools.islice(rows, _ARRAYS_MAX + 1))
    return found if len(found) <= _ARRAYS_MAX else None


def _values(schema: Any, root: Any) -> list[Any] | None:
    """Of an enum, in its order and each once; None: it has no end, or more is said beside it."""
    if isinstance(schema, dict) and set(schema) == {"$ref"}:
        schema = target(schema["$ref"], root)
    if not isinstance(schema, dict):
        return None
    if schema == {"type": "boolean"}:
        return [True, False]
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    is_all_said = set(schema) <= {"const", "enum", "title", "description", "type"}
    if not is_all_said or ("type" in schema and not _is_of_strings(schema["type"], values)):
        return None
    return list({_key(value): value for value in values}.values())


def _is_of_strings(kind: Any, values: list[Any]) -> bool:
    return kind == "string" and all(isinstance(value, str) for value in values)


def _key(value: Any) -> str:
    """Equal for what is equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
