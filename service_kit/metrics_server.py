"""A page for Prometheus, served by a thread, for processes that have no HTTP of their own."""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

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

    return Server
