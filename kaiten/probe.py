"""The common answer to a health check without gRPC's library, which is slow to import.

A probe of a container is a process every few seconds: this one speaks as much HTTP/2 as one call of
`grpc.health.v1.Health/Check` needs, with what Python brings along.
"""

import socket
import struct
import time
from typing import Final

TIMEOUT_S: Final = 2.0

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Types and flags of frames, RFC 9113, section 6.
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS, _PADDED = 1, 4, 8
_FRAMES_MAX: Final = 64
_FRAME_BYTES_MAX: Final = 1 << 14
# An integer of HPACK in one byte; longer names are left to gRPC.
_TEXT_BYTES_MAX: Final = 126
# HealthCheckRequest without a service, behind gRPC's prefix of a message.
_EMPTY: Final = bytes(5)
# status = SERVING, field 1 of HealthCheckResponse.
_SERVING: Final = b"\0\0\0\0\2\x08\x01"


def says_serving(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """True: it said SERVING. False: anything else, and gRPC should ask for what it is.

    `address`: host:port, or unix:PATH; without TLS.
    """
    if len(address.encode()) > _TEXT_BYTES_MAX:
        return False
    try:
        with _connected(address, timeout_s) as connection:
            connection.sendall(_question(address))
            return _answer(connection, time.monotonic() + timeout_s) == _SERVING
    except (OSError, ValueError):
        return False


def _connected(address: str, timeout_s: float) -> socket.socket:
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    local = socket.socket(socket.AF_UNIX)
    try:
        local.settimeout(timeout_s)
        local.connect(address.removeprefix("unix:"))
    except OSError:
        local.close()
        raise
    return local


def _question(address: str) -> bytes:
    """All of a unary call for the whole process: settings, head and message."""
    authority = "localhost" if address.startswith("unix:") else address
    # \x83 and \x86 are entries of HPACK's static table, the rest literals after a name of it.
    head = (
        b"\x83"  # :method POST
        + b"\x86"  # :scheme http
        + (b"\x04" + _text("/grpc.health.v1.Health/Check"))  # :path
        + (b"\x01" + _text(authority))  # :authority
        + (b"\x0f\x10" + _text("application/grpc"))  # content-type
        + (b"\x00" + _text("te") + _text("trailers"))
    )
    frames = (
        (_SETTINGS, 0, 0, b""),
        (_HEADERS, _END_HEADERS, 1, head),
        (_DATA, _END_STREAM, 1, _EMPTY),
    )
    return _PREFACE + b"".join(_frame(*each) for each in frames)


def _answer(connection: socket.socket, give_up_at: float) -> bytes:
    """The message with its prefix; what there is of it when the call has ended."""
    answer = b""
    for _ in range(_FRAMES_MAX):
        length_and_kind, flags, stream = struct.unpack(">IBI", _read(connection, 9, give_up_at))
        length, kind = length_and_kind >> 8, length_and_kind & 0xFF
        payload = _read(connection, length, give_up_at)
        if kind == _DATA and stream == 1:
            answer += payload[1 : length - payload[0]] if flags & _PADDED else payload
        is_over = kind in (_RST_STREAM, _GOAWAY) or (stream == 1 and flags & _END_STREAM)
        if is_over or len(answer) >= len(_SERVING):
            break
    return answer


def _read(connection: socket.socket, size: int, give_up_at: float) -> bytes:
    """ValueError: more than a server of health checks says. OSError: not in time, or gone."""
    if size > _FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes; at most {_FRAME_BYTES_MAX}")
    found = b""
    while len(found) < size:
        connection.settimeout(max(give_up_at - time.monotonic(), 1e-3))
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _text(text: str) -> bytes:
    """With its length before it: a string of HPACK, below 127 bytes."""
    encoded = text.encode()
    return bytes([len(encoded)]) + encoded
