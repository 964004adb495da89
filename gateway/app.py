"""The HTTP door: every route (`openai.routes`), behind the gate."""

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.http import errors
from gateway.http.json_reply import JsonResponse
from gateway.http.middleware import Gate
from gateway.http.web_pages import WebPolicy
from gateway.openai import chat, completions, health, models, openapi, stored, tokenize
from gateway.openai.operation import Api, Operation, routes_of
from gateway.requests.service import Front
from gateway.settings import GatewaySettings
from gateway.tenants import Keyring
from service_kit.metrics import Metrics

OPERATIONS: Final[tuple[Operation, ...]] = (
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *models.OPERATIONS,
    *stored.OPERATIONS,
    *tokenize.OPERATIONS,
    *health.OPERATIONS,
    *openapi.OPERATIONS,
)
# What a misbehaving path or method is called in the error body.
HTTP_CODES: Final = {404: "unknown_url", 405: "method_not_allowed"}


def create_app(
    front: Front, config: GatewaySettings, keyring: Keyring, metrics: Metrics
) -> ASGIApp:
    """Every route, with errors in OpenAI's form, behind the gate."""
    routes = routes_of(Api(front, config, metrics, OPERATIONS))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _on_http_error})
    # A path with one slash too many is no path of ours, and a redirect would name the Host header.
    app.router.redirect_slashes = False
    policy = WebPolicy.of(config.http_host, config.allowed_hosts, config.cors_origins)
    return Gate(app, keyring, policy)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:128]}: {error.detail}"
    code = HTTP_CODES.get(error.status_code)
    refused = errors.HttpError(error.status_code, message, code)
    return JsonResponse(errors.body_of(refused), error.status_code, headers=error.headers)
