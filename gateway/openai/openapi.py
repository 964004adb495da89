"""The OpenAPI document, made of the operations and of the models that they read and write.

Bounds of bodies are those of `validation` (`openapi_bodies`).
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from gateway.http import errors
from gateway.http.middleware import OPEN_PATHS
from gateway.openai import openapi_bodies, reply_models
from gateway.openai.openapi_bodies import REFERENCE
from gateway.openai.operations import FAILURES, OPERATIONS, Models, Operation
from gateway.requests.validation import Limits

Schema = dict[str, Any]
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
REPLIES: Final = [
    errors.Error,
    *(
        model
        for name, model in vars(reply_models).items()
        if isinstance(model, type) and issubclass(model, Struct) and not name.startswith("_")
        if model is not Struct
    ),
]
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
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kaiten", "version": version, "description": ABOUT},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": bodies | _replies(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _replies() -> Schema:
    """Of every model. What is not left out is there, whether it has a default here or not."""
    _, schemas = msgspec.json.schema_components(REPLIES, ref_template=REFERENCE)
    for model in msgspec.inspect.multi_type_info(REPLIES):
        assert isinstance(model, msgspec.inspect.StructType)
        fields = msgspec.structs.fields(model.cls)
        schemas[model.cls.__name__]["required"] = [
            each.encode_name for each in fields if each.default is not UNSET
        ]
    return schemas


def _operation(operation: Operation) -> Schema:
    content: Schema = {page: {"schema": {"type": "string"}} for page in operation.pages}
    if operation.reply:
        content[JSON] = _schema(operation.reply)
    if operation.events:
        content[EVENTS] = _schema(operation.events)
    responses = {"200": {"description": "done", "content": content}}
    for status in operation.failures:
        responses[str(status)] = _failure(status, FAILURES[status], errors.Error)
    for status, (meaning, model) in operation.besides.items():
        responses[str(status)] = _failure(status, meaning, model)
    told: Schema = {"operationId": operation.name, "responses": responses}
    if operation.parameters:
        told["parameters"] = list(operation.parameters)
    if operation.body is not None:
        ref = {"$ref": REFERENCE.format(name=operation.body.__name__)}
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": ref}}}
    if operation.path in OPEN_PATHS:
        told["security"] = []
    return told


def _failure(status: int, description: str, model: type[Struct]) -> Schema:
    told: Schema = {"description": description, "content": {JSON: _schema((model,))}}
    if status >= 400:
        told["headers"] = RETRY | (RETRY_AFTER if status in (429, 503) else {})
    return told


def _schema(models: Models) -> Schema:
    refs = [{"$ref": REFERENCE.format(name=model.__name__)} for model in models]
    return {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
