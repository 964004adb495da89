"""The probe of containers: what it takes for serving, and what it costs."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from kaiten.local.ports import HeldPort
from kaiten.probe import says_serving
from tests.support.tcp_server import tcp_server

SERVING = HealthCheckResponse.SERVING
# As the console script does, then what it took along.
COMMAND = """
import atexit, sys
from kaiten.cli import main
heavy = {"asyncio", "cyclopts", "grpc", "google.protobuf", "rich", "ssl", "typing_extensions"}
atexit.register(lambda: print(*sorted(heavy & sys.modules.keys()), file=sys.stderr))
main()
"""


@asynccontextmanager
async def served(status: int | None, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """A server whose health is `status`, None: unknown."""
    server = grpc.aio.server()
    health = HealthServicer()
    health.set("", HealthCheckResponse.UNKNOWN if status is None else status)
    add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("status", [None, *HealthCheckResponse.ServingStatus.values()])
async def test_only_serving_is_serving(status: int | None) -> None:
    async with served(status) as address:
        assert await asyncio.to_thread(says_serving, address) is (status == SERVING)


async def test_a_unix_socket_is_asked_as_well(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'door'}"
    assert not says_serving(address)
    async with served(SERVING, address):
        assert await asyncio.to_thread(says_serving, address)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        # A frame of 16 MB; one that ends the call; more frames than there can be.
        b"\xff\xff\xff\x00\x01\x00\x00\x00\x01",
        b"\0\0\4\3\0\0\0\0\1\0\0\0\0",
        b"\0\0\0\4\0\0\0\0\0" * 1000,
        # Serving, on somebody else's stream.
        b"\0\0\7\0\1\0\0\0\3" + b"\0\0\0\0\2\x08\x01",
    ],
)
async def test_what_is_no_health_service_does_not_serve(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"trailers")
        writer.write(said)

    async with tcp_server(answer) as port:
        assert not await asyncio.to_thread(says_serving, f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:x", "h" * 200 + ":1", "unix:/none"])
def test_an_address_that_is_none(address: str) -> None:
    assert not says_serving(address)


def test_nobody_answers() -> None:
    with HeldPort() as port:
        assert not says_serving(port.address)


async def test_who_is_silent_is_not_waited_for_beyond_the_time_given() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with tcp_server(say_nothing) as port:
        assert not await asyncio.to_thread(says_serving, f"127.0.0.1:{port}", 0.05)


async def test_the_command_asks_without_what_is_slow_to_import() -> None:
    async with served(SERVING) as address:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-P", "-c", COMMAND, "healthcheck", address],
            env={name: value for name, value in os.environ.items() if "KAITEN" not in name},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == f"{address} serving\n"
    assert done.stderr == "\n"
