"""One HTTP exchange on bare ASGI: bounded body in, JSON or events out, client gone noticed."""

import asyncio
import json
import secrets
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.openai_format import SSE_DONE, sse
from gateway.validate import REQUEST_ID
from service_kit.errors import KaitenError

JSON_TYPE: Final = b"application/json"
EVENTS_TYPE: Final = b"text/event-stream; charset=utf-8"


class Exchange:
    """A request's headers and the response being sent. At most one response is ever started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._headers = dict(scope["headers"])
        self._send = send
        self._is_started = False
        self._has_events = False
        given = self.header("x-request-id")
        self.request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)

    def header(self, name: str) -> str:
        """A header's value, or nothing. ASGI gives names in lower case."""
        return str(self._headers.get(name.encode(), b"").decode("latin-1"))

    async def send_json(
        self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        raw = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        extra = {"content-length": str(len(raw))} | (headers or {})
        await self._start(status, JSON_TYPE, extra)
        await self._send({"type": "http.response.body", "body": raw})

    async def start_events(self) -> None:
        """Headers of an event stream; proxies are asked not to hold it back."""
        self._has_events = True
        await self._start(
            200, EVENTS_TYPE, {"cache-control": "no-store", "x-accel-buffering": "no"}
        )

    async def send_events(self, raw: bytes) -> None:
        """Waits while the client does not read: back-pressure reaches the journal's reader."""
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    async def end_events(self, raw: bytes) -> None:
        await self._send({"type": "http.response.body", "body": raw})

    async def fail(self, error: KaitenError) -> None:
        """Tell the error: as a response, or as an event when the response is under way."""
        headers = errors.headers_of(error)
        await self._fail(errors.row_of(error).status, errors.body_of(error), headers)

    async def fail_internal(self, error_id: str) -> None:
        await self._fail(500, errors.internal(error_id), {})

    async def _fail(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        if not self._is_started:
            await self.send_json(status, body, headers)
        elif self._has_events:
            await self.end_events(sse(body) + SSE_DONE)

    async def _start(self, status: int, content_type: bytes, extra: dict[str, str]) -> None:
        self._is_started = True
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        headers += [(key.encode(), value.encode()) for key, value in extra.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def read_body(exchange: Exchange, receive: Receive, bytes_max: int) -> bytes:
    """The whole body, refused as soon as it is known to be too long."""
    length = exchange.header("content-length")
    too_long = errors.HttpError(413, f"the body must have at most {bytes_max} bytes", "too_long")
    if length.isdecimal() and int(length) > bytes_max:
        raise too_long
    raw = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise errors.HttpError(400, "the client left before its body was read", "gone")
        raw += message.get("body", b"")
        if len(raw) > bytes_max:
            raise too_long
        if not message.get("more_body", False):
            return bytes(raw)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but not for nobody: it is cancelled when the client disconnects."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
