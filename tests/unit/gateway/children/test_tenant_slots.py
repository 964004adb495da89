"""Tenants' long texts: nobody has the last place, and those who wait take turns."""

import asyncio
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast

from gateway.children.tenant_slots import TenantSlots
from gateway.requests.prompts import Prompter
from gateway.values.generation_request import ChatPrompt, Message
from tests.support.gateway_stack import until


async def hold(slots: TenantSlots, tenant: str, log: list[str], leave: asyncio.Event) -> None:
    async with slots.place(tenant):
        log.append(tenant)
        await leave.wait()


async def test_one_tenant_leaves_a_place_for_the_others() -> None:
    slots, log, leave = TenantSlots(3), list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(hold(slots, "loud", log, leave))
        await until(lambda: len(log) == 2, "two places of the loud one")
        tasks.create_task(hold(slots, "quiet", log, leave))
        await until(lambda: "quiet" in log, "a place for the quiet one")
        assert log == ["loud", "loud", "quiet"]
        assert repr(slots) == "TenantSlots(0 free, 3 waiting)"
        leave.set()
    assert log.count("loud") == 5
    assert repr(slots) == "TenantSlots(3 free, 0 waiting)"


async def test_those_who_wait_take_turns() -> None:
    """However many one of them waits for: a, b, c, a, b, c; not a, a, a, b, c."""
    slots, log = TenantSlots(2), list[str]()
    gone = asyncio.Event()
    gone.set()
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as held:
        for tenant in ("x", "y"):
            await held.enter_async_context(slots.place(tenant))
        for tenant in ("a", "a", "a", "b", "b", "c"):
            tasks.create_task(hold(slots, tenant, log, gone))
        await until(lambda: "6 waiting" in repr(slots), "all in line")
    assert log == ["a", "b", "c", "a", "b", "a"]


async def test_where_none_is_spared_one_alone_has_all_of_them() -> None:
    slots, log, leave = TenantSlots(2, spared=0), list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(hold(slots, "loud", log, leave))
        await until(lambda: len(log) == 2, "both places of the loud one")
        tasks.create_task(hold(slots, "quiet", log, leave))
        await until(lambda: "3 waiting" in repr(slots), "all in line")
        leave.set()
    # Its first turn came before the loud one's second.
    assert log == ["loud", "loud", "loud", "quiet", "loud"]


async def test_chats_are_rendered_in_turns() -> None:
    """One tenant's thousand would each be rendered before another's first."""
    rendered, gate = list[str](), asyncio.Event()

    class OneChild:
        count = 1

        async def render(self, turns: Any, _options: Any, **_more: Any) -> list[str]:
            rendered.append(turns[0]["content"])
            await gate.wait()
            return [""]

    card: Any = SimpleNamespace(special_texts=())
    prompter = Prompter(card, cast(Any, OneChild()))
    async with asyncio.TaskGroup() as tasks:
        for name in ("loud", "loud", "loud", "quiet"):
            chat = ChatPrompt(messages=(Message(role="user", content=name),))
            tasks.create_task(prompter.token_ids(chat, name, 100))
        await until(lambda: "3 waiting" in repr(prompter._renderings), "all in line")
        gate.set()
    assert rendered == ["loud", "loud", "quiet", "loud"]


async def test_who_leaves_the_line_takes_nothing_along() -> None:
    slots, log = TenantSlots(2), list[str]()
    leave = asyncio.Event()
    holding = [asyncio.create_task(hold(slots, name, log, leave)) for name in ("x", "y")]
    await until(lambda: len(log) == 2, "both places")
    waiting = [asyncio.create_task(hold(slots, "a", log, leave)) for _ in range(3)]
    await until(lambda: "3 waiting" in repr(slots), "all in line")
    waiting[0].cancel()
    leave.set()
    # Cancelled in the very turn in which it is given its place.
    waiting[1].cancel()
    for task in (*holding, *waiting):
        with suppress(asyncio.CancelledError):
            await task
    assert log == ["x", "y", "a"]
    assert repr(slots) == "TenantSlots(2 free, 0 waiting)"
