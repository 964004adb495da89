"""HTTP requests from the OpenAPI document: fields of the right type, of a wrong one, and none.

Reads only the document, as any other tool would; knows its own half of JSON schema.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st

Schema = Mapping[str, Any]
DEPTH_MAX: Final = 5
TEXTS: Final = ("", "The chef", "\u0000", "\ud800", "寿司🍣", "a" * 3000, "true", "1e999")
NUMBERS: Final = (0, 1, -1, 2, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**40, math.nan, math.inf)
JUNK: Final[tuple[Any, ...]] = (
    None,
    True,
    "x",
    1,
    -1,
    1e999,
    [],
    {},
    [[[[]]]],
    {"a": {"a": {}}},
    ["x", 1, None],
)
SENSIBLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "model": ("mini", "mini", "", "other"),
    "prompt": ("The chef", ["The chef", "x"], [1, 70, 71], [[1], [2]], "", [], [[]]),
    "messages": (
        [{"role": "user", "content": "Hello!"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [],
    ),
    "max_tokens": (1, 2, 4, 0, -1, 2**32),
    "max_completion_tokens": (1, 2, 4),
    "min_tokens": (0, 1, 2),
    "n": (1, 2, 0, 17, 10**6),
    "best_of": (1, 2),
    "temperature": (0, 1, 2, 2.5, -1),
    "logprobs": (True, False, 0, 1, 5),
    "top_logprobs": (0, 1, 20, 21),
    "prompt_logprobs": (0, 1, 20, 21, None),
    "stop": ("chef", ["a", "b"], "", []),
    "logit_bias": ({"70": 5}, {"-1": 1}, {"x": 1}, {"70": 101}),
    "stream": (False, False, True, None),
    "echo": (False, True),
    "background": (False, True),
    "token_ids": ([1, 2], [-1], [2**63]),
    "tokens": ([1, 70], [], [-1], [10**9]),
}
HEADERS: Final[tuple[dict[str, str], ...]] = (
    {},
    {},
    {"idempotency-key": "fuzz-1"},
    {"idempotency-key": "a b\x7f"},
    {"content-type": "text/plain"},
    {"x-request-id": "z" * 300},
    {"traceparent": "00-zz-zz-01"},
    {"accept": "text/event-stream"},
    {"authorization": "Bearer " + "k" * 600},
    {"expect": "200-ok"},
    {"x-junk": "j" * 9000},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One HTTP request, and which operation of the document it is."""

    method: str
    path: str
    template: str
    body: bytes | None
    headers: Mapping[str, str]


def requests(document: Schema) -> st.SearchStrategy[Sent]:
    """Requests to any operation of the document."""
    operations = [
        _operation(document, template, method, operation)
        for template, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    bodied = [operation for operation, has_body in operations if has_body]
    # Most of what can go wrong comes in bodies.
    return st.one_of(*(operation for operation, _ in operations), *bodied, *bodied)


def _operation(
    document: Schema, template: str, method: str, operation: Schema
) -> tuple[st.SearchStrategy[Sent], bool]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")

    @st.composite
    def build(draw: st.DrawFn) -> Sent:
        path, query = template, []
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            drawn = draw(st.sampled_from(("mini", "a", "1,2", "-1", "9" * 40, "%00", "..%2f", "é")))
            if parameter["in"] == "path":
                path = path.replace("{" + name + "}", drawn)
            elif parameter["in"] == "query" and draw(st.booleans()):
                query.append(f"{name}={drawn}")
        wrong = draw(st.integers(0, 30)) == 0
        return Sent(
            method=draw(st.sampled_from(("GET", "PUT", "PATCH"))) if wrong else method.upper(),
            path=path + ("?" + "&".join(query) if query else ""),
            template=template,
            body=None if schema is None else draw(_bodies(document, schema)),
            headers=draw(st.sampled_from(HEADERS)),
        )

    return build(), schema is not None


@st.composite
def _bodies(draw: st.DrawFn, document: Schema, schema: Schema) -> bytes:
    value = draw(_values(document, schema, 0))
    raw = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    how = draw(st.integers(0, 19))
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    if how == 0:
        return raw[:at]
    if how == 1:
        return raw[:at] + draw(st.binary(min_size=1, max_size=4)) + raw[at:]
    if how == 2:
        return b"[" * draw(st.sampled_from((10, 5000))) + raw
    return raw


def _values(document: Schema, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _values(document, document["components"]["schemas"][name], depth)
    if depth > DEPTH_MAX:
        return st.none()
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of(*(_values(document, each, depth + 1) for each in schema[several]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from([*schema.get("enum", [schema.get("const")]), "neither"])
    return _typed(document, schema, depth)


def _typed(document: Schema, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
    match schema.get("type"):
        case "object":
            return _objects(document, schema, depth)
        case "array":
            items = _values(document, schema.get("items", {}), depth + 1)
            return st.lists(items, max_size=3)
        case "string":
            return st.sampled_from(TEXTS)
        case "integer" | "number":
            return st.sampled_from(NUMBERS) | st.integers()
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.sampled_from(JUNK)


# One function for all objects: Hypothesis reads the source of each that it meets.
@st.composite
def _objects(draw: st.DrawFn, document: Schema, schema: Schema, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    built: dict[str, Any] = {}
    for name, inner in schema.get("properties", {}).items():
        # Most of what is required is there, most of the rest is not.
        is_rare = draw(st.integers(0, 30 if name in required else 6)) == 0
        if is_rare == (name in required):
            continue
        how = draw(st.integers(0, 9))
        if how < 6 and name in SENSIBLE:
            built[name] = draw(st.sampled_from(SENSIBLE[name]))
        elif how < 9:
            built[name] = draw(_values(document, inner, depth + 1))
        else:
            built[name] = draw(st.sampled_from(JUNK))
    if not draw(st.integers(0, 15)):
        built[draw(st.sampled_from(("max_token", "__proto__", "", "tools")))] = 1
    extra = schema.get("additionalProperties")
    if isinstance(extra, Mapping):
        built |= draw(st.dictionaries(st.text(max_size=5), _values(document, extra, depth + 1)))
    return built
