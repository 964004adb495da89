"""A file as it comes in, `multipart/form-data`: handed on in pieces, never held as a whole."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive, Scope

from gateway.http import connection
from gateway.http.errors import HttpError
from gateway.http.middleware import header
from ledger.batches.files import CHUNK_BYTES
from service_kit.errors import InvalidRequest

FIELD_BYTES_MAX: Final = 4096
FIELDS_MAX: Final = 8
# Of what is refused so much is taken in and dropped: many clients look for the answer when all is
# sent.
REST_BYTES_MAX: Final = 16 << 20


class Upload:
    """One file and the fields beside it. `chunks` first, then the others are known."""

    def __init__(
        self, scope: Scope, receive: Receive, *, file_bytes_max: int, read_s_max: float
    ) -> None:
        kind, options = parse_options_header(header(scope, "content-type"))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > 70:
            rule = "must be multipart/form-data with a boundary"
            raise HttpError(415, f"content-type: {rule}", "unsupported_media_type")
        self._receive = receive
        self._read_s_max = read_s_max
        # What comes makes it later.
        self._due_s = asyncio.get_running_loop().time() + read_s_max
        self._file_bytes_max = file_bytes_max
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        # The field that is coming in; None: the file, or nothing yet.
        self._field: str | None = None
        self._buffer = bytearray()
        self._is_whole = self._is_over = False
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size_bytes = 0

    async def chunks(self, count: Callable[[int], None]) -> AsyncIterator[bytes]:
        """Of the file, all of CHUNK_BYTES but the last. InvalidRequest, HttpError.

        `count` is told of more bytes of it, and may refuse them.
        """
        while not self._is_over:
            before = self.size_bytes
            self._feed(await self._part())
            count(self.size_bytes - before)
            while len(self._buffer) >= CHUNK_BYTES:
                yield bytes(self._buffer[:CHUNK_BYTES])
                del self._buffer[:CHUNK_BYTES]
        if not self._is_whole:
            raise InvalidRequest("body", "must be multipart/form-data to its last boundary")
        if self._buffer:
            yield bytes(self._buffer)

    async def drop(self) -> None:
        """Take in what is left, or some of it."""
        left = REST_BYTES_MAX
        while left > 0 and not self._is_over:
            left -= len(await self._part())

    async def _part(self) -> bytes:
        try:
            async with asyncio.timeout_at(self._due_s):
                message = await self._receive()
        except TimeoutError:
            self._is_over = True
            rule = f"the body must be there within {self._read_s_max:g} s"
            more = f"{connection.BODY_BYTES_PER_S >> 10} KiB of it"
            raise HttpError(408, f"{rule}, and a second for each {more}", "slow") from None
        if message["type"] == "http.disconnect":
            self._is_over = True
            raise HttpError(400, "the client left before its body was read", "gone")
        self._is_over = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        self._due_s += len(part) / connection.BODY_BYTES_PER_S
        return part

    def _feed(self, part: bytes) -> None:
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise InvalidRequest("body", f"must be multipart/form-data: {error}") from None

    # What the parser calls.

    def _begin_part(self) -> None:
        self._headers = {}

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _begin_data(self) -> None:
        given = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(given)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field = name
        if name == "file":
            if self.filename is not None:
                raise InvalidRequest("file", "must be given once")
            self._field = None
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255]
        elif len(self.fields) == FIELDS_MAX or name in self.fields:
            raise InvalidRequest("body", f"must have at most {FIELDS_MAX} fields, each once")
        else:
            self.fields[name] = ""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.size_bytes += end - start
            if self.size_bytes > self._file_bytes_max:
                rule = f"file: must have at most {self._file_bytes_max} bytes"
                raise HttpError(413, rule, "too_long")
            self._buffer += memoryview(data)[start:end]
            return
        value = self.fields[self._field] + data[start:end].decode("utf-8", "replace")
        if len(value) > FIELD_BYTES_MAX:
            rule = f"must have at most {FIELD_BYTES_MAX} characters"
            raise InvalidRequest(self._field[:64], rule)
        self.fields[self._field] = value

    def _end(self) -> None:
        self._is_whole = True


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"
