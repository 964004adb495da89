"""Plays Jaeger where its image cannot be had: takes spans by OTLP and answers in its API's form.

It runs in a container (deploy/observability/stand-ins.Dockerfile), keeps every trace, and knows
`/api/services`, `/api/traces` and `/status`.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.collector import Collector, collecting


def traces(collector: Collector) -> list[dict[str, Any]]:
    """Of all services; who asks for one's finds it among them."""
    found: dict[str, list[dict[str, str]]] = {}
    for span in list(collector.spans.values()):
        found.setdefault(span.trace_id.hex(), []).append({"operationName": span.name})
    return [{"traceID": trace, "spans": spans} for trace, spans in found.items()]


def handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            data: Any = {"/status": "ok", "/api/services": sorted({*collector.services.values()})}
            body = {"data": traces(collector) if path == "/api/traces" else data.get(path)}
            self.send_response(200 if body["data"] is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    return Handler


def main() -> None:
    with collecting("0.0.0.0:4317") as collector:
        # The API's port, and that of the health check.
        servers = [ThreadingHTTPServer(("", port), handler(collector)) for port in (16686, 13133)]
        threads = [threading.Thread(target=each.serve_forever) for each in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
