"""uvicorn inside our own event loop: our sockets, our signals, our log."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import uvicorn

from gateway.http.connection import Connection, ConnectionLimits
from service_kit.addresses import bind_socket

KEEP_ALIVE_S: Final = 15
BACKLOG: Final = 512
HEADERS_BYTES_MAX: Final = 64 << 10


class _Server(uvicorn.Server):
    """Signals belong to the service's lifecycle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """bind → start → serve → stop."""

    def __init__(
        self, app: Any, host: str, port: int, limits: ConnectionLimits | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                lifespan="off",
                ws="none",
                # A class is wanted to be called, which a partial is for.
                http=partial(Connection, limits or ConnectionLimits()),  # type: ignore[arg-type]
                h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                server_header=False,
                backlog=BACKLOG,
            )
        )

    def bind(self) -> int:
        """Take the port (0: any free one). ConfigError says why not."""
        self._socket = bind_socket(self._host, self._port, "--http-port")
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Answer from now on."""
        assert self._socket is not None, "bind first"
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await self._server.is_up.wait()

    async def serve(self) -> None:
        """Until the server ends, which it only does by `stop` or by crashing."""
        assert self._task is not None, "start first"
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Close what is open, after a moment for what is being answered."""
        self._server.should_exit = True
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
        if self._socket is not None:
            self._socket.close()
