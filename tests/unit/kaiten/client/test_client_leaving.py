"""Who leaves in the middle, in whichever way, leaves nothing running behind."""

import asyncio
import gc
import math
import os
from collections.abc import Iterator

import pytest

from kaiten.client import AsyncClient, AsyncGeneration, Client
from kaiten.client.errors import InternalServerError, RequestCancelledError
from kaiten.local.ports import HeldPort
from service_kit import errors
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished

WAIT_S = 60.0


@pytest.fixture
def no_collector() -> Iterator[None]:
    """In a program with little garbage it may not come for minutes."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_generation_that_is_forgotten_is_cancelled_sync() -> None:
    def read_one(client: Client) -> str:
        for item in client.generate("hi"):
            return item.text
        return ""

    async with ScriptedGateway([accepted(), delta(0, "a"), asyncio.Event()]) as gateway:
        with Client(gateway.address) as client:
            assert await asyncio.to_thread(read_one, client) == "a"
            await asyncio.wait_for(gateway.left.wait(), WAIT_S)


@pytest.mark.usefixtures("no_collector")
async def test_a_generation_that_is_forgotten_is_cancelled_async() -> None:
    script = [accepted(), delta(0, "a"), asyncio.Event()]
    async with ScriptedGateway(script) as gateway, AsyncClient(gateway.address) as client:
        async for _ in client.generate("hi"):
            break
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def test_what_fails_here_goes_on_nowhere() -> None:
    """Though the generation is kept, by a traceback for example."""
    hole = [accepted(), delta(0, "a"), delta(5, "b"), asyncio.Event()]
    async with ScriptedGateway(hole) as gateway, AsyncClient(gateway.address) as client:
        generation = client.generate("hi")
        with pytest.raises(InternalServerError):
            await generation.result()
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def test_what_fails_here_goes_on_nowhere_sync() -> None:
    hole = [accepted(), delta(0, "a"), delta(5, "b"), asyncio.Event()]
    async with ScriptedGateway(hole) as gateway:
        with Client(gateway.address) as client:
            generation = client.generate("hi")
            with pytest.raises(InternalServerError):
                await asyncio.to_thread(lambda: generation.result)
            await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def reading(generation: AsyncGeneration) -> "asyncio.Task[list[str]]":
    """Another task, which has read the first piece."""
    has_begun = asyncio.Event()

    async def read() -> list[str]:
        texts = []
        async for item in generation:
            texts.append(item.text)
            has_begun.set()
        return texts

    task = asyncio.create_task(read())
    await asyncio.wait_for(has_begun.wait(), WAIT_S)
    return task


async def test_closing_from_another_task_ends_the_iteration() -> None:
    """And not the task, which nobody has cancelled."""
    standing = asyncio.Event()
    script = [accepted(), delta(0, "a"), standing]
    async with ScriptedGateway(script) as gateway, AsyncClient(gateway.address) as client:
        generation = client.generate("hi")
        task = await reading(generation)
        await asyncio.wait_for(standing.wait(), WAIT_S)
        await generation.close()
        assert await asyncio.wait_for(task, WAIT_S) == ["a"]


async def test_closing_the_client_is_told_to_who_reads() -> None:
    standing = asyncio.Event()
    async with ScriptedGateway([accepted(), delta(0, "a"), standing]) as gateway:
        client = AsyncClient(gateway.address)
        task = await reading(client.generate("hi"))
        await asyncio.wait_for(standing.wait(), WAIT_S)
        await client.close()
        with pytest.raises(RequestCancelledError, match="the client was closed"):
            await asyncio.wait_for(task, WAIT_S)


@pytest.mark.parametrize("resume_s", [0.0, 30.0])
async def test_closing_the_client_is_told_to_who_reads_sync(resume_s: float) -> None:
    standing = asyncio.Event()
    async with ScriptedGateway([accepted(), delta(0, "a"), standing]) as gateway:
        client = Client(gateway.address, resume_s=resume_s)
        reading = asyncio.create_task(asyncio.to_thread(list, client.generate("hi")))
        await asyncio.wait_for(standing.wait(), WAIT_S)
        await asyncio.to_thread(client.close)
        with pytest.raises(RequestCancelledError, match="the client was closed"):
            await asyncio.wait_for(reading, WAIT_S)


FULL = errors.Overloaded("queue full", 3600.0)


async def until_it_waits(gateway: ScriptedGateway) -> None:
    """For the time that the service has named."""
    async with asyncio.timeout(WAIT_S):
        await gateway.refused.wait()


@pytest.mark.parametrize("closes", ["client", "generation"])
async def test_who_waits_for_room_need_not_when_it_is_closed(closes: str) -> None:
    async with (
        ScriptedGateway([FULL]) as gateway,
        AsyncClient(gateway.address, overload_s=math.inf) as client,
    ):
        generation = client.generate("hi")
        waiting = asyncio.create_task(generation.result())
        await until_it_waits(gateway)
        await (client if closes == "client" else generation).close()
        with pytest.raises(RequestCancelledError, match="was closed"):
            await asyncio.wait_for(waiting, WAIT_S)


@pytest.mark.parametrize("closes", ["client", "generation"])
async def test_who_waits_for_room_need_not_when_it_is_closed_sync(closes: str) -> None:
    async with ScriptedGateway([FULL]) as gateway:
        with Client(gateway.address, overload_s=math.inf) as client:
            generation = client.generate("hi")
            waiting = asyncio.create_task(asyncio.to_thread(lambda: generation.result))
            await until_it_waits(gateway)
            await asyncio.to_thread((client if closes == "client" else generation).close)
            with pytest.raises(RequestCancelledError, match="was closed"):
                await asyncio.wait_for(waiting, WAIT_S)


async def test_closing_the_client_is_told_to_who_has_many_answered() -> None:
    standing = asyncio.Event()
    async with ScriptedGateway([accepted(), standing]) as gateway:
        client = Client(gateway.address)
        waiting = asyncio.create_task(asyncio.to_thread(client.complete_all, ["hi"]))
        await asyncio.wait_for(standing.wait(), WAIT_S)
        await asyncio.to_thread(client.close)
        with pytest.raises(RequestCancelledError, match="the client was closed"):
            await asyncio.wait_for(waiting, WAIT_S)
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def test_what_is_closed_before_it_is_accepted_was_not_submitted() -> None:
    async with ScriptedGateway() as gateway, AsyncClient(gateway.address) as client:
        generation = client.generate("hi")
        await generation.close()
        with pytest.raises(RequestCancelledError, match="closed before it was accepted"):
            await generation.until_accepted()
        with Client(gateway.address) as blocking:
            closed = blocking.generate("hi")
            closed.close()
            with pytest.raises(RequestCancelledError, match="closed before it was accepted"):
                closed.until_accepted()


async def test_closing_the_client_is_told_to_who_asks() -> None:
    """Not as an end of the task, which nobody has cancelled."""
    with HeldPort() as port:
        client = AsyncClient(port.address)
        asking = asyncio.create_task(client.models())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(RequestCancelledError, match="the client was closed"):
            await asyncio.wait_for(asking, WAIT_S)


def test_a_client_that_was_closed_says_so() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    for use in (client.models, lambda: client.complete("hi"), lambda: client.complete_all(["hi"])):
        with pytest.raises(RuntimeError, match="the client was closed: make another"):
            use()


async def test_a_client_that_was_closed_says_so_async() -> None:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    for use in (client.models(), client.complete("hi"), client.complete_all(["hi"])):
        with pytest.raises(RuntimeError, match="the client was closed: make another"):
            await use


async def test_another_loop_is_told_to_make_a_client_of_its_own() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for use in (client.models, lambda: client.complete("hi")):
            with pytest.raises(RuntimeError, match="of another event loop: make one in this"):
                await asyncio.to_thread(asyncio.run, use())


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    standing = asyncio.Event()
    script = [accepted(), delta(0, "a"), standing]
    async with ScriptedGateway(script) as gateway, AsyncClient(gateway.address) as client:
        task = await reading(client.generate("hi"))
        await asyncio.wait_for(standing.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def test_a_fork_is_told_to_make_a_client_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's threads are not forked: a call would wait for them for ever, whatever its timeout."""
    with Client("127.0.0.1:1") as client:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        for use in (client.models, lambda: client.complete("hi"), lambda: client.wait("r")):
            with pytest.raises(RuntimeError, match="is of the process that this was forked from"):
                use()


async def test_what_a_fork_does_ends_nothing_of_its_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it wait for ever: it may leave a `with` of its parent's by sys.exit."""
    goes_on = [accepted(), delta(0, "a"), delta(1, "b"), finished(2), done(2)]
    async with ScriptedGateway(goes_on) as gateway:

        def read() -> str:
            client = Client(gateway.address)
            generation = client.generate("hi")
            text = next(generation).text
            with monkeypatch.context() as fork:
                fork.setattr(os, "getpid", lambda: -1)
                with pytest.raises(RuntimeError, match="that this was forked from"):
                    next(generation)
                client.close()
            # As after the fork, in its parent.
            return text + "".join(delta.text for delta in generation)

        assert await asyncio.wait_for(asyncio.to_thread(read), WAIT_S) == "ab"
