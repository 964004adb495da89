"""The OpenAPI document of every HTTP route.

Bodies are the models that read them (`openapi_bodies`), errors the error table (`openapi_replies`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.http.middleware import OPEN_PATHS
from gateway.openai import openapi_bodies, openapi_replies
from gateway.openai.generate import TIMEOUT_HEADER, TIMEOUT_S
from gateway.openai.openapi_replies import ref
from gateway.requests.validation import REQUEST_ID, UINT32_MAX, Limits

Schema = dict[str, Any]
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
ALL: Final = tuple(FAILURES)
SMALL: Final = (401, 403, 405, 500)
LOOKS: Final = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
READS: Final = (*LOOKS, 415)
OPEN: Final = (403, 405, 500)
TEXT: Final = {"type": "string"}
NAME: Final = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": TEXT,
    "description": "slashes in it are taken as they are",
}
ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": TEXT | {"pattern": f"^(chatcmpl-|cmpl-)?{REQUEST_ID.pattern}$"},
    "description": "as the response of the request named it",
}
AFTER: Final = {
    "name": "starting_after",
    "in": "query",
    "schema": TEXT | {"pattern": "^([0-9]{1,10}(,[0-9]{1,10})*)?$"},
    "description": "output tokens the client has, one per choice, separated by commas; "
    f"each at most {UINT32_MAX}",
}
STREAMED: Final = {
    "name": "stream",
    "in": "query",
    "schema": TEXT,
    "description": "true or 1: a stream, as accept: text/event-stream; anything else: no stream",
}
KEY: Final = {
    "name": "idempotency-key",
    "in": "header",
    "schema": TEXT | {"pattern": f"^({REQUEST_ID.pattern})?$"},
    "description": "names the request: the same key and body again is the same request",
}
TRACE: Final = {
    "name": "traceparent",
    "in": "header",
    "schema": TEXT,
    "description": "W3C trace context; one that is none is ignored",
}
TIMEOUT: Final = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "schema": TEXT | {"pattern": f"^({TIMEOUT_S.pattern})?$"},
    "description": "seconds, more than 0, for the whole answer; then 504, or an event that says so",
}
GENERATING: Final = (KEY, TRACE, TIMEOUT)
RETRY: Final = {
    "x-should-retry": {
        "schema": {"enum": ["true", "false"]},
        "description": "whether the same request may succeed later; OpenAI's SDKs obey",
    }
}
RETRY_AFTER: Final = {
    "retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"},
    "retry-after-ms": {"schema": {"type": "integer", "minimum": 1}},
}
ABOUT: Final = (
    "Every answer carries x-request-id, the request's own if it is a name. Routes with GET answer"
    " HEAD too. Failures in mid-stream are an event whose data is an Error, before [DONE]."
)


def document(
    version: str, model: str, limits: Limits, prompts_max: int, *, refuses_unknown: bool = True
) -> Schema:
    """OpenAPI 3.1, with this gateway's own limits."""
    bodies = openapi_bodies.schemas(model, limits, prompts_max, refuses_unknown=refuses_unknown)
    schemas = openapi_replies.SCHEMAS | bodies
    return {
        "openapi": "3.1.0",
        "info": {"title": "kaiten", "version": version, "description": ABOUT},
        "security": [{"key": []}, {}],
        "paths": {path: _secured(path, operations) for path, operations in _paths().items()},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _secured(path: str, operations: Mapping[str, Schema]) -> Schema:
    """Nobody needs a key for these."""
    extra: Schema = {"security": []} if path in OPEN_PATHS else {}
    return {method: operation | extra for method, operation in operations.items()}


def _paths() -> dict[str, dict[str, Schema]]:
    return {
        "/v1/chat/completions": {
            "post": _generating("chat", "ChatBody", "Chat"),
        },
        "/v1/completions": {
            "post": _generating("complete", "CompletionBody", "Completion"),
        },
        "/v1/models": {"get": _operation("listModels", _json("Models"), (*SMALL, 503))},
        "/v1/models/{name}": {
            "get": _operation("getModel", _json("Model"), (*SMALL, 404, 503), parameters=(NAME,))
        },
        "/v1/requests/{id}": {
            "get": _operation(
                "getRequest",
                _json("StoredRequest") | _events("StoredChunk"),
                LOOKS,
                parameters=(ID, AFTER, STREAMED),
            ),
            "delete": _operation(
                "deleteRequest", _json("CancelledRequest"), LOOKS, parameters=(ID,)
            ),
        },
        "/v1/requests/{id}/cancel": {
            "post": _operation("cancelRequest", _json("CancelledRequest"), READS, parameters=(ID,))
        },
        "/tokenize": {
            "post": _operation("tokenize", _json("Tokens"), READS, body="TokenizeBody"),
        },
        "/detokenize": {
            "post": _operation("detokenize", _json("Text"), READS, body="DetokenizeBody"),
        },
    } | _open_paths()


def _open_paths() -> dict[str, dict[str, Schema]]:
    page = {"text/plain": {"schema": TEXT}, "application/openmetrics-text": {"schema": TEXT}}
    ready = _operation("ready", _json("Serving"), OPEN)
    ready["responses"]["503"] = _reply("not now", _json("NotServing"), _headers(503))
    return {
        "/health": {"get": _operation("health", _json("Health"), OPEN)},
        "/livez": {"get": _operation("livez", _json("Health"), OPEN)},
        "/ready": {"get": ready},
        "/readyz": {"get": ready | {"operationId": "readyz"}},
        "/metrics": {"get": _operation("metrics", page, (*OPEN, 503))},
        "/version": {"get": _operation("version", _json("Version"), OPEN)},
        "/openapi.json": {"get": _operation("openapi", _json("Document"), OPEN)},
    }


def _generating(name: str, body: str, reply: str) -> Schema:
    content = _json(reply) | _events(f"{reply}Chunk")
    operation = _operation(name, content, ALL, body=body, parameters=GENERATING)
    operation["responses"]["202"] = _reply("with background, not streamed", _json("Accepted"))
    return operation


def _operation(
    name: str,
    content: Schema,
    failures: Sequence[int],
    *,
    body: str = "",
    parameters: Sequence[Schema] = (),
) -> Schema:
    responses = {"200": _reply("done", content)}
    for status in failures:
        responses[str(status)] = _reply(FAILURES[status], _json("Error"), _headers(status))
    operation: Schema = {"operationId": name, "responses": responses}
    if parameters:
        operation["parameters"] = list(parameters)
    if body:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _headers(status: int) -> Schema:
    return RETRY | (RETRY_AFTER if status in (429, 503) else {})


def _reply(description: str, content: Schema, headers: Schema | None = None) -> Schema:
    reply = {"description": description, "content": content}
    return reply | ({"headers": headers} if headers else {})


def _json(model: str) -> Schema:
    return {JSON: {"schema": ref(model)}}


def _events(model: str) -> Schema:
    """Server-sent events: the data of each is one of these, of the last one [DONE]."""
    return {EVENTS: {"schema": ref(model)}}
