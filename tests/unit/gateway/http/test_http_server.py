"""The HTTP listener's own details."""

import asyncio
import errno
import json
import os
import resource
import socket
from asyncio import selector_events
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import h11
import pytest
from structlog.testing import capture_logs

from gateway.http import connection
from gateway.http import server as http_server
from gateway.http.connection import CHUNK_BYTES_MIN, ConnectionLimits
from gateway.http.open_files import FILES_BESIDE, make_room
from gateway.http.server import HttpServer
from tests.support.answers import until

# Of a socket at once, by asyncio.
READ_BYTES: Final = 256 << 10


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


async def test_nobody_says_whose_address_theirs_is() -> None:
    """uvicorn's own takes a loopback client's word: a wrong key would be noted against another."""
    seen: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])
        await app(scope, receive, send)

    server = HttpServer(noting, "127.0.0.1", 0)
    port = server.bind()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n")
    assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
    assert seen == ["127.0.0.1"]
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


async def test_who_has_no_connection_ends_at_once(monkeypatch: Any) -> None:
    """And wakes for nothing but the date meanwhile."""
    slept_s: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float) -> None:
        slept_s.append(delay_s)
        await sleep(delay_s)

    server = HttpServer(app, "127.0.0.1", 0)
    server.bind()
    monkeypatch.setattr(asyncio, "sleep", noted)
    await server.start()
    await server.stop()
    assert not any(slept_s)


async def test_the_date_of_answers_goes_on(monkeypatch: Any) -> None:
    monkeypatch.setattr(http_server, "DATE_EVERY_S", 0.001)
    server = HttpServer(app, "127.0.0.1", 0)
    server.bind()
    await server.start()
    state = server._server.server_state
    for _ in range(3):
        before = state.default_headers
        async with asyncio.timeout(60):
            while state.default_headers is before:  # noqa: ASYNC110 - uvicorn says it to nobody
                await asyncio.sleep(0.001)
        assert state.default_headers[0][0] == b"date"
    await server.stop()


HEAD: Final = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
GET: Final = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
# Short enough for a test, long enough that whole requests come in time on a busy machine.
SHORT: Final = ConnectionLimits(headers_s_max=1.0, body_s_max=0.1)


@asynccontextmanager
async def listening(limits: ConnectionLimits) -> AsyncIterator[int]:
    server = HttpServer(app, "127.0.0.1", 0, limits)
    port = server.bind()
    await server.start()
    try:
        yield port
    finally:
        await server.stop()


async def told(port: int, *parts: bytes) -> bytes:
    """All that comes back until the server ends the connection, which is all that ends this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    reply = b""
    try:
        while part := await asyncio.wait_for(reader.read(1 << 16), 60):
            reply += part
    except ConnectionResetError:
        pass
    writer.close()
    with suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()
    return reply


def refused(reply: bytes, status: bytes, rule: str, *, again: bool = False) -> bool:
    """As everything else is that goes wrong, of which no request is made."""
    head, _, raw = reply.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"%d" % len(raw)
    assert headers[b"x-should-retry"] == (b"true" if again else b"false")
    assert (b"retry-after" in headers) is again
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert first == b"HTTP/1.1 " + status
    return rule in str(error["message"])


async def test_half_a_header_is_not_waited_for() -> None:
    async with listening(SHORT) as port:
        reply = await told(port, b"GET / HT")
        assert refused(reply, b"408 Request Timeout", "headers: must be there within 1 s")


async def test_what_is_no_request_is_refused_as_one() -> None:
    async with listening(ConnectionLimits()) as port:
        reply = await told(port, b"GET / HTTP/1.1\r\nno header\r\n\r\n" + GET)
        assert refused(reply, b"400 Bad Request", "Invalid HTTP request")
        assert reply.count(b"HTTP/1.1") == 1


async def test_who_never_says_anything_is_not_waited_for() -> None:
    async with listening(SHORT) as port:
        assert await told(port) == b""


async def test_half_a_second_header_is_not_waited_for() -> None:
    """After an answer uvicorn's own clock runs, which any byte stops."""
    # Longer than whoever sends is put aside between two lines.
    async with listening(ConnectionLimits(headers_s_max=3.0, body_s_max=0.1)) as port:
        reply = await told(port, GET, b"GET / HT")
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
        assert reply.count(b"HTTP/1.1 408") == 1


