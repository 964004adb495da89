"""A TCP relay in this process: a level-4 balancer, or a network that stops carrying packets."""

import asyncio
import itertools
import socket
import ssl
import struct
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.support.tcp_server import tcp_server


class Relay:
    """Connections go to the targets in turn. `is_silent`: bytes are dropped, nothing is closed.
    `tls`: what comes in is ended here, as by a proxy. `delay_s`: how long each way takes.
    """

    def __init__(
        self, *targets: str, tls: ssl.SSLContext | None = None, delay_s: float = 0.0
    ) -> None:
        self._delay_s = delay_s
        self.is_silent = False
        self.connections: list[str] = []
        self._targets = itertools.cycle(targets)
        self._writers: list[asyncio.StreamWriter] = []
        self._server = tcp_server(self._accept, tls)

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{await self._server.__aenter__()}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    def reset(self) -> None:
        """Every connection ends with a RST, to both sides."""
        writers, self._writers = self._writers, []
        for writer in writers:
            opened: socket.socket | None = writer.get_extra_info("socket")
            if opened is not None and not writer.transport.is_closing():
                linger = struct.pack("ii", 1, 0)
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = next(self._targets)
        self.connections.append(target)
        host, _, port = target.rpartition(":")
        if host == "unix":
            to_reader, to_writer = await asyncio.open_unix_connection(port)
        else:
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, to_writer]
        try:
            await asyncio.gather(self._carry(reader, to_writer), self._carry(to_reader, writer))
            to_writer.close()
            with suppress(OSError):
                await to_writer.wait_closed()
        finally:
            to_writer.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while raw := await source.read(65536):
                if self._delay_s:
                    asyncio.get_running_loop().call_later(self._delay_s, sink.write, raw)
                elif not self.is_silent:
                    sink.write(raw)
                    await sink.drain()
            if not self.is_silent:
                sink.close()
