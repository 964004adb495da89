"""HTTP/2 by hand, for what no library would send."""

import socket
import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4
CANCEL: Final = struct.pack(">I", 8)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Length, kind, flags, stream, payload."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + _number(stream) + payload


def _number(stream: int) -> bytes:
    return struct.pack(">I", stream)


def hello() -> bytes:
    """What every connection begins with."""
    return PREFACE + frame(SETTINGS)


def literal(name: str, value: str) -> bytes:
    """A header in HPACK, literal and not indexed; both shorter than 127 bytes."""
    raw_name, raw_value = name.encode(), value.encode()
    return bytes((0, len(raw_name))) + raw_name + bytes((len(raw_value),)) + raw_value


def opening(stream: int, path: str) -> bytes:
    """The HEADERS frame of a gRPC call."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(literal(name, value) for name, value in headers.items())
    return frame(HEADERS, END_HEADERS, stream, block)


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, CANCEL)


def connect(address: str, timeout_s: float = 60.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def call(address: str, path: str, message: bytes = b"") -> bytes:
    """A unary call on a connection of its own; all that came back until its stream ended."""
    body = b"\0" + struct.pack(">I", len(message)) + message
    with connect(address) as connection:
        connection.sendall(hello() + opening(1, path) + frame(DATA, END_STREAM, 1, body))
        received = b""
        while not _has_ended(received, 1):
            chunk = connection.recv(65536)
            assert chunk, f"hung up on after {received!r}"
            received += chunk
    return received


def _has_ended(raw: bytes, stream: int) -> bool:
    return any(
        number == stream and (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM))
        for kind, flags, number in _heads(raw)
    )


def kinds(raw: bytes) -> list[int]:
    """The kinds of the frames in what a server sent."""
    return [kind for kind, _, _ in _heads(raw)]


def _heads(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Kind, flags and stream of every frame."""
    at = 0
    while at + 9 <= len(raw):
        yield raw[at + 3], raw[at + 4], int.from_bytes(raw[at + 5 : at + 9], "big")
        at += 9 + int.from_bytes(raw[at : at + 3], "big")
