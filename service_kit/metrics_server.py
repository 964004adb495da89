"""A page for Prometheus, served by a thread, for processes that have no HTTP of their own."""

import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import structlog

log = structlog.get_logger()

# At once: each takes a thread and a descriptor, and whoever drips keeps them for hours.
CONNECTIONS_MAX: Final = 16
# Of a client that says nothing, or reads nothing.
SILENT_S_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a scrape is answered with."""

    body: bytes
    content_type: str


class MetricsServer:
    """`page` is given the header Accept, and called on threads of its own. Close it at the end."""

    def __init__(self, host: str, port: int, page: Callable[[str], Page]) -> None:
        """OSError for an address that cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            timeout = SILENT_S_MAX

            def do_GET(self) -> None:
                found = page(self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", found.content_type)
                self.send_header("Content-Length", str(len(found.body)))
                self.end_headers()
                self.wfile.write(found.body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: somebody looks every few seconds."""

        self._server = _server_of(host)((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()


def _server_of(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def __init__(self, *given: Any) -> None:
            self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
            super().__init__(*given)

        def process_request(self, request: Any, client_address: Any) -> None:
            if self._free.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._free.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Who has left is nobody's matter; left alone both are a trace on stderr."""
            error = sys.exception()
            if not isinstance(error, OSError):
                log.error("metrics.failed", exc_info=error)

    return Server
