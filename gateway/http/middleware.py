"""Around every HTTP exchange: its name, who calls, and one form for what goes wrong.

Plain ASGI, so that streams pass untouched. Nothing behind it runs for a page that may not call, or
for a caller without a key.
"""

import secrets
from collections.abc import Awaitable
from functools import partial
from typing import Any, Final

import structlog
from msgspec import Struct
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http import errors
from gateway.http.json_reply import to_json
from gateway.http.web_pages import WebPolicy
from gateway.requests.validation import REQUEST_ID
from gateway.tenants import AUTHORIZATION_CHARS_MAX, Keyring
from service_kit.errors import KaitenError

log = structlog.get_logger()

# What load balancers, Prometheus and people without a key may ask.
OPEN_PATHS: Final = frozenset(
    {
        "/",
        "/dashboard",
        "/health",
        "/livez",
        "/ready",
        "/readyz",
        "/version",
        "/openapi.json",
        "/docs",
        "/metrics",
    }
)
# Files are sent as forms. A page may do so without asking, but names itself: see `WebPolicy`.
FILES_PATH: Final = "/v1/files"
SHOULD_RETRY: Final = b"x-should-retry"


# Pages may send what an SDK sends (x-stainless-…), and must read what it decides by.
CORS: Final[dict[str, Any]] = {
    "allow_methods": ["GET", "POST", "DELETE"],
    "allow_headers": ["*"],
    "expose_headers": [
        "x-request-id",
        "x-should-retry",
        "retry-after",
        "retry-after-ms",
        "x-ignored-fields",
    ],
}


class GatewayMiddleware:
    """Puts `request_id` and `tenant` into the scope's state. Every answer carries the id, and every
    one that is an error `x-should-retry`: without it SDKs send again what can never succeed."""

    def __init__(self, app: ASGIApp, keyring: Keyring, policy: WebPolicy) -> None:
        self._app = app
        self._keyring = keyring
        self._policy = policy
        origins = sorted(policy.origins)
        self._inner = CORSMiddleware(self._admit, origins, **CORS) if origins else self._admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _in_origin_form(scope)
        request_id = _request_id(header(scope, "x-request-id"))
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": request_id, "is_started": False}

        # No coroutine of its own: it lies on the way of every event of a stream.
        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                state["is_started"] = True
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if message["status"] >= 400 and all(name != SHOULD_RETRY for name, _ in headers):
                    headers.append((SHOULD_RETRY, b"false"))
                message = {**message, "headers": headers}
            return send(message)

        refusal = self._policy.refusal(header(scope, "host"), header(scope, "origin"))
        if refusal is not None:
            await _refuse(send_named, refusal)
            return
        await self._inner(scope, receive, send_named)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                authorization = header(scope, "authorization")[:AUTHORIZATION_CHARS_MAX]
                peer = (scope.get("client") or ("",))[0]
                scope["state"]["tenant"] = await self._keyring.admit(authorization, peer)
                scope["state"]["key_owner"] = partial(self._keyring.tenant_of, authorization)
            _check_content_type(scope)
            await self._app(scope, receive, send)
        except KaitenError as error:
            await _refuse(send, error)
        # The one place where a fault of ours becomes an answer.
        except Exception as error:
            error_id = secrets.token_hex(6)
            log.error("http.crashed", path=scope["path"], error_id=error_id, exc_info=error)
            if not scope["state"]["is_started"]:
                await _answer(send, 500, errors.internal(error_id), {})


def _in_origin_form(scope: Scope) -> Scope:
    """A target may be a whole URI, whose authority then counts as the Host (RFC 9112, 3.2.2)."""
    scheme, _, rest = scope["path"].partition("://")
    if scheme.lower() not in ("http", "https"):
        return scope
    authority, _, path = rest.partition("/")
    others = [each for each in scope["headers"] if each[0] != b"host"]
    host = (b"host", authority.encode("latin-1", "replace"))
    return {**scope, "path": f"/{path}", "headers": [host, *others]}


def header(scope: Scope, name: str) -> str:
    """A header's value, or nothing. ASGI gives names in lower case."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(value.decode("latin-1"))
    return ""


def _check_content_type(scope: Scope) -> None:
    """A page may send any other type without asking first, and a body without one."""
    has_body = header(scope, "content-length") not in ("", "0") or header(
        scope, "transfer-encoding"
    )
    if scope["method"] != "POST" or not has_body:
        return
    wanted = "multipart/form-data" if scope["path"] == FILES_PATH else "application/json"
    given = header(scope, "content-type").partition(";")[0].strip().lower()
    coding = header(scope, "content-encoding").strip().lower()
    if given != wanted:
        rule = f"content-type: must be {wanted}, got {given[:128]!r}"
    elif coding not in ("", "identity"):
        rule = f"content-encoding: bodies are not unpacked, got {coding[:128]!r}"
    else:
        return
    raise errors.HttpError(415, rule, "unsupported_media_type")


def _request_id(given: str) -> str:
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


async def _refuse(send: Send, error: KaitenError) -> None:
    await _answer(
        send, errors.row_of(error).status, errors.body_of(error), errors.headers_of(error)
    )


async def _answer(send: Send, status: int, body: Struct, extra: dict[str, str]) -> None:
    raw = to_json(body)
    if status == 401:
        extra = extra | {"www-authenticate": "Bearer"}
    extra = extra | {"content-type": "application/json", "content-length": str(len(raw))}
    headers = [(key.encode(), value.encode()) for key, value in extra.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
