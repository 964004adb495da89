"""A real browser, and web servers of other sites whose pages it shows."""

import json
import os
import queue
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Site:
    """A web server of somebody else: it serves a page and modules, and hears reports."""

    def __init__(self, modules: Path | None = None) -> None:
        self.page = ""
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/":
                    self._answer(site.page.encode())
                elif modules is not None and (modules / self.path[1:]).is_file():
                    self._answer((modules / self.path[1:]).read_bytes(), "text/javascript")
                else:
                    self.send_error(404)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                site.reports.put(json.loads(raw))
                self._answer(b"")

            def _answer(self, raw: bytes, content_type: str = "text/html") -> None:
                self.send_response(200)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://page.example:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Site":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def command(folder: Path) -> list[str]:
    """Of a headless browser that keeps its things in this folder."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}"]
    flags += ["--host-resolver-rules=MAP *.example 127.0.0.1", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        # Chromium's own sandbox refuses to run for root.
        flags.append("--no-sandbox")
    return [CHROMIUM, *flags]
