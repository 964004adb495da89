"""The OpenAPI document of every HTTP route, made from the models that read the bodies."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from gateway.openai_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from gateway.tenants import PRIORITY_MAX
from gateway.validate import UINT32_MAX, UINT64_MAX, Limits

# By field, then by JSON type.
Rules = Mapping[str, Mapping[str, Mapping[str, Any]]]
REFERENCE: Final = "#/components/schemas/{model}"
BODIES: Final[Mapping[str, type[BaseModel]]] = {
    "ChatBody": ChatBody,
    "CompletionBody": CompletionBody,
    "TokenizeBody": TokenizeBody,
    "DetokenizeBody": DetokenizeBody,
}
OBJECT: Final = {"type": "object"}
# One server-sent event; its data is JSON, but for the last one's "[DONE]".
EVENT: Final = {"type": "object", "properties": {"data": {"type": "string"}}}
ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
# What an operation may answer besides its success. The texts are for readers of the document.
FAILURES: Final = {
    400: "the request is wrong; the same one can never succeed",
    401: "an API key is needed",
    404: "no such model, request or path",
    405: "another method is meant",
    409: "the idempotency key was used for another body",
    413: "the body is too long",
    429: "too much is live; see retry-after",
    499: "the request was cancelled",
    500: "a fault of the server; its log explains the id in the message",
    503: "nothing can be served now; see retry-after",
    504: "the request's time ran out",
}
SMALL: Final = (401, 405, 500)
LOOKS: Final = (400, 401, 404, 405, 413, 429, 500, 503)
ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
    "description": "as the response of the request named it",
}
AFTER: Final = {
    "name": "starting_after",
    "in": "query",
    "schema": {"type": "string", "pattern": "^[0-9]{1,9}(,[0-9]{1,9})*$"},
    "description": "output tokens the client has, one per choice, separated by commas",
}
STREAMED: Final = {"name": "stream", "in": "query", "schema": {"enum": ["true", "false"]}}


def document(version: str, model: str, limits: Limits) -> dict[str, Any]:
    """OpenAPI 3.1, with this gateway's own limits."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "kaiten", "version": version},
        "security": [{"key": []}, {}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(model, limits),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(model: str, limits: Limits) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Error": ERROR}
    rules = _rules(model, limits)
    for name, body in BODIES.items():
        schema = body.model_json_schema(ref_template=REFERENCE)
        schemas |= schema.pop("$defs", {})
        for field, property_ in schema["properties"].items():
            _restrict(property_, rules.get(field, {}))
        schemas[name] = schema
    return schemas


def _rules(model: str, limits: Limits) -> Rules:
    """What `validate` wants of a field, by the JSON type of its value. It judges; this tells."""
    ids = {"minimum": 0, "maximum": limits.vocab_size - 1}
    logprobs = {"minimum": 0, "maximum": limits.logprobs_max}
    choices = {"minimum": 1, "maximum": limits.choices_max}
    stop = {"minLength": 1, "maxLength": limits.stop_chars_max}
    positive = {"exclusiveMinimum": 0}
    return {
        "model": {"string": {"enum": [model]}},
        "n": {"integer": choices},
        "best_of": {"integer": choices},
        "temperature": {"number": {"minimum": 0, "maximum": 2}},
        "top_p": {"number": positive | {"maximum": 1}},
        "min_p": {"number": {"minimum": 0, "maximum": 1}},
        "top_k": {"integer": {"minimum": -1, "maximum": UINT32_MAX}},
        "seed": {"integer": {"minimum": -(2**63), "maximum": UINT64_MAX}},
        "max_tokens": {"integer": {"minimum": 0, "maximum": limits.context_tokens_max}},
        "max_completion_tokens": {"integer": {"minimum": 1, "maximum": limits.context_tokens_max}},
        "min_tokens": {"integer": {"minimum": 0, "maximum": limits.context_tokens_max}},
        "logprobs": {"integer": logprobs},
        "prompt_logprobs": {"integer": logprobs},
        "top_logprobs": {"integer": logprobs},
        "presence_penalty": {"number": {"minimum": -2, "maximum": 2}},
        "frequency_penalty": {"number": {"minimum": -2, "maximum": 2}},
        "repetition_penalty": {"number": positive | {"maximum": 2}},
        "priority": {"integer": {"minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX}},
        "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}, "integer": ids},
        "tokens": {"array": {"minItems": 1}, "integer": ids},
        "messages": {"array": {"minItems": 1}},
        "stop": {"string": stop, "array": {"maxItems": limits.stops_max}},
        "stop_token_ids": {"array": {"maxItems": limits.stop_token_ids_max}, "integer": ids},
        "allowed_token_ids": {"integer": ids},
        "bad_words_token_ids": {"integer": ids},
        "logit_bias": {"object": {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"}}},
        "chat_template_kwargs": {
            "object": {"propertyNames": {"enum": sorted(limits.template_options)}}
        },
    }


def _restrict(schema: dict[str, Any], rules: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the rules of each type, wherever in the alternatives it stands."""
    schema.update(rules.get(schema.get("type", ""), {}))
    for inner in (*schema.get("anyOf", ()), schema.get("items")):
        if inner:
            _restrict(inner, rules)


def _paths() -> dict[str, Any]:
    streams = ("application/json", "text/event-stream")
    return {
        "/v1/chat/completions": {
            "post": _operation("chat", body="ChatBody", types=streams, accepted=True)
        },
        "/v1/completions": {
            "post": _operation("complete", body="CompletionBody", types=streams, accepted=True)
        },
        "/v1/models": {"get": _operation("listModels", failures=SMALL)},
        "/v1/models/{name}": {
            "get": _operation(
                "getModel",
                failures=(*SMALL, 404),
                parameters=(_path_parameter("name"),),
            )
        },
        "/v1/requests/{id}": {
            "get": _operation(
                "getRequest", failures=LOOKS, parameters=(ID, AFTER, STREAMED), types=streams
            ),
            "delete": _operation("deleteRequest", failures=LOOKS, parameters=(ID,)),
        },
        "/v1/requests/{id}/cancel": {
            "post": _operation("cancelRequest", failures=LOOKS, parameters=(ID,))
        },
        "/tokenize": {"post": _operation("tokenize", body="TokenizeBody", failures=LOOKS)},
        "/detokenize": {"post": _operation("detokenize", body="DetokenizeBody", failures=LOOKS)},
        "/health": {"get": _operation("health", failures=(405,))},
        "/ready": {"get": _operation("ready", failures=(405,), unready=True)},
        "/version": {"get": _operation("version", failures=(405,))},
        "/openapi.json": {"get": _operation("openapi", failures=(405,))},
    }


def _operation(
    name: str,
    *,
    body: str = "",
    failures: tuple[int, ...] = tuple(FAILURES),
    parameters: tuple[Mapping[str, Any], ...] = (),
    types: tuple[str, ...] = ("application/json",),
    accepted: bool = False,
    unready: bool = False,
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": _success(types)}
    if accepted:
        responses["202"] = _success(("application/json",))
    if unready:
        responses["503"] = _success(("application/json",))
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    responses |= {
        str(status): {"description": FAILURES[status], "content": error} for status in failures
    }
    operation: dict[str, Any] = {"operationId": name, "responses": responses}
    if parameters:
        operation["parameters"] = list(parameters)
    if body:
        schema = {"$ref": REFERENCE.format(model=body)}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _success(types: tuple[str, ...]) -> dict[str, Any]:
    content = {kind: {"schema": OBJECT if kind == "application/json" else EVENT} for kind in types}
    return {"description": "done", "content": content}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
