"""The forms that a request's target may have (RFC 9112, 3.2)."""

from typing import Any

import pytest

from gateway.http.middleware import GatewayMiddleware, header
from gateway.http.web_pages import WebPolicy
from gateway.tenants import Keyring

HOST = (b"host", b"127.0.0.1:8000")


async def asked(target: str, host: tuple[bytes, bytes] = HOST) -> tuple[int, str, str]:
    """Status, and the path and Host that the application is asked by; none: it is not asked."""
    seen = ["", ""]
    statuses: list[int] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen[:] = scope["path"], header(scope, "host")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        raise AssertionError("nobody reads")

    gate = GatewayMiddleware(app, Keyring(), WebPolicy.of("127.0.0.1", (), ()))
    headers = [host, (b"accept", b"*/*")]
    await gate({"type": "http", "method": "GET", "path": target, "headers": headers}, receive, send)
    return statuses[0], seen[0], seen[1]


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        ("/v1/models", "/v1/models", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/models", "/v1/models", "127.0.0.1:8000"),
        ("HTTPS://[::1]/v1/models", "/v1/models", "[::1]"),
        ("http://localhost", "/", "localhost"),
        # In the place of a path it is one.
        ("/http://localhost/v1", "/http://localhost/v1", "127.0.0.1:8000"),
        ("ftp://localhost/v1", "ftp://localhost/v1", "127.0.0.1:8000"),
    ],
)
async def test_a_whole_uri_is_its_path(target: str, path: str, host: str) -> None:
    assert await asked(target) == (200, path, host)


async def test_its_authority_is_judged_in_place_of_the_host() -> None:
    assert await asked("http://evil.example/v1/models") == (403, "", "")
    assert (await asked("http://a b@localhost/v1/models"))[0] == 403
    assert (await asked("http://localhost/", (b"host", b"evil.example")))[0] == 200
