"""HTTP/2 by hand, for what no library would send."""

import socket
import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_HEADERS: Final = 4
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


def connect(address: str, timeout_s: float = 10.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def kinds(raw: bytes) -> list[int]:
    """The kinds of the frames in what a server sent."""
    found, at = [], 0
    while at + 9 <= len(raw):
        found.append(raw[at + 3])
        at += 9 + int.from_bytes(raw[at : at + 3], "big")
    return found