async def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(connection, "BODY_GRACE_S", 0.1)
    async with listening(SHORT) as port:
        reply = await told(port, HEAD + b"\r\n12345")
        assert reply.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize(("bytes_per_s", "is_there"), [(0.01, True), (1 << 20, False)])
async def test_a_body_that_comes_has_more_time_the_more_of_it_there_is(
    bytes_per_s: float, is_there: bool, monkeypatch: Any
) -> None:
    """A hundred seconds for each byte: what else would be cut off before its last is answered."""
    monkeypatch.setattr(connection, "BODY_GRACE_S", 0.0)
    monkeypatch.setattr(connection, "BODY_BYTES_PER_S", bytes_per_s)
    has_part = asyncio.Event()

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            if message["body"]:
                has_part.set()
        if message["type"] == "http.request":
            await app(scope, receive, send)

    limits = ConnectionLimits(body_s_max=1.0)
    server = HttpServer(reads, "127.0.0.1", 0, limits)
    port = server.bind()
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"Connection: close\r\n\r\n12345")
    await asyncio.wait_for(has_part.wait(), 60)
    await asyncio.sleep(1.2 * limits.body_s_max)
    with suppress(ConnectionResetError, BrokenPipeError):
        writer.write(b"67890")
        reply = b""
        with suppress(ConnectionResetError):
            reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n") is is_there
        writer.close()
    await server.stop()


