"""The HTTP door: every route, behind the gate."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.http import errors
from gateway.http.bodies import Bodies, BodyLimits
from gateway.http.middleware import Gate
from gateway.http.sse import encode
from gateway.http.web_pages import WebPolicy
from gateway.openai.generate import Endpoint
from gateway.openai.operations import OPERATIONS
from gateway.openai.pages import Pages
from gateway.openai.replies import ChatShape, CompletionShape
from gateway.openai.request_models import ChatBody, CompletionBody
from gateway.openai.stored import StoredRequests
from gateway.openai.unknown_fields import UnknownFields
from gateway.requests.service import Front
from gateway.settings import GatewaySettings
from gateway.tenants import Keyring
from service_kit.errors import KaitenError
from service_kit.metrics import Metrics

# What a misbehaving path or method is called in the error body.
HTTP_CODES: Final = {404: "unknown_url", 405: "method_not_allowed"}


def create_app(
    front: Front, config: GatewaySettings, keyring: Keyring, metrics: Metrics
) -> ASGIApp:
    """Every route, with errors in OpenAI's form, behind the gate."""
    handlers = {KaitenError: _on_error, HTTPException: _on_http_error}
    app = Starlette(routes=routes(front, config, metrics), exception_handlers=handlers)
    # A path with one slash too many is no path of ours, and a redirect would name the Host header.
    app.router.redirect_slashes = False
    policy = WebPolicy.of(config.http_host, config.allowed_hosts, config.cors_origins)
    return Gate(app, keyring, policy)


def routes(front: Front, config: GatewaySettings, metrics: Metrics) -> list[Route]:
    """Those of the operations, each of which has a handler."""
    bodies = Bodies(
        BodyLimits(
            bytes_max=config.body_bytes_max,
            values_max=config.body_values_max,
            read_s_max=config.body_s_max,
            reading_bytes_max=config.bodies_bytes_max,
        )
    )
    unknown = UnknownFields(are_refused=config.unknown_fields == "refuse")
    pages = Pages(front, config, bodies, metrics, unknown)
    stored = StoredRequests(front, config, bodies)
    handlers: dict[str, Any] = {
        "chat": Endpoint(front, config, bodies, unknown, ChatBody, ChatShape()),
        "complete": Endpoint(front, config, bodies, unknown, CompletionBody, CompletionShape()),
        "listModels": pages.models,
        "getModel": pages.model,
        **dict.fromkeys(("getRequest", "deleteRequest", "cancelRequest"), stored),
        "tokenize": pages.tokenize,
        "detokenize": pages.detokenize,
        **dict.fromkeys(("health", "livez"), pages.health),
        **dict.fromkeys(("ready", "readyz"), pages.ready),
        "metrics": pages.metrics,
        "version": pages.version,
        "openapi": pages.openapi,
        "docs": pages.docs,
    }
    methods: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        methods.setdefault(operation.path, []).append(operation.method)
    of_path = {operation.path: handlers[operation.name] for operation in OPERATIONS}
    # A model's name may have slashes.
    return [
        Route(path.replace("{name}", "{name:path}"), of_path[path], methods=allowed)
        for path, allowed in methods.items()
    ]


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KaitenError)
    return _answer(error, errors.headers_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:128]}: {error.detail}"
    code = HTTP_CODES.get(error.status_code)
    refused = errors.HttpError(error.status_code, message, code)
    return _answer(refused, error.headers)


def _answer(error: KaitenError, headers: Mapping[str, str] | None) -> Response:
    content, status = encode(errors.body_of(error)), errors.row_of(error).status
    return Response(content, status, headers, "application/json")
