"""The OpenAPI document of every route: of what is declared, and of the models that read and write.

Request bodies are the models that read them, with the bounds of `validation` (`openapi_bounds`);
replies are the Structs that write them. `/docs` shows it.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.http.errors import Error
from gateway.http.exchange import Exchange
from gateway.http.json_reply import to_json
from gateway.http.middleware import OPEN_PATHS
from gateway.openai import openapi_bounds
from gateway.openai.operation import OPEN, Api, Operation
from gateway.requests.validation import Limits

Schema = dict[str, Any]
REFERENCE: Final = "#/components/schemas/{name}"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
# What an operation may answer besides its success. The texts are for readers of the document.
FAILURES: Final = {
    400: "the request is wrong; the same one can never succeed. `param` names the field",
    401: "an API key is needed",
    403: "Host or Origin: another site's page, or a name that is not allowed",
    404: "no such model, request or path",
    405: "another method is meant",
    408: "the body was not there in time",
    409: "the idempotency key was used for another body",
    413: "the body is too long",
    415: "the body must say that it is application/json",
    429: "too much is live; see retry-after",
    499: "the request was cancelled",
    500: "a fault of the server; its log explains the id in the message",
    503: "nothing can be served now; see retry-after",
    504: "the request's time ran out",
}
ABOUT: Final = (
    "Every answer carries x-request-id, the request's own if it is a name; every error"
    " x-should-retry, and retry-after and retry-after-ms if waiting helps. GET answers HEAD too."
    " Failures in mid-stream are an event whose data is an Error, before [DONE]."
)
PAGE: Final = Path(__file__).with_name("docs.html").read_bytes()


def _hashes(tag: str) -> str:
    """The page's own code, by its hash: nothing else runs or is loaded, whatever is in it."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(each).digest()).decode()}'" for each in found)


PAGE_HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; script-src {_hashes('script')}; "
    f"style-src {_hashes('style')}; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def document(
    operations: Sequence[Operation],
    model: str,
    limits: Limits,
    prompts_max: int,
    *,
    refuses_unknown: bool = True,
) -> Schema:
    """OpenAPI 3.1, with this gateway's own limits."""
    bodies = [each.body for each in operations if each.body is not None]
    schemas = openapi_bounds.schemas(
        bodies, model, limits, prompts_max, refuses_unknown=refuses_unknown
    )
    written = [Error, *(each for operation in operations for each in _written(operation))]
    _, components = msgspec.json.schema_components(written, ref_template=REFERENCE)
    for schema in components.values():
        # A field that is always written is there even where it has a default.
        told = schema["properties"].items()
        always = [name for name, each in told if name in schema["required"] or "default" in each]
        schemas[schema["title"]] = schema | {"required": always}
    paths: Schema = {}
    for each in operations:
        path = each.path.replace(":path}", "}")
        paths.setdefault(path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kaiten", "version": version("kaiten"), "description": ABOUT},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _written(operation: Operation) -> list[type]:
    every = (*operation.replies, *operation.events, *operation.others.values())
    return [each for each in every if isinstance(each, type)]


def _operation(operation: Operation) -> Schema:
    events = {EVENTS: {"schema": _schema(operation.events)}} if operation.events else {}
    texts = [each for each in operation.replies if isinstance(each, str)]
    content: Schema = {each: {"schema": {"type": "string"}} for each in texts} | events
    if structs := [each for each in operation.replies if isinstance(each, type)]:
        content = _json(*structs) | content
    responses: Schema = {"200": {"description": "done", "content": content}}
    for status in operation.failures:
        responses[str(status)] = {"description": FAILURES[status], "content": _json(Error)}
    for status, kind in operation.others.items():
        responses[str(status)] = {"description": kind.__doc__, "content": _json(kind)}
    told: Schema = {"operationId": operation.name, "responses": responses}
    if operation.parameters:
        told["parameters"] = list(operation.parameters)
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": _json(operation.body)}
    # Nobody needs a key for these.
    return told | ({"security": []} if operation.path in OPEN_PATHS else {})


def _json(*kinds: type) -> Schema:
    return {JSON: {"schema": _schema(kinds)}}


def _schema(kinds: Sequence[type]) -> Schema:
    several = [
        {"type": "object"} if kind is dict else {"$ref": REFERENCE.format(name=kind.__name__)}
        for kind in kinds
    ]
    return several[0] if len(several) == 1 else {"anyOf": several}


async def openapi(api: Api, exchange: Exchange, _body: None) -> None:
    """Made when it is asked for, and again only when a worker has changed the limits."""
    limits, config = api.front.limits, api.config
    if api.document is None or api.document[0] != limits:
        content = document(
            api.operations,
            api.front.card.name,
            limits,
            config.prompts_max,
            refuses_unknown=config.unknown_fields == "refuse",
        )
        api.document = limits, to_json(content)
    await exchange.send(200, api.document[1])


async def docs(_api: Api, exchange: Exchange, _body: None) -> None:
    await exchange.send(200, PAGE, "text/html; charset=utf-8", PAGE_HEADERS)


OPERATIONS: Final = (
    Operation("GET", "/openapi.json", "openapi", openapi, OPEN, (dict,)),
    Operation("GET", "/docs", "docs", docs, OPEN, ("text/html",)),
)
