"""The HTTP door: every route, behind the gate."""

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.http import errors
from gateway.http.bodies import Bodies, BodyLimits
from gateway.http.middleware import Gate
from gateway.http.web_pages import WebPolicy
from gateway.openai.generate import Endpoint
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
    """What `openapi` describes."""
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
    chat = Endpoint(front, config, bodies, unknown, ChatBody, ChatShape())
    completions = Endpoint(front, config, bodies, unknown, CompletionBody, CompletionShape())
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/v1/requests/{id}", stored, methods=["GET", "DELETE"]),
        Route("/v1/requests/{id}/cancel", stored.cancel, methods=["POST"]),
        Route("/tokenize", pages.tokenize, methods=["POST"]),
        Route("/detokenize", pages.detokenize, methods=["POST"]),
        Route("/health", pages.health),
        Route("/livez", pages.health),
        Route("/ready", pages.ready),
        Route("/readyz", pages.ready),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
        Route("/openapi.json", pages.openapi),
    ]


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KaitenError)
    status = errors.row_of(error).status
    return JSONResponse(errors.body_of(error), status, headers=errors.headers_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:128]}: {error.detail}"
    code = HTTP_CODES.get(error.status_code)
    refused = errors.HttpError(error.status_code, message, code)
    return JSONResponse(errors.body_of(refused), error.status_code, headers=error.headers)
