"""One HTTP connection: uvicorn's, with an end to what it would wait for without one.

uvicorn closes a connection that is silent after an answer. It waits for ever for the first request,
for the rest of a header, and for the rest of a body that nobody reads any more; and it takes every
connection there is.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.http import errors
from gateway.http.json_reply import to_json
from service_kit.errors import KaitenError, Unavailable

# The one who reads a body gives up first, with an answer.
BODY_GRACE_S: Final = 5.0
# And what is large has a second more for each of these: 2 Mbit/s will do.
BODY_BYTES_PER_S: Final = 256 << 10
# A chunk costs as much as kilobytes of one, before anybody's key is seen: many must have some size.
CHUNKS_MAX: Final = 1024
CHUNK_BYTES_MIN: Final = 64
TWO_LENGTHS: Final = {b"content-length", b"transfer-encoding"}
# After so many bytes of a body it is looked at again.
LOOK_BYTES: Final = 8 << 10
# For an answer to a client that is sent away, before its connection is cut.
FAREWELL_S: Final = 1.0
# Whoever asks whether the process lives is answered however many connections there are: a gateway
# that has all it takes is healthy, and sent away its probes would have it ended with all of them.
PROBES: Final = (b"GET /livez ", b"GET /health ", b"GET /metrics ")
PROBES_MAX: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`headers_s_max` counts from the first byte (of a new connection: from its start)."""

    # As gRPC's metadata. Thousands of short ones cost ten milliseconds, before any key is seen.
    headers_bytes_max: int = 16 << 10
    headers_s_max: float = 10.0
    body_s_max: float = 60.0
    connections_max: int = 8192


class _Reader(h11.Connection):
    """Counts the chunks of the body that is coming in, and takes none of two lengths."""

    _chunks = _chunk_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            # A proxy that goes by the other one sees another request begin in this one's body.
            if {name for name, _ in event.headers} >= TWO_LENGTHS:
                raise h11.RemoteProtocolError("content-length beside transfer-encoding")
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._chunk_bytes += len(event.data)
        return event

    @property
    def is_crumbled(self) -> bool:
        return self._chunks > max(CHUNKS_MAX, self._chunk_bytes // CHUNK_BYTES_MIN)


class Connection(H11Protocol):
    """Invariant: while a request is not all there, `_ending` is set."""

    def __init__(self, limits: ConnectionLimits, **given: Any) -> None:
        super().__init__(**given)
        self.conn = self._reader = _Reader(h11.SERVER, limits.headers_bytes_max)
        self._limits = limits
        self._ending: asyncio.TimerHandle | None = None
        self._waits_for: Any = None
        self._body_since_s = 0.0
        # Bytes that have come: all, before the newest, and before those in which the body began.
        self._come = self._come_before = self._come_then = 0
        self._is_sent_away = False
        # It is one too many: for probes only.
        self._is_beyond = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self._limits.connections_max
        self._is_beyond = beyond > 0
        if beyond > PROBES_MAX:
            self._refuse_one_too_many()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._is_beyond and not self._goes_on and not data.startswith(PROBES):
            self._refuse_one_too_many()
        if not self._is_sent_away:
            self._come_before, self._come = self._come, self._come + len(data)
            most = self._limits.headers_bytes_max
            while data and not (self.transport.is_closing() or self._is_sent_away):
                # h11 asks how long the headers are only while they are not all there.
                cut = LOOK_BYTES
                if self.conn.their_state is h11.IDLE:
                    cut = max(1, most + 1 - len(self.conn.trailing_data[0]))
                super().data_received(data[:cut])
                data = data[cut:]
                if self._reader.is_crumbled:
                    self._refuse_crumbs()
                    return
            self._watch()

    @property
    def _goes_on(self) -> bool:
        """What comes is not the beginning of a request."""
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _refuse_one_too_many(self) -> None:
        if not self._is_sent_away:
            self._send_away(Unavailable("too many connections"))

    def _refuse_crumbs(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE:
            rule = f"chunks: more than {CHUNKS_MAX} must have {CHUNK_BYTES_MIN} bytes each"
            self._send_away(errors.HttpError(400, rule, None))
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if len(self.conn.trailing_data[0]) > self._limits.headers_bytes_max:
            msg = f"headers: must have at most {self._limits.headers_bytes_max} bytes"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_away(errors.HttpError(400, msg, None))
        else:
            self.transport.abort()
        if self.cycle is not None:
            # Who answers a request whose body is wrong has nobody to answer any more.
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # Silent from now on it ends by uvicorn's own clock.
            self._set(None)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set(None)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Of a request that is not all there: until when its next part must be."""
        state = self.conn.their_state
        if not self._is_sent_away and (state is not self._waits_for or self._ending is None):
            self._set(state if state in (h11.IDLE, h11.SEND_BODY) else None)

    def _set(self, state: Any) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._waits_for = state
        if state is h11.IDLE:
            self._ending = self.loop.call_later(self._limits.headers_s_max, self._no_headers)
        elif state is h11.SEND_BODY:
            self._body_since_s, self._come_then = self.loop.time(), self._come_before
            self._look_at_body()

    def _look_at_body(self) -> None:
        """Cut off, or looked at again when it is due by what has come by now."""
        more_s = (self._come - self._come_then) / BODY_BYTES_PER_S
        due_s = self._body_since_s + self._limits.body_s_max + BODY_GRACE_S + more_s
        if self.loop.time() >= due_s:
            self.transport.abort()
        else:
            self._ending = self.loop.call_at(due_s, self._look_at_body)

    def _no_headers(self) -> None:
        if self.conn.trailing_data[0]:
            rule = f"headers: must be there within {self._limits.headers_s_max:g} s"
            self._send_away(errors.HttpError(408, rule, "slow"))
        else:
            self.transport.close()

    def _send_away(self, error: KaitenError) -> None:
        """Without uvicorn, for which there is no request to answer."""
        self._is_sent_away = True
        self._set(None)
        status, raw = HTTPStatus(errors.row_of(error).status), to_json(errors.body_of(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(raw)),
            "connection": "close",
            "x-should-retry": "false",
            **errors.headers_of(error),
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + raw)
        # Cut off at once it would lose the answer if anything is still on its way here.
        if self.transport.can_write_eof():
            # Who has gone meanwhile has reset it.
            with suppress(OSError):
                self.transport.write_eof()
        self._ending = self.loop.call_later(FAREWELL_S, self.transport.abort)
