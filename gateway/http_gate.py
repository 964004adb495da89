"""Around every HTTP exchange: its name, who calls, and one form for what goes wrong.

Plain ASGI, so that streams pass untouched. Nothing behind it runs for a caller without a key.
"""

import json
import secrets
from typing import Any, Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.tenants import AUTHORIZATION_CHARS_MAX, Keyring
from gateway.validate import REQUEST_ID
from service_kit.errors import KaitenError

log = structlog.get_logger()

# What load balancers, Prometheus and people without a key may ask.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/version", "/openapi.json", "/metrics"})


class Gate:
    """Puts `request_id` and `tenant` into the scope's state; the id is in every answer."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(header(scope, "x-request-id"))
        is_started = False

        async def send_named(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                named = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": named}
            await send(message)

        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        try:
            if scope["path"] not in OPEN_PATHS:
                authorization = header(scope, "authorization")[:AUTHORIZATION_CHARS_MAX]
                state["tenant"] = self._keyring.tenant_of(authorization)
            await self._app(scope, receive, send_named)
        except KaitenError as error:
            status, body = errors.row_of(error).status, errors.body_of(error)
            await _answer(send_named, status, body, errors.headers_of(error))
        # The one place where a fault of ours becomes an answer.
        except Exception as error:
            error_id = secrets.token_hex(6)
            log.error("http.crashed", path=scope["path"], error_id=error_id, exc_info=error)
            if not is_started:
                await _answer(send_named, 500, errors.internal(error_id), {})


def header(scope: Scope, name: str) -> str:
    """A header's value, or nothing. ASGI gives names in lower case."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(value.decode("latin-1"))
    return ""


def _request_id(given: str) -> str:
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


async def _answer(send: Send, status: int, body: dict[str, Any], extra: dict[str, str]) -> None:
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if status == 401:
        extra = extra | {"www-authenticate": "Bearer"}
    extra = extra | {"content-type": "application/json", "content-length": str(len(raw))}
    headers = [(key.encode(), value.encode()) for key, value in extra.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
