"""Both doors of a gateway listen on the same addresses, whatever a host is called."""

import errno
import socket
from functools import partial
from typing import Any

import pytest

from gateway.http.server import HttpServer
from service_kit import addresses
from service_kit.addresses import bind_sockets
from service_kit.errors import ConfigError
from service_kit.grpc_server import bind, create_server
from tests.unit.gateway.http.test_http_server import app

LOOPBACKS = ("127.0.0.1", "::1")


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=60).close()
    except OSError:
        return False
    return True


@pytest.fixture
def here() -> list[str]:
    """Loopback addresses of this machine: one without IPv6 has one."""
    return [each for each in LOOPBACKS if addresses._is_here(each)]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of both, as `localhost` mostly is, also where there is no IPv6."""
    system = socket.getaddrinfo

    def told(host: Any, *given: Any, **named: Any) -> Any:
        hosts = LOOPBACKS if host == "both.test" else (host,)
        return [each for one in hosts for each in system(one, *given, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", told)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("127.0.0.1", LOOPBACKS[:1]),
        ("0.0.0.0", LOOPBACKS),
        ("::", LOOPBACKS),
        ("both.test", LOOPBACKS),
    ],
)
async def test_every_address_that_a_host_means(
    here: list[str], host: str, wanted: tuple[str, ...]
) -> None:
    http, grpc_server = HttpServer(app, host, 0), create_server()
    ports = http.bind(), bind(grpc_server, host, 0)
    await http.start()
    await grpc_server.start()
    reached = [[each for each in LOOPBACKS if answers(each, port)] for port in ports]
    await http.stop()
    await grpc_server.stop(None)
    assert reached == [[each for each in wanted if each in here]] * 2


@pytest.mark.usefixtures("named")
def test_one_that_is_taken_leaves_none(here: list[str]) -> None:
    """Of several addresses the last may be the one that somebody has."""
    with socket.socket(socket.AF_INET6 if "::1" in here else socket.AF_INET) as other:
        other.bind((here[-1], 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken on {here[-1]}"):
            bind_sockets("both.test", port, "--http-port")
    for each in bind_sockets("both.test", port, "--http-port"):
        each.close()


@pytest.mark.usefixtures("named")
async def test_a_port_that_is_chosen_is_free_at_all_of_them(
    here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system gives for the first may be somebody's at the next, and not only once."""
    if len(here) < 2:
        pytest.skip("this machine has no IPv6")
    bound, refused = addresses._bound, set[int]()

    def told(address: str, port: int, **how: bool) -> socket.socket:
        if port and address == here[-1] and (port in refused or len(refused) < 3):
            refused.add(port)
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return bound(address, port, **how)

    monkeypatch.setattr(addresses, "_bound", told)
    http, grpc_server = HttpServer(app, "both.test", 0), create_server()
    for door in (http.bind, partial(bind, grpc_server, "both.test", 0)):
        refused.clear()
        assert door() not in refused
        assert len(refused) == 3
    await http.stop()
    await grpc_server.stop(None)
