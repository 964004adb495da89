"""Bodies that are coming in, of several tenants."""

import asyncio
from typing import Any

import pytest

from gateway.http.bodies import FREE_BYTES, Bodies, BodyLimits
from gateway.http.json_body import JsonBody
from gateway.tenants import Tenant
from service_kit.errors import Overloaded
from tests.support.answers import until

LARGE = b'"' + b"x" * (2 * FREE_BYTES)


async def test_bodies_of_one_tenant_leave_room_for_those_of_others() -> None:
    """It sends two of three that fit, and no end of them."""
    bodies = Bodies(
        BodyLimits(
            bytes_max=3 * FREE_BYTES,
            values_max=100,
            read_s_max=60.0,
            reading_bytes_max=4 * FREE_BYTES,
        ),
        lambda of_all: of_all // 2,
    )
    end = asyncio.Event()

    async def read(tenant: str) -> JsonBody:
        parts = iter((LARGE, b'"'))

        async def receive() -> Any:
            part = next(parts)
            if part is not LARGE:
                await end.wait()
            return {"type": "http.request", "body": part, "more_body": part is LARGE}

        return await bodies.read({"headers": [], "state": {"tenant": Tenant(name=tenant)}}, receive)

    loud = [asyncio.create_task(read("loud")) for _ in range(3)]
    await until(lambda: f"{2 * len(LARGE) - 2 * FREE_BYTES} of" in repr(bodies), "two of three")
    quiet = asyncio.create_task(read("quiet"))
    await until(lambda: f"{3 * len(LARGE) - 3 * FREE_BYTES} of" in repr(bodies), "another's")
    end.set()
    assert len(await quiet) == len(LARGE) + 1
    told = await asyncio.gather(*loud, return_exceptions=True)
    with pytest.raises(Overloaded, match="of tenant loud are coming in"):
        raise next(each for each in told if isinstance(each, Exception))
    assert repr(bodies).startswith("Bodies(0 of")
