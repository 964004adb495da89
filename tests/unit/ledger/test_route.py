"""The way to the primary, and those who wait to be told it."""

import asyncio

import pytest
from redis import exceptions as redis_errors

from ledger.servers.primary import Route
from ledger.servers.urls import Address


class SilentServers:
    """Nobody answers until `answer` is set."""

    is_redundant = True
    asks_role = False

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def primary(self) -> Address:
        await self.answer.wait()
        return Address("there", 1)

    async def replicas(self) -> list[Address]:
        return []

    async def close(self) -> None:
        """Nothing is open."""


async def test_who_waits_when_it_closes_is_told_so_and_not_cancelled() -> None:
    """A loop that waited ended without a word, and its gateway was never ready again."""
    route = Route(SilentServers())
    waiting = [asyncio.create_task(route.ask()) for _ in range(2)]
    await asyncio.sleep(0)
    await route.close()
    for each in waiting:
        with pytest.raises(redis_errors.ConnectionError, match="was closed"):
            await each
        assert not each.cancelled()


async def test_who_is_cancelled_is_cancelled_alone() -> None:
    servers = SilentServers()
    route = Route(servers)
    gone, waiting = (asyncio.create_task(route.ask()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    servers.answer.set()
    assert await waiting == Address("there", 1)
    assert gone.cancelled()
