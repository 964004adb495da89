"""unevaluatedProperties and unevaluatedItems by additionalProperties and items. Pure.

Exact where what evaluates a property or an item is known without the instance: the schema's own
keywords, those of allOf, and of references into the document.
"""

from typing import Any, Final

# What evaluates more or less, by the instance. `not` never does.
_BY_INSTANCE: Final = (
    *("$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "if", "dependentSchemas"),
)
_REST_OF_OBJECT: Final = ("additionalProperties", "unevaluatedProperties")
_REST_OF_ARRAY: Final = ("items", "unevaluatedItems")


def evaluate(told: dict[str, Any], schema: dict[str, Any], root: Any) -> None:
    """`told`: the schema, with the schemas in it rewritten already."""
    if "unevaluatedProperties" in told and (parts := _parts(schema, root)) is not None:
        _evaluate_properties(told, parts)
    if "unevaluatedItems" in told and (parts := _parts(schema, root)) is not None:
        _evaluate_items(told, parts)


def _evaluate_properties(told: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    rest = told.pop("unevaluatedProperties")
    if _is_any_in(_REST_OF_OBJECT[:1], parts[:1]) or _is_any_in(_REST_OF_OBJECT, parts[1:]):
        return
    for names in ("properties", "patternProperties"):
        known = {name: True for part in parts for name in part.get(names, {})}
        if known:
            told[names] = known | told.get(names, {})
    told["additionalProperties"] = rest


def _evaluate_items(told: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    if _is_any_in(("contains",), parts):
        return
    rest = told.pop("unevaluatedItems")
    if _is_any_in(_REST_OF_ARRAY[:1], parts[:1]) or _is_any_in(_REST_OF_ARRAY, parts[1:]):
        return
    own = told.get("prefixItems", [])
    count = max(len(part.get("prefixItems", [])) for part in parts)
    if count:
        told["prefixItems"] = [*own, *[True] * (count - len(own))]
    told["items"] = rest


def _is_any_in(names: tuple[str, ...], parts: list[dict[str, Any]]) -> bool:
    return any(name in part for name in names for part in parts)


def _parts(schema: dict[str, Any], root: Any) -> list[dict[str, Any]] | None:
    """The schema and all that hold where it does, itself first; None: the instance decides."""
    found: list[dict[str, Any]] = []
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if any(part is each for each in found) or not isinstance(part, dict):
            continue
        if any(name in part for name in _BY_INSTANCE):
            return None
        found.append(part)
        left += part.get("allOf", [])
        if "$ref" in part:
            left.append(target(part["$ref"], root))
            if left[-1] is None:
                return None
    return found


def target(pointer: Any, root: Any) -> Any:
    """Of a reference into this document; None: it is none, or leads nowhere."""
    if pointer == "#":
        return root
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    for name in pointer[2:].split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root
