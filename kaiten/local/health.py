"""Ask a process whether it is serving, by grpc.health.v1."""

from typing import TYPE_CHECKING, Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

if TYPE_CHECKING:
    from kaiten.client.tls import TLS

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
    address: str, service: str = "", timeout_s: float = TIMEOUT_S, tls: "TLS | None" = None
) -> str:
    """ "serving", "not serving", or why nobody answered."""
    async with _channel(address, tls) as channel:
        asked = HealthCheckRequest(service=service)
        try:
            answer = await HealthStub(channel).Check(asked, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name.lower()}: {_explained(error.details() or '')}"
    return "serving" if answer.status == HealthCheckResponse.SERVING else "not serving"


def _channel(address: str, tls: "TLS | None") -> "grpc.aio.Channel":
    if tls is None:
        return grpc.aio.insecure_channel(address)
    from kaiten.client.tls import aio_channel

    return aio_channel(address, tls)


def _explained(details: str) -> str:
    """Only who failed waits for the import."""
    from kaiten.client.tls import certificate_problem, explained

    return certificate_problem(details) or explained(details)
