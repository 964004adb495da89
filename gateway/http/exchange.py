"""One HTTP exchange on bare ASGI: body in, JSON or events out, client gone noticed."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any, Final

import structlog
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from gateway.http import errors
from gateway.http.bodies import Bodies
from gateway.http.json_body import JsonBody
from gateway.http.json_reply import DONE, PING, to_event, to_json
from gateway.http.middleware import header
from gateway.requests.validation import REQUEST_ID
from gateway.tenants import Tenant
from service_kit.errors import InvalidRequest, KaitenError, NotFound

EVENTS_TYPE: Final = "text/event-stream; charset=utf-8"
KEY_HEADER: Final = "idempotency-key"

log = structlog.get_logger()


class HttpExchange:
    """A request's headers and the response being sent. At most one response is ever started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.arrived_ns = perf_counter_ns()
        self._send = send
        # Asked for at every event it would cost a system call each time.
        self._now_s = asyncio.get_running_loop().time
        self._is_started = False
        self._has_events = False
        self._sent_at_s = 0.0
        # Of the answer, whatever it is.
        self.headers: dict[str, str] = {}
        self.body_digest = b""
        # Whether what is asked goes on without who asked.
        self.keeps_running = False
        # While no worker is there: for as long as it has, whatever the gateway's own bound is.
        self.awaits_workers = False

    @property
    def tenant(self) -> Tenant:
        """Who asks. Paths that need no key have none."""
        tenant: Tenant = self.scope["state"]["tenant"]
        return tenant

    def ask_key_again(self) -> None:
        """For what has no end: the key may be gone since, or its role. Raises as the door does."""
        self.scope["state"]["tenant"] = self.scope["state"]["key_owner"]()

    @property
    def path(self) -> Mapping[str, str]:
        """The parts of the path that have a name."""
        names: Mapping[str, str] = self.scope["path_params"]
        return names

    def header(self, name: str) -> str:
        """A header's value, or nothing."""
        return header(self.scope, name)

    def new_id(self, *, of_body: bool = False) -> str:
        """24 hexadecimal digits for what is made: the same for the same key of a client (`of_body`:
        and the same body), which may not know whether it was heard.
        """
        if not (key := self.header(KEY_HEADER)):
            return secrets.token_hex(12)
        if not REQUEST_ID.fullmatch(key):
            raise InvalidRequest(KEY_HEADER, f"must match {REQUEST_ID.pattern}")
        named = key.encode() + (self.body_digest if of_body else b"")
        return hashlib.sha256(named).hexdigest()[:24]

    @property
    def is_sent_again(self) -> bool:
        """By an SDK that has not heard the answer: OpenAI's count how often."""
        return self.header("x-stainless-retry-count") not in ("", "0")

    def accepted(self) -> None:
        """What was asked is in the ledger; what is left is to tell what becomes of it."""

    async def send_json(
        self, status: int, reply: Struct, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.send(status, to_json(reply), headers=headers)

    async def send(
        self,
        status: int,
        raw: bytes,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """The whole answer."""
        extra = {"content-length": str(len(raw)), **(headers or {})}
        await self._start(status, content_type, extra)
        await self._send({"type": "http.response.body", "body": raw})

    async def send_stream(
        self, content_type: str, length: int, pieces: AsyncIterator[bytes]
    ) -> None:
        """The whole answer, as its pieces come."""
        await self._start(200, content_type, {"content-length": str(length)})
        async for piece in pieces:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def start_events(self) -> None:
        """Headers of an event stream; proxies are asked not to hold it back."""
        self._has_events = True
        await self._start(
            200, EVENTS_TYPE, {"cache-control": "no-store", "x-accel-buffering": "no"}
        )

    async def send_events(self, raw: bytes) -> None:
        """Waits while the client does not read: back-pressure reaches the journal's reader."""
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})
        self._sent_at_s = self._now_s()

    @asynccontextmanager
    async def pinged(self, silent_s_max: float) -> AsyncIterator[None]:
        """While events are being sent: a comment whenever there was none for so long."""
        pinging = asyncio.create_task(self._ping(silent_s_max))
        try:
            yield
        finally:
            pinging.cancel()
            await asyncio.wait({pinging})

    async def _ping(self, silent_s_max: float) -> None:
        self._sent_at_s = self._now_s()
        while True:
            due_s = self._sent_at_s + silent_s_max - self._now_s()
            if due_s > 0:
                await asyncio.sleep(due_s)
            else:
                await self.send_events(PING)

    async def end_events(self, raw: bytes) -> None:
        await self._send({"type": "http.response.body", "body": raw})

    async def fail(self, error: KaitenError) -> None:
        """Tell the error: as a response, or as an event when the response is under way."""
        headers = errors.headers_of(error)
        await self._fail(errors.row_of(error).status, errors.body_of(error), headers)

    async def fail_internal(self, error_id: str) -> None:
        await self._fail(500, errors.internal(error_id), {})

    async def _fail(self, status: int, body: Struct, headers: dict[str, str]) -> None:
        if not self._is_started:
            await self.send_json(status, body, headers)
        elif self._has_events:
            await self.end_events(to_event(body) + DONE)

    async def _start(self, status: int, content_type: str, extra: dict[str, str]) -> None:
        self._is_started = True
        told = {"content-type": content_type} | self.headers | extra
        headers = [(key.encode(), value.encode()) for key, value in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


@contextmanager
def gone_already(exchange: HttpExchange) -> Iterator[None]:
    """What is to be deleted may not be there any more for who asks again: it is as they want it,
    and an error would be told to somebody who has asked once.
    """
    try:
        yield
    except NotFound:
        if not exchange.is_sent_again:
            raise


async def answer(
    work: Callable[[HttpExchange, JsonBody], Coroutine[Any, Any, None]],
    scope: Scope,
    receive: Receive,
    send: Send,
    bodies: Bodies | None = None,
    hashed: bytes = b"",
) -> None:
    """One exchange from its body to its end; whatever goes wrong is told in the right form.

    Without `bodies` none is read. `hashed` is part of the body's identity."""

    async def read_and_work(exchange: HttpExchange) -> None:
        body = JsonBody() if bodies is None else await bodies.read(scope, receive, hashed)
        exchange.body_digest = body.digest
        await until_gone(receive, work(exchange, body))

    await telling(HttpExchange(scope, send), read_and_work)


async def telling(exchange: HttpExchange, work: Callable[[HttpExchange], Awaitable[None]]) -> None:
    """Whatever goes wrong is told in the right form."""
    try:
        await work(exchange)
    except KaitenError as error:
        await exchange.fail(error)
    # A fault of ours, perhaps in mid-stream, where only an event can tell of it.
    except Exception as error:
        error_id = secrets.token_hex(6)
        log.error("http.crashed", path=exchange.scope["path"], error_id=error_id, exc_info=error)
        await exchange.fail_internal(error_id)


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


def now_s() -> int:
    """Unix seconds, as OpenAI's objects carry them."""
    return int(datetime.now(UTC).timestamp())
