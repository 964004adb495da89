"""The HTTP door: every route, behind the gate."""

from functools import partial
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http import errors
from gateway.http.bodies import Bodies, BodyLimits
from gateway.http.middleware import Gate
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
from service_kit.metrics import Metrics

# What a misbehaving path or method is called in the error body.
HTTP_CODES: Final = {404: "unknown_url", 405: "method_not_allowed"}


def create_app(
    front: Front, config: GatewaySettings, keyring: Keyring, metrics: Metrics
) -> ASGIApp:
    """Every route, with errors in OpenAI's form, behind the gate."""
    # A path with one slash too many is no path of ours, and a redirect would name the Host header.
    router = Router(routes(front, config, metrics), redirect_slashes=False)
    policy = WebPolicy.of(config.http_host, config.allowed_hosts, config.cors_origins)
    return Gate(partial(_routed, router), keyring, policy)


async def _routed(router: Router, scope: Scope, receive: Receive, send: Send) -> None:
    """Starlette's middleware would lie on the way of every event; errors are the gate's."""
    # It tells the router to raise what would else be its own answer.
    scope["app"] = router
    try:
        await router(scope, receive, send)
    except HTTPException as error:
        message = f"{scope['method']} {scope['path'][:128]}: {error.detail}"
        code = HTTP_CODES.get(error.status_code)
        raise errors.HttpError(error.status_code, message, code, error.headers) from None


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
