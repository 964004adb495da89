"""What a process that listens everywhere tells others to dial."""

import socket

import pytest

from service_kit.addresses import advertised


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
        with socket.create_connection((host, int(port)), timeout=5):
            pass


@pytest.mark.parametrize("peer", ["no-such-host.invalid:1", "unix:/run/x.sock", ":6379", ""])
async def test_without_a_route_the_machine_is_named(peer: str) -> None:
    assert await advertised("0.0.0.0", 7, peer=peer) == f"{socket.gethostname()}:7"
