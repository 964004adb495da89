"""A fault of ours in front of a person at a terminal: where it happened, and nobody's secrets."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog

from gateway.http.bodies import Bodies, BodyLimits
from gateway.http.exchange import HttpExchange, answer
from gateway.http.json_body import JsonBody
from gateway.http.middleware import GatewayMiddleware
from gateway.http.server import HttpServer
from gateway.http.web_pages import WebPolicy
from gateway.tenants import Keyring, Tenant, digest
from service_kit import logs

KEY = "kt-91c2-never-to-be-shown"
PROMPT = "my diagnosis is not for the console"


class Terminal:
    """A pseudo-terminal in the place of stderr; `text` is what its person has seen."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.file = os.fdopen(slave, "w", buffering=1)
        self._seen = bytearray()
        # Beside whoever writes: a terminal that nobody reads from stops its writers.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def text(self) -> str:
        """Everything, after the end of writing."""
        self.file.close()
        self._reader.join(60)
        os.close(self._master)
        return self._seen.decode()

    def _read(self) -> None:
        try:
            while part := os.read(self._master, 4096):
                self._seen += part
        except OSError:
            return  # Linux: the other side was closed


BODIES = Bodies(
    BodyLimits(
        bytes_max=1 << 20,
        values_max=100,
        read_s_max=60.0,
        reading_bytes_max=1 << 20,
    ),
    Keyring().share,
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown.file)
    logs.configure("gateway")
    yield shown
    structlog.reset_defaults()
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)


async def crash(_exchange: HttpExchange, body: JsonBody) -> None:
    text = body.take()["prompt"]
    raise RuntimeError(f"a fault of ours after {len(text)} characters")


async def crash_in_an_exchange(scope: Any, receive: Any, send: Any) -> None:
    await answer(crash, scope, receive, send, BODIES)


async def crash_before_one(scope: Any, receive: Any, send: Any) -> None:
    text = (await receive())["body"].decode()
    raise RuntimeError(f"a fault of ours after {len(text)} characters")


@pytest.mark.parametrize("app", [crash_in_an_exchange, crash_before_one])
async def test_a_crash_shows_neither_prompt_nor_key(app: Any, terminal: Terminal) -> None:
    keyring = Keyring([(digest(KEY), Tenant(name="acme"))])
    server = HttpServer(
        GatewayMiddleware(app, keyring, WebPolicy.of("127.0.0.1", (), ())), "127.0.0.1", 0
    )
    port = server.bind()
    await server.start()
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"prompt": PROMPT},
            headers={"authorization": f"Bearer {KEY}"},
        )
    await server.stop()
    assert reply.status_code == 500
    shown = await asyncio.to_thread(terminal.text)
    assert KEY not in shown
    assert PROMPT not in shown
    assert "http.crashed" in shown
    assert "a fault of ours after" in shown
    assert __file__.rpartition("/")[2] in shown


async def test_a_librarys_crash_shows_no_more(terminal: Terminal) -> None:
    """What comes by the standard library's logging has the same form."""
    try:
        secret = KEY
        raise RuntimeError(f"with {len(secret)}")
    except RuntimeError:
        logging.getLogger("uvicorn.error").exception("it broke")
    shown = await asyncio.to_thread(terminal.text)
    assert KEY not in shown
    assert "it broke" in shown
    assert f"RuntimeError: with {len(KEY)}" in shown
