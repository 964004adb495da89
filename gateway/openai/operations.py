"""Every HTTP operation, declared once: the routes and the OpenAPI document are made of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct
from pydantic import BaseModel

from gateway.openai import reply_models as replies
from gateway.openai.generate import TIMEOUT_HEADER, TIMEOUT_S
from gateway.openai.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.requests.validation import REQUEST_ID, UINT32_MAX

Schema = dict[str, Any]
Models = Sequence[type[Struct]]
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


@dataclass(frozen=True, slots=True)
class Operation:
    """`name` is its operationId, and how its handler is found."""

    method: str
    path: str
    name: str
    failures: Sequence[int]
    # What it answers, one of these.
    reply: Models = ()
    # What the data of its server-sent events are; the last one's is [DONE].
    events: Models = ()
    # Other answers, with what they mean.
    besides: Mapping[int, tuple[str, type[Struct]]] = field(default_factory=dict)
    pages: Sequence[str] = ()
    body: type[BaseModel] | None = None
    parameters: Sequence[Schema] = ()


def _parameter(place: str, name: str, description: str, pattern: str = "") -> Schema:
    schema = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    told: Schema = {"name": name, "in": place, "schema": schema, "description": description}
    return told | ({"required": True} if place == "path" else {})


NAME: Final = _parameter("path", "name", "slashes in it are taken as they are")
ID: Final = _parameter(
    "path",
    "id",
    "as the response of the request named it",
    f"^(chatcmpl-|cmpl-)?{REQUEST_ID.pattern}$",
)
FOLLOWING: Final = (
    ID,
    _parameter(
        "query",
        "starting_after",
        "output tokens the client has, one per choice, separated by commas; "
        f"each at most {UINT32_MAX}",
        "^([0-9]{1,10}(,[0-9]{1,10})*)?$",
    ),
    _parameter(
        "query",
        "stream",
        "true or 1: a stream, as accept: text/event-stream; anything else: no stream",
    ),
)
GENERATING: Final = (
    _parameter(
        "header",
        "idempotency-key",
        "names the request: the same key and body again is the same request",
        f"^({REQUEST_ID.pattern})?$",
    ),
    _parameter("header", "traceparent", "W3C trace context; one that is none is ignored"),
    _parameter(
        "header",
        TIMEOUT_HEADER,
        "seconds, more than 0, for the whole answer; then 504, or an event that says so",
        f"^({TIMEOUT_S.pattern})?$",
    ),
)
BACKGROUND: Final = {202: ("with background, not streamed", replies.Accepted)}
NOT_READY: Final = {503: ("not now", replies.NotServing)}
STORED: Final = (replies.LiveRequest, replies.FinishedRequest)
STORED_EVENTS: Final = (replies.ChatChunk, replies.CompletionChunk)
METRICS: Final = ("text/plain", "application/openmetrics-text")

OPERATIONS: Final = (
    Operation(
        *("POST", "/v1/chat/completions", "chat", ALL),
        body=ChatBody,
        parameters=GENERATING,
        reply=(replies.Chat,),
        events=(replies.ChatChunk,),
        besides=BACKGROUND,
    ),
    Operation(
        *("POST", "/v1/completions", "complete", ALL),
        body=CompletionBody,
        parameters=GENERATING,
        reply=(replies.Completion,),
        events=(replies.CompletionChunk,),
        besides=BACKGROUND,
    ),
    Operation("GET", "/v1/models", "listModels", (*SMALL, 503), (replies.Models,)),
    Operation(
        *("GET", "/v1/models/{name}", "getModel", (*SMALL, 404, 503)),
        parameters=(NAME,),
        reply=(replies.Model,),
    ),
    Operation(
        *("GET", "/v1/requests/{id}", "getRequest", LOOKS),
        parameters=FOLLOWING,
        reply=STORED,
        events=STORED_EVENTS,
    ),
    Operation(
        *("DELETE", "/v1/requests/{id}", "deleteRequest", LOOKS),
        parameters=(ID,),
        reply=(replies.CancelledRequest,),
    ),
    Operation(
        *("POST", "/v1/requests/{id}/cancel", "cancelRequest", READS),
        parameters=(ID,),
        reply=(replies.CancelledRequest,),
    ),
    Operation("POST", "/tokenize", "tokenize", READS, (replies.Tokens,), body=TokenizeBody),
    Operation("POST", "/detokenize", "detokenize", READS, (replies.Text,), body=DetokenizeBody),
    Operation("GET", "/health", "health", OPEN, (replies.Health,)),
    Operation("GET", "/livez", "livez", OPEN, (replies.Health,)),
    Operation("GET", "/ready", "ready", OPEN, (replies.Serving,), besides=NOT_READY),
    Operation("GET", "/readyz", "readyz", OPEN, (replies.Serving,), besides=NOT_READY),
    Operation("GET", "/metrics", "metrics", (*OPEN, 503), pages=METRICS),
    Operation("GET", "/version", "version", OPEN, (replies.Version,)),
    Operation("GET", "/openapi.json", "openapi", OPEN, (replies.Document,)),
    Operation("GET", "/docs", "docs", OPEN, pages=("text/html",)),
)
