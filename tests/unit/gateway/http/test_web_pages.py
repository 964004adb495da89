"""Which Host and Origin are ours, by what the server listens on."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.http.web_pages import WebPolicy
from gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "is_fine"),
    [
        ("127.0.0.1", (), "localhost:8000", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.2", (), "evil.example", False),
        ("localhost", (), "evil.example", False),
        ("::1", (), "[::1]:8000", True),
        ("::1", (), "evil.example", False),
        ("127.0.0.1", ("host.docker.internal",), "host.docker.internal:8000", True),
        ("127.0.0.1", ("host.docker.internal",), "evil.example", False),
        ("127.0.0.1", ("*",), "evil.example", True),
        # Bound elsewhere nobody knows our names, unless somebody says them.
        ("0.0.0.0", (), "evil.example", True),
        ("::", (), "evil.example", True),
        ("box.lan", ("chat.example",), "box.lan:8000", True),
        ("box.lan", ("chat.example",), "evil.example", False),
        # No browser: HTTP/1.0 needs no Host.
        ("127.0.0.1", (), "", True),
        ("127.0.0.1", (), "a b", False),
    ],
)
def test_hosts(bound: str, allowed: tuple[str, ...], host: str, is_fine: bool) -> None:
    refusal = WebPolicy.of(bound, allowed, ()).refusal(host, "")
    assert (refusal is None) is is_fine


@pytest.mark.parametrize(
    ("origin", "is_fine"),
    [
        ("", True),
        ("http://localhost:8000", True),
        ("https://localhost:8000", True),
        ("HTTP://LOCALHOST:8000", True),
        ("http://localhost:8001", False),
        ("http://localhost", False),
        ("app://localhost:8000", False),
        ("https://chat.example", True),
        ("https://chat.example.evil.example", False),
        ("http://chat.example", False),
        ("null", False),
    ],
)
def test_origins(origin: str, is_fine: bool) -> None:
    policy = WebPolicy.of("127.0.0.1", (), ("https://chat.example",))
    assert (policy.refusal("localhost:8000", origin) is None) is is_fine


@pytest.mark.parametrize(
    "wrong", ["https://chat.example/", "chat.example", "https://chat.example/path", "https://"]
)
def test_an_origin_that_no_browser_sends_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins must be like"):
        GatewaySettings(model=Path("m"), cors_origins=(wrong,))
