"""Ask a process whether it is serving, by grpc.health.v1."""

from typing import Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kaiten.tls import TLS, aio_channel, certificate_problem, explained

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
    asked = HealthCheckRequest(service=service)
    async with aio_channel(address, tls or False) as channel:
        try:
            answer = await HealthStub(channel).Check(asked, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            said = error.details() or ""
            why = certificate_problem(said) or explained(said)
            return f"{error.code().name.lower()}: {why}"
    return "serving" if answer.status == HealthCheckResponse.SERVING else "not serving"
