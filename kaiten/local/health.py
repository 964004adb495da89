"""Ask a process whether it is serving: grpc.health.v1, spoken in its few bytes.

The messages are `{1: service}` and `{1: status}` with SERVING = 1, so no generated code is needed.
"""

from typing import Final

import grpc

from kaiten.tls import TLS, aio_channel, certificate_problem, explained

CHECK: Final = "/grpc.health.v1.Health/Check"
SERVING: Final = b"\x08\x01"
TIMEOUT_S: Final = 2.0
PING_TIMEOUT_S: Final = 1.0


async def is_serving(address: str, service: str = "", timeout_s: float = TIMEOUT_S) -> bool:
    """True when `service` ("" = the whole process) at host:port says SERVING."""
    return await state_of(address, service, timeout_s) == "serving"


async def answers(address: str) -> bool:
    """True when the process says anything at all, be it that it has too much to do."""
    state = await state_of(address, timeout_s=PING_TIMEOUT_S)
    return state.partition(":")[0] not in ("unavailable", "deadline_exceeded")


async def state_of(
    address: str, service: str = "", timeout_s: float = TIMEOUT_S, tls: TLS | None = None
) -> str:
    """ "serving", "not serving", or why nobody answered."""
    name = service.encode()
    assert len(name) < 128, "a longer name needs a longer length prefix"
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    async with aio_channel(address, tls or False) as channel:
        try:
            answer = await channel.unary_unary(CHECK)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            said = error.details() or ""
            why = certificate_problem(said) or explained(said)
            return f"{error.code().name.lower()}: {why}"
    return "serving" if answer == SERVING else "not serving"
