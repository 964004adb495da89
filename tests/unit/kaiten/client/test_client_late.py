"""A request whose time ran out: it is told with the place, also when all of its events came."""

import asyncio
from typing import Any

import pytest

from kaiten.client import AsyncClient, Client, DeadlineExceededError
from kaiten.v1 import common_pb2
from service_kit import errors
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished

LATE: Any = [
    *(accepted(), delta(0, "ab")),
    finished(2, reason=common_pb2.FINISH_REASON_DEADLINE_EXCEEDED),
    *(done(2), errors.DeadlineExceeded("decode", "its time ran out")),
]


async def test_a_request_that_ran_out_of_time_says_where() -> None:
    async with ScriptedGateway(LATE) as gateway, AsyncClient(gateway.address) as client:
        generation = client.generate("hi")
        # What there was in time is handed out.
        assert (await anext(generation)).text == "ab"
        with pytest.raises(DeadlineExceededError, match="in phase 'decode': its time ran out"):
            await anext(generation)


async def test_a_request_that_ran_out_of_time_says_where_sync() -> None:
    def ask(address: str) -> None:
        with Client(address) as client:
            client.wait("r")

    async with ScriptedGateway(LATE) as gateway:
        with pytest.raises(DeadlineExceededError, match="in phase 'decode': its time ran out"):
            await asyncio.to_thread(ask, gateway.address)
