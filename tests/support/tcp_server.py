"""A TCP server of this process that leaves no connection behind."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Its port; `handler` has each connection to itself, and it is closed after that.

    With the block every handler ends and every connection is closed. asyncio's own servers forget
    one that is in a handler's hands, or was accepted just before they were closed, and the
    collector complains of it in the midst of whichever test runs then.
    """
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    connections = dict[asyncio.Task[None], socket.socket]()

    def accept() -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            task = loop.create_task(_serve(connection, handler, tls))
            connections[task] = connection
            task.add_done_callback(connections.pop)

    loop.add_reader(listener, accept)
    try:
        yield listener.getsockname()[1]
    finally:
        loop.remove_reader(listener)
        listener.close()
        left = dict(connections)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for connection in left.values():
            connection.close()


async def _serve(connection: socket.socket, handler: Handler, tls: ssl.SSLContext | None) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        await handler(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    finally:
        transport.abort()
        await asyncio.sleep(0)
