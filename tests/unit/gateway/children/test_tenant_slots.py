"""Tenants' long texts: nobody has the last place, and those who wait take turns."""

import asyncio
from contextlib import AsyncExitStack, suppress

from gateway.children.tenant_slots import TenantSlots
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
