"""The HTTP listener's own details."""

import asyncio
import socket
from typing import Any

from gateway.http_server import HttpServer


async def app(scope: Any, _receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_small_answers_are_not_held_back(monkeypatch: Any) -> None:
    """Nagle's algorithm and a client's delayed ACK make 40 ms of two writes."""
    accepted: list[socket.socket] = []
    accept = socket.socket.accept

    def noting(listener: socket.socket) -> tuple[socket.socket, Any]:
        connection, address = accept(listener)
        accepted.append(connection)
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", noting)
    server = HttpServer(app, "127.0.0.1", 0)
    port = server.bind()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
    assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
    [connection] = accepted
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    await server.stop()


async def test_an_answer_before_the_body_was_read_leaves_the_connection_usable() -> None:
    """A refusal (413, 401) comes early; the next request on the same connection is served."""
    server = HttpServer(app, "127.0.0.1", 0)
    port = server.bind()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b"x" * 1_000_000
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    replies = await asyncio.wait_for(reader.read(), 60)
    assert replies.count(b"HTTP/1.1 200 OK\r\n") == 2
    writer.close()
    await server.stop()
