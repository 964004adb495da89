"""One error in place of its group."""

import asyncio

import pytest

from kaiten.error_groups import first_alone
from kaiten.start_error import StartError


async def fail(*errors: Exception) -> None:
    async def one(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(one(error))


async def test_the_first_of_its_kind_is_raised_alone() -> None:
    first, other = StartError("a"), StartError("b")
    with pytest.raises(StartError) as caught, first_alone(StartError):
        await fail(KeyError(), first, other)
    assert caught.value is first


async def test_a_group_without_one_is_raised_as_it_is() -> None:
    with pytest.raises(ExceptionGroup) as caught, first_alone(StartError):
        await fail(KeyError())
    assert [*map(type, caught.value.exceptions)] == [KeyError]
