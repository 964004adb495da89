"""The way to a gateway: by the proxy that the environment names or past it, and a long one."""

import asyncio

import pytest

from kaiten.client import AsyncClient
from tests.support.relay import Relay
from tests.support.scripted_gateway import ScriptedGateway, accepted, done, finished
from tests.support.tcp_server import tcp_server

WHOLE = [accepted(), finished(0), done(0)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "ipv4:127.0.0.1", "dns:///localhost"])
async def test_a_gateway_of_this_machine_is_reached_past_it(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    async def refuse(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None: ...

    async with tcp_server(refuse) as proxy, ScriptedGateway(WHOLE) as gateway:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
        address = f"{host}:{gateway.address.rpartition(':')[2]}"
        async with AsyncClient(address, resume_s=0) as client:
            assert (await client.complete("x")).text == ""


async def test_another_is_reached_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.get_running_loop().create_future()

    async def note(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not asked.done():
            asked.set_result(line)

    async with tcp_server(note) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
        async with AsyncClient("gateway.example:50051", resume_s=60) as client:
            asking = asyncio.create_task(client.complete("x"))
            assert (await asked).startswith(b"CONNECT gateway.example:50051 ")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def test_a_gateway_that_is_far_away_is_reached() -> None:
    """A connection of TLS takes three or four times as long as the way there and back."""
    async with (
        ScriptedGateway(WHOLE) as gateway,
        Relay(gateway.address, delay_s=0.6) as relay,
        AsyncClient(relay.address) as client,
    ):
        assert await client.models() == ("mini",)
        assert (await client.complete("hi")).text == ""
