"""Bodies of HTTP requests: bounded in bytes and time, one by one and all together."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Receive, Scope

from gateway.http.errors import HttpError
from gateway.http.json_body import JsonBody
from gateway.http.middleware import header
from service_kit.errors import InvalidRequest, Overloaded

# So much of each body is not counted among those of all: small requests always find room.
FREE_BYTES: Final = 64 << 10
# Of a refused body, taken in and dropped, in multiples of what a body may have: many clients look
# for the answer only when all is sent, and a connection closed before that is reset.
REST_BODIES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """`bytes_max` and `values_max` of one body; `reading_bytes_max` of all that are coming in."""

    bytes_max: int
    values_max: int
    read_s_max: float
    reading_bytes_max: int


class Bodies:
    """Reads them. One per gateway. `share`: a keyring's."""

    def __init__(self, limits: BodyLimits, share: Callable[[int], int]) -> None:
        self._limits = limits
        self._share = share
        self._reading_bytes = 0
        self._of_tenant = Counter[str]()
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Bodies({self._reading_bytes} of {self._limits.reading_bytes_max} bytes)"

    async def read(self, scope: Scope, receive: Receive, hashed: bytes = b"") -> JsonBody:
        """The whole body; HttpError, InvalidRequest or Overloaded as soon as it is too much.

        Of what is refused the rest is dropped first, up to `REST_BODIES`.
        """
        limit_s = self._limits.read_s_max
        parts = _Parts(receive, self._turn)
        try:
            async with asyncio.timeout(limit_s):
                try:
                    self._check_length(scope)
                    return await self._read(parts, hashed, scope["state"]["tenant"].name)
                except (HttpError, InvalidRequest, Overloaded) as error:
                    # Without what it remembers, which is the body so far.
                    refused = error.with_traceback(None)
                # Who waits for leave to send has sent nothing.
                if not header(scope, "expect"):
                    await parts.drop(REST_BODIES * self._limits.bytes_max)
                raise refused
        except TimeoutError:
            raise HttpError(408, f"the body must be there within {limit_s:g} s", "slow") from None

    async def _read(self, parts: "_Parts", hashed: bytes, tenant: str) -> JsonBody:
        body, counted = JsonBody(self._limits.values_max, hashed), 0
        try:
            while not parts.is_over:
                part = await parts.next()
                if len(body) + len(part) > self._limits.bytes_max:
                    raise self._too_long()
                body.feed(part)
                counted += self._admit(len(body) - FREE_BYTES - counted, tenant)
            return body
        finally:
            self._reading_bytes -= counted
            self._of_tenant[tenant] -= counted

    def _admit(self, more: int, tenant: str) -> int:
        """Of all bodies that are coming in, so many bytes more, if any."""
        if more <= 0:
            return 0
        limit = self._limits.reading_bytes_max
        if self._reading_bytes + more > limit:
            live = self._reading_bytes
            raise Overloaded(
                "too many bytes of bodies are coming in",
                1.0,
                limit,
                live=live,
                subject="gateway",
                rule="bodies_bytes_max",
            )
        # One that is as large as may be fits all the same.
        limit = max(self._limits.bytes_max, self._share(limit))
        if (live := self._of_tenant[tenant]) + more > limit:
            raise Overloaded(
                f"too many bytes of bodies of tenant {tenant} are coming in",
                1.0,
                limit,
                live=live,
                subject="tenant",
                rule="bodies_bytes_max",
                tenant=tenant,
            )
        self._reading_bytes += more
        self._of_tenant[tenant] += more
        return more

    def _check_length(self, scope: Scope) -> None:
        length = header(scope, "content-length")
        if length.isdecimal() and int(length) > self._limits.bytes_max:
            raise self._too_long()

    def _too_long(self) -> HttpError:
        rule = f"the body must have at most {self._limits.bytes_max} bytes"
        return HttpError(413, rule, "too_long")


class _Parts:
    """What a client sends of one body.

    Large bodies take turns, a part each: all that came for fifty of them at once would hold
    everybody else up, and a connection whose turn has not come is not read.
    """

    def __init__(self, receive: Receive, turn: asyncio.Lock) -> None:
        self._receive = receive
        self._turn = turn
        self._bytes = 0
        self.is_over = False

    async def next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the client left before its body was read", "gone")
        self.is_over = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        self._bytes += len(part)
        if self._bytes > FREE_BYTES:
            async with self._turn:
                await asyncio.sleep(0)
        return part

    async def drop(self, bytes_max: int) -> None:
        """Take in what is left, or so many bytes of it."""
        while bytes_max > 0 and not self.is_over:
            bytes_max -= len(await self.next())
