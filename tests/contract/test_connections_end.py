"""Servers of this process that tests start leave no connection to the collector."""

import asyncio
import gc
import socket
import warnings

import pytest

from tests.support.relay import Relay
from tests.support.tcp_server import tcp_server


async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def leave(turns: int) -> None:
    """While somebody's connection to a relay, and its to a server, are `turns` of the loop old."""
    with socket.socket() as somebody:
        async with tcp_server(listen) as port, Relay(f"127.0.0.1:{port}") as relay:
            host, _, relay_port = relay.address.rpartition(":")
            somebody.connect((host, int(relay_port)))
            for _ in range(turns):
                await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(8))
def test_none_is_left_however_young(turns: int) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(leave(turns))
        gc.collect()
    assert [str(each.message) for each in said] == []