@pytest.mark.parametrize("comes_later", [False, True])
async def test_a_body_that_is_none_is_no_fault_of_the_server(
    comes_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Though nobody reads it: anybody could fill the log with traces."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(ConnectionLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head if comes_later else head + b"no size\r\n")
        first = await asyncio.wait_for(reader.readline(), 60)
        assert first.split()[1] == (b"200" if comes_later else b"400")
        if comes_later:
            writer.write(b"no size\r\n")
        with suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_body_of_two_lengths_is_refused() -> None:
    """What comes behind it is no request: to whoever sent it, it may be a part of its body."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 28\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(ConnectionLimits()) as port:
        reply = await told(port, head + b"0\r\n\r\n" + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("answers_first", [False, True])
async def test_a_body_of_crumbs_is_sent_away(answers_first: bool) -> None:
    """A quarter of a megabyte of them held everybody up for a second."""

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        if answers_first:
            await app(scope, receive, send)
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request" and not answers_first:
            await app(scope, receive, send)

    server = HttpServer(reads, "127.0.0.1", 0)
    port = server.bind()
    await server.start()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    crumbs, chunks = b"1\r\nx\r\n" * 2_000, b"50\r\n%b\r\n" % (b"x" * 80) * 5_000
    end = b"0\r\n\r\n"
    reply = await told(port, head + crumbs + end)
    if not answers_first:
        rule = "chunks: more than 1024 must have 64 bytes each"
        assert refused(reply, b"400 Bad Request", rule)
    for body in (chunks, crumbs[:3_000]):
        reply = await told(port, head + body + end)
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    await server.stop()


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"50\r\n%b\r\n" % (b"x" * 80)])
async def test_nobody_waits_for_more_chunks_than_a_read_may_have(
    monkeypatch: Any, chunk: bytes
) -> None:
    """Each takes microseconds, and until all of a read are looked at nobody else is answered."""
    since, most = 0, 0
    next_event = h11.Connection.next_event

    def counted(self: h11.Connection) -> Any:
        nonlocal since, most
        event = next_event(self)
        since += isinstance(event, h11.Data) and event.chunk_end
        most = max(most, since)
        return event

    async def another() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    server = HttpServer(app, "127.0.0.1", 0)
    port = server.bind()
    await server.start()
    task = asyncio.create_task(another())
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    await told(port, head + chunk * 20_000 + b"0\r\n\r\n")
    task.cancel()
    assert 0 < most <= READ_BYTES // CHUNK_BYTES_MIN
    await server.stop()


async def test_a_request_that_is_all_there_has_all_the_time() -> None:
    """Limits are for what a client does not send, not for what it waits for."""
    answers = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await answers.wait()
        await app(scope, receive, send)

    server = HttpServer(slow, "127.0.0.1", 0, ConnectionLimits(headers_s_max=2.0, body_s_max=2.0))
    port = server.bind()
    await server.start()
    asyncio.get_running_loop().call_later(2.5, answers.set)
    reply = await told(port, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    await server.stop()


async def test_headers_have_an_end_however_they_come() -> None:
    """Thousands of them cost milliseconds each time, before anybody's key is seen."""
    last = b"Connection: close\r\n\r\n"
    few, many = (b"".join(b"x%d:\r\n" % n for n in range(count)) for count in (1_000, 9_000))
    async with listening(ConnectionLimits(headers_bytes_max=1 << 14)) as port:
        assert (await told(port, GET[:-2], few + last)).startswith(b"HTTP/1.1 200 OK\r\n")
        # Also where they end before a second look at so many.
        for too_many in (GET[:-2] + many, GET[:-2] + b"x:" + b"x" * (1 << 14) + b"\r\n"):
            reply = await told(port, too_many + last)
            rule = "headers: must have at most 16384 bytes"
            assert refused(reply, b"400 Bad Request", rule)


async def test_one_connection_too_many_is_told_so() -> None:
    async with listening(ConnectionLimits(connections_max=2)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in held:
            writer.write(GET)
            assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
        reply = await told(port, GET)
        assert refused(reply, b"503 Service Unavailable", "too many connections", again=True)
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        last = b"\r\nConnection: close\r\n\r\n"
        # The server hears of their ends in its own time.
        async with asyncio.timeout(60):
            while not (await told(port, GET.replace(b"\r\n\r\n", last))).startswith(
                b"HTTP/1.1 200"
            ):
                pass


async def test_a_gateway_with_all_its_connections_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is sent away has it ended, with every stream that it has."""
    monkeypatch.setattr(connection, "PROBES_MAX", 1)
    async with listening(ConnectionLimits(connections_max=1)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
        for path in (b"/livez", b"/health", b"/metrics"):
            probe = b"GET %s HTTP/1.1\r\nConnection: close\r\n" % path
            # However its bytes come.
            assert (await told(port, probe, b"Host: x\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        # One of them is kept for the next probe, and is of no use for anything else.
        probe = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
        kept, asks = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            asks.write(probe)
            assert (await asyncio.wait_for(kept.readuntil(b"\r\n0\r\n\r\n"), 60)).startswith(
                b"HTTP/1.1 200"
            )
        assert b"too many connections" in await told(port, probe), "there is an end to them"
        asks.write(GET)
        assert b"too many connections" in await asyncio.wait_for(kept.read(), 60)
        for each in (writer, asks):
            each.close()
            await each.wait_closed()


async def test_who_finds_no_file_is_told_of_once_and_taken_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio tells of each of 512 tries, each second, each with a trace."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(3)]
    async with listening(ConnectionLimits()) as port:
        opened = os.dup(0)
        os.close(opened)
        with capture_logs() as logs:
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened, limits[1]))
            try:
                for client in clients:
                    client.connect(("127.0.0.1", port))
                await until(lambda: bool(logs), "a word of it")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert [each["event"] for each in logs] == ["connections.not_taken"]
        assert "Too many open files" in logs[0]["reason"]
        assert not caplog.records
        for client in clients:
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(GET)
            assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
            writer.close()


@pytest.mark.parametrize(("connections", "is_enough"), [(16, True), (1 << 30, False)])
def test_as_many_files_as_connections_need_are_taken(connections: int, is_enough: bool) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = FILES_BESIDE - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        with capture_logs() as logs:
            make_room(connections)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert hard == limits[1]
    assert soft == (FILES_BESIDE + connections if is_enough else hard)
    assert [each["event"] for each in logs] == ["files.few"] * (not is_enough)


async def test_who_has_gone_before_the_refusal_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen of garbage behind a request: its client had reset the connection, and it looked as if
    the answer to the request had failed.
    """

    def reset(transport: Any) -> None:
        transport.abort()
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write_eof", reset)  # type: ignore[attr-defined]
    async with listening(ConnectionLimits()) as port:
        with suppress(ConnectionError):
            await told(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\nno HTTP\r\n\r\n")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
