"""uvicorn inside our own event loop: our sockets, our signals, our log."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import uvicorn

from gateway.http.connection import FAREWELL_S, Connection, ConnectionLimits
from gateway.http.open_files import NotTaken
from service_kit.addresses import bind_sockets

KEEP_ALIVE_S: Final = 15
BACKLOG: Final = 512
DATE_EVERY_S: Final = 1.0


class _Server(uvicorn.Server):
    """Signals belong to the service's lifecycle."""

    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext | None, handshake_s_max: float
    ) -> None:
        super().__init__(config)
        self._listening: dict[str, Any] = {"backlog": config.backlog}
        if tls is not None:
            self._listening |= {"ssl": tls, "ssl_handshake_timeout": handshake_s_max}
            self._listening |= {"ssl_shutdown_timeout": FAREWELL_S}
        self.is_up = asyncio.Event()
        self.is_over = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own makes its TLS from files, once, and waits a minute for a handshake."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self._connection, sock=each, **self._listening)
            for each in sockets or ()
        ]
        self.started = True
        self.is_up.set()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether it is over. A date is of seconds."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.is_over.wait(), DATE_EVERY_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own waits a tenth of a second for connections, also when there are none."""
        for server in self.servers:
            server.close()
        # Who was accepted before that is one.
        await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """bind → start → serve → stop."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        limits = limits or ConnectionLimits()
        self._host = host
        self._port = port
        self._sockets: list[socket.socket] = []
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                lifespan="off",
                ws="none",
                # A word of the client's for its own address, which wrong keys are noted by.
                proxy_headers=False,
                # A class is wanted to be called, which a partial is for.
                http=partial(Connection, limits),  # type: ignore[arg-type]
                h11_max_incomplete_event_size=limits.headers_bytes_max,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                server_header=False,
                backlog=BACKLOG,
            ),
            tls,
            limits.headers_s_max,
        )

    def bind(self) -> int:
        """Take the port (0: any free one). ConfigError says why not."""
        self._sockets = bind_sockets(self._host, self._port, "--http-port")
        return int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Answer from now on."""
        assert self._sockets, "bind first"
        asyncio.get_running_loop().set_exception_handler(NotTaken())
        self._task = asyncio.create_task(self._server.serve(sockets=self._sockets))
        await self._server.is_up.wait()

    async def serve(self) -> None:
        """Until the server ends, which it only does by `stop` or by crashing."""
        assert self._task is not None, "start first"
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Close what is open, after a moment for what is being answered."""
        self._server.should_exit = True
        self._server.is_over.set()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        for each in self._sockets:
            each.close()
