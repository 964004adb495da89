"""What a process that listens everywhere tells others to dial."""

import socket
from pathlib import Path

import pytest

from service_kit.addresses import advertised, is_loopback, problem_of, unix_address, unix_path


async def test_a_bound_address_is_told_as_it_is() -> None:
    assert await advertised("192.0.2.7", 50053, peer="scheduler:50052") == "192.0.2.7:50053"
    assert await advertised("::1", 50053, peer="scheduler:50052") == "[::1]:50053"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", ""])
async def test_a_wildcard_becomes_the_address_on_the_route_to_the_peer(wildcard: str) -> None:
    assert await advertised(wildcard, 7, peer="127.0.0.1:50052") == "127.0.0.1:7"


async def test_what_is_told_can_be_dialled() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        told = await advertised("0.0.0.0", listener.getsockname()[1], peer="localhost:50052")
        host, _, port = told.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60):
            pass


@pytest.mark.parametrize("peer", ["no-such-host.invalid:1", "unix:/run/x.sock", ":6379", ""])
async def test_without_a_route_the_machine_is_named(peer: str) -> None:
    assert await advertised("0.0.0.0", 7, peer=peer) == f"{socket.gethostname()}:7"


@pytest.mark.parametrize("path", ["/run/a.sock", "/run/a b%20#?.sock", "/run/ä.sock"])
def test_a_socket_has_an_address(path: str) -> None:
    address = unix_address(Path(path))
    assert unix_path(address) == Path(path)
    assert problem_of(address) == ""
    assert not set(address) & set(" #?")


@pytest.mark.parametrize(
    "address", ["host:1", "a-b.c_d:65535", "192.0.2.1:50052", "[::1]:1", "[fe80::1%eth0]:1"]
)
def test_what_can_be_dialled_is_an_address(address: str) -> None:
    assert problem_of(address) == ""
    assert unix_path(address) is None


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:0", "host:65536", "host:x", ":1", "::1:1", "dns:///host:1", "xds:host:1",
     "unix:a.sock", "unix-abstract:a", "ipv4:192.0.2.1:1", "host:1,host:2", "http://h:1", "a b:1"],
)  # fmt: skip
def test_what_else_grpc_would_dial_is_none(address: str) -> None:
    assert problem_of(address)


def test_loopback_is_what_only_this_machine_reaches() -> None:
    hosts = ("127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0", "::", "192.0.2.1", "host", "")
    assert [host for host in hosts if is_loopback(host)] == [*hosts[:4]]
