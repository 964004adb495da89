"""Bytes that nobody asked for, on every port, and HTTP/2 used as a weapon: nothing dies, and a
stream beside it goes on."""

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support import frames
from tests.support.whole_stack import WholeStack, wait_until

RANDOM = random.Random(7)
TLS_HELLO = bytes.fromhex("1603010200010001fc0303") + RANDOM.randbytes(512)
GARBAGE: dict[str, bytes] = {
    "random bytes": RANDOM.randbytes(4096),
    "one byte": b"\x00",
    "a lot of zeros": b"\0" * 300_000,
    "TLS": TLS_HELLO,
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half an HTTP/1 request": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
    "HTTP/1 with an endless header": b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000,
    "HTTP/1 with a wrong length": b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "smuggling": (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
    ),
    "Redis": b"*1\r\n$8\r\nFLUSHALL\r\n",
    "half a preface": frames.PREFACE[:10],
    "a frame too long": frames.hello() + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "half a frame": frames.hello() + frames.opening(1, "/x")[:-5],
    "bad HPACK": frames.hello() + frames.frame(frames.HEADERS, 4, 1, b"\xff" * 40),
    "data for no stream": frames.hello() + frames.frame(frames.DATA, 0, 99, b"x" * 50),
    "an even stream": frames.hello() + frames.opening(2, "/x"),
    "a message longer than itself": (
        frames.hello()
        + frames.opening(1, "/kaiten.v1.InferenceService/Generate")
        + frames.frame(frames.DATA, 1, 1, b"\x00\xff\xff\xff\xffabc")
    ),
    "a compressed message of no compression": (
        frames.hello()
        + frames.opening(1, "/kaiten.v1.InferenceService/Generate")
        + frames.frame(frames.DATA, 1, 1, b"\x01\x00\x00\x00\x03abc")
    ),
}


def ports(stack: WholeStack) -> dict[str, str]:
    return {
        "gateway gRPC": stack.door.grpc,
        "gateway HTTP": stack.door.http.removeprefix("http://"),
        "scheduler": stack.scheduler_address,
        "worker": stack.worker_address,
    }


def throw(address: str, raw: bytes) -> None:
    """Send it and go, reading what comes back first if anything does."""
    # A peer that hangs up in mid-send has done the right thing.
    with suppress(OSError), frames.connect(address) as connection:
        connection.sendall(raw)
        connection.settimeout(0.02)
        connection.recv(4096)


@pytest.mark.parametrize("port", ["gateway gRPC", "gateway HTTP", "scheduler", "worker"])
def test_garbage_kills_nobody(whole_stack: WholeStack, port: str) -> None:
    for raw in GARBAGE.values():
        throw(ports(whole_stack)[port], raw)
    for _ in range(100):
        throw(ports(whole_stack)[port], RANDOM.randbytes(RANDOM.randrange(1, 3000)))
        throw(ports(whole_stack)[port], frames.hello() + RANDOM.randbytes(RANDOM.randrange(500)))
    whole_stack.check()


def test_garbage_from_many_at_once_and_held_open(whole_stack: WholeStack) -> None:
    held = [frames.connect(address) for address in ports(whole_stack).values() for _ in range(50)]
    try:
        for connection in held:
            with suppress(OSError):
                connection.sendall(b"P")
        whole_stack.check()
    finally:
        for connection in held:
            connection.close()


class Neighbour:
    """A client that streams all the while, one request after another."""

    def __init__(self, stack: WholeStack) -> None:
        self.tokens = 0
        self._error: Exception | None = None
        self._stack = stack
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._stream)

    def _stream(self) -> None:
        request = pb.GenerateRequest(text="The chef")
        request.sampling.max_tokens = 120
        request.sampling.ignore_eos = True
        try:
            with grpc.insecure_channel(self._stack.door.grpc) as channel:
                stub = InferenceServiceStub(channel)
                while not self._is_over.is_set():
                    for reply in stub.Generate(request, timeout=60):
                        self.tokens += reply.event.delta.token_count
        except grpc.RpcError as error:
            self._error = error

    def goes_on(self) -> None:
        """It has got more tokens since, and no error."""
        wanted = self.tokens + 30
        wait_until(lambda: self._error or self.tokens > wanted, "the neighbour goes on")
        assert self._error is None, self._error

    def __enter__(self) -> Self:
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()


def send_until_closed(address: str, raw: Callable[[int], bytes], times: int) -> list[int]:
    """Send pieces until the server has had enough; the kinds of the frames it sent. Who has been
    told to go away goes: the server waits for it for seconds.
    """
    received = bytearray()
    with frames.connect(address) as connection:
        connection.sendall(frames.hello())
        connection.settimeout(60.0)
        try:
            for index in range(times):
                connection.sendall(raw(index))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        with suppress(OSError):
            while frames.GOAWAY not in frames.kinds(bytes(received)) and (
                chunk := connection.recv(65536)
            ):
                received += chunk
    return frames.kinds(bytes(received))


def test_a_flood_of_pings_is_sent_away(whole_stack: WholeStack) -> None:
    ping = frames.frame(frames.PING, payload=b"flooding") * 100
    with Neighbour(whole_stack) as neighbour:
        seen = send_until_closed(whole_stack.door.grpc, lambda _: ping, 300)
        neighbour.goes_on()
    assert frames.GOAWAY in seen
    whole_stack.check()


def test_a_flood_of_settings_is_bounded(whole_stack: WholeStack) -> None:
    flood = frames.frame(frames.SETTINGS) * 100
    with Neighbour(whole_stack) as neighbour:
        send_until_closed(whole_stack.door.grpc, lambda _: flood, 300)
        neighbour.goes_on()
    whole_stack.check()


def test_rapid_resets_are_bounded(whole_stack: WholeStack) -> None:
    """Streams opened and reset in one breath, 20,000 of them over a few connections."""
    path = "/kaiten.v1.InferenceService/Generate"

    def open_and_reset(index: int) -> bytes:
        numbers = range(1 + index * 200, 1 + (index + 1) * 200, 2)
        return b"".join(frames.opening(n, path) + frames.reset(n) for n in numbers)

    with Neighbour(whole_stack) as neighbour:
        for _ in range(4):
            send_until_closed(whole_stack.door.grpc, open_and_reset, 50)
            # gRPC's own bound on what it has not begun would refuse newcomers at random.
            for _ in range(20):
                answer = frames.call(whole_stack.door.grpc, "/kaiten.v1.ModelService/ListModels")
                assert frames.DATA in frames.kinds(answer), answer
        neighbour.goes_on()
    whole_stack.check()
