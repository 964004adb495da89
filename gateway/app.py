"""The HTTP door: every route (`openai.routes`), behind the gate."""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.exceptions import HTTPException
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.cell.ledger_session import LedgerLink
from gateway.cell.operators import Operators
from gateway.http import errors
from gateway.http.middleware import GatewayMiddleware
from gateway.http.web_pages import WebPolicy
from gateway.openai import chat, completions, explain, health, models, openapi, tokenize
from gateway.openai.batches import files
from gateway.openai.batches import operations as batches
from gateway.openai.conversations import operations as conversations
from gateway.openai.operation import Api, Operation, routes_of
from gateway.openai.operators import archive, rehearsals, watch
from gateway.openai.pages import operations as pages
from gateway.openai.responses import operations as responses
from gateway.requests.generation_service import GenerationService
from gateway.settings import GatewaySettings
from gateway.tenants import Keyring
from service_kit.metrics import Metrics

OPERATIONS: Final[tuple[Operation, ...]] = (
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *responses.OPERATIONS,
    *conversations.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
    *explain.OPERATIONS,
    *watch.OPERATIONS,
    *archive.OPERATIONS,
    *rehearsals.OPERATIONS,
    *models.OPERATIONS,
    *tokenize.OPERATIONS,
    *health.OPERATIONS,
    *openapi.OPERATIONS,
    *pages.OPERATIONS,
)
# Of OpenAI's API and other servers': where there is what such a path is for.
ELSEWHERE: Final = {
    "/v1/chat/completions": "chats are not kept; POST /v1/responses keeps what it answers",
    "/v1/responses/compact": "nothing is compacted; truncation auto leaves out the oldest turns",
    "/v1/uploads": "POST /v1/files takes a file whole",
    "/v1/messages": "Anthropic's API is not here; there are /v1/chat/completions and /v1/responses",
    "/v1/vector_stores": "nothing is searched here; files are for /v1/batches",
    "/v1/prompts": "prompts are not kept; requests bring them whole",
    "/v1/edits": "there are /v1/completions and /v1/chat/completions",
    **dict.fromkeys(
        (
            *("/v1/assistants", "/v1/threads", "/v1/realtime", "/v1/live", "/v1/chatkit"),
            *("/v1/agents", "/v1/skills", "/v1/vaults"),
        ),
        "there are /v1/conversations and /v1/responses",
    ),
    **dict.fromkeys(
        ("/v1/organization", "/v1/projects", "/v1/safety"),
        "tenants and keys are in the gateway's file of keys, what is used in /metrics",
    ),
    **dict.fromkeys(
        ("/v1/webhook_endpoints", "/v1/webhook_event_types"),
        "nobody is called; a response's state is at GET /v1/responses/{id}",
    ),
    **dict.fromkeys(
        ("/chat", "/completions", "/models", "/responses", "/files", "/batches"),
        "OpenAI's paths begin with /v1",
    ),
    **dict.fromkeys(
        ("/generate", "/generate_stream", "/completion", "/invocations", "/api", "/v1/engines"),
        "there are /v1/completions and /v1/chat/completions",
    ),
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/moderations", "/v1/images"),
            *("/v1/audio", "/v1/videos", "/v1/fine_tuning", "/v1/evals", "/v1/containers"),
            *("/v1/decisions", "/v1/content_provenance_checks"),
            *("/embed", "/embeddings", "/rerank", "/score", "/classify", "/pooling"),
        ),
        "this server generates text, and nothing else",
    ),
    **dict.fromkeys(("/v1/tokenize", "/v1/detokenize"), "there are /tokenize and /detokenize"),
}
# Those that are no path of ours, though one with an id in its place is.
ABSENT: Final = ELSEWHERE.keys() - {each.path for each in OPERATIONS}
# Slashes too many, and a base URL with a /v1 before a path that has one.
SLIPS: Final = re.compile(r"/+(?=/|$)|^/v1(?=/+v1/)")
# What a misbehaving path or method is called in the error body.
HTTP_CODES: Final = {404: "unknown_url", 405: "method_not_allowed"}


def create_api(
    service: GenerationService,
    link: LedgerLink,
    operators: Operators,
    config: GatewaySettings,
    metrics: Metrics,
    share: Callable[[int], int],
) -> Api:
    """What the handlers of every route work with. `share`: a keyring's."""
    return Api(service, link, operators, config, metrics, OPERATIONS, share)


def create_app(api: Api, keyring: Keyring) -> ASGIApp:
    """Every route, with errors in OpenAI's form, behind the gate."""
    config = api.config
    # A path with one slash too many is no path of ours, and a redirect would name the Host header.
    router = Router(routes_of(api), redirect_slashes=False)
    policy = WebPolicy.of(config.http_host, config.allowed_hosts, config.cors_origins)
    return GatewayMiddleware(partial(_routed, router), keyring, policy)


async def _routed(router: Router, scope: Scope, receive: Receive, send: Send) -> None:
    """Starlette's middleware would lie on the way of every event; errors are the gate's."""
    # It tells the router to raise what would else be its own answer.
    scope["app"] = router
    try:
        if scope["path"] in ABSENT:
            raise HTTPException(404)
        await router(scope, receive, send)
    except HTTPException as error:
        path = scope["path"][:128]
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        takes = f"; it takes {', '.join(allowed)}" if any(allowed) else ""
        hint = takes + _elsewhere(router, scope) or "; GET /docs has all paths that there are"
        message = f"{scope['method']} {path}: {error.detail}{hint}"
        code = HTTP_CODES.get(error.status_code)
        raise errors.HttpError(error.status_code, message, code, error.headers) from None


def _elsewhere(router: Router, scope: Scope) -> str:
    """A word for who looks for what is here under another name."""
    path = scope["path"]
    right = {**scope, "path": SLIPS.sub("", path)}
    if right["path"] != path and any(
        each.matches(right)[0] is not Match.NONE for each in router.routes
    ):
        return f"; the path is {right['path'][:128]}"
    found = (rule for start, rule in ELSEWHERE.items() if f"{path}/".startswith(f"{start}/"))
    return next((f"; {rule}" for rule in found), "")
