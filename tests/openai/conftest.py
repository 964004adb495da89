"""The real OpenAI client, both kinds, before a real stack."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.whole_stack import Door, WholeStack

TIMEOUT_S = 60.0


@pytest.fixture
def client(whole_stack: WholeStack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=whole_stack.door.openai, api_key="any", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


@pytest.fixture
async def async_client(whole_stack: WholeStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=whole_stack.door.openai, api_key="any", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


@pytest.fixture
def another_door(whole_stack: WholeStack) -> Iterator[Callable[..., Door]]:
    """Gateways of other settings over the same cell, gone after the test."""
    doors: list[Door] = []

    def add(**flags: object) -> Door:
        door = whole_stack.add_gateway(**flags)
        doors.append(door)
        door.process.start()
        door.wait_ready()
        return door

    yield add
    for door in doors:
        whole_stack.retire(door)
