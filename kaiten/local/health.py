"""Ask a process whether it is serving, by grpc.health.v1."""

from pathlib import Path
from typing import Final
from urllib.parse import unquote

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kaiten.tls import DIRECT, TLS, aio_channel, certificate_problem, explained

# The service of every part that says whether it must be ended: `service_kit.grpc_health`.
LIVE: Final = "live"
TIMEOUT_S: Final = 2.0
PING_TIMEOUT_S: Final = 1.0
# Trailing metadata of the answer of a part that does not serve: why not.
REASON: Final = "kaiten-reason"
# Who was started again is found at once.
RECONNECT: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # No wait, whatever its name: how long a connection may take, until both sides have said hello.
    ("grpc.min_reconnect_backoff_ms", 2000),
)


class Health:
    """Asks the process at one address again and again, by one connection of the loop it runs in."""

    def __init__(self, address: str) -> None:
        self._address = address
        path = unquote(address.removeprefix("unix:"))
        self._socket = Path(path) if address.startswith("unix:") else None
        self._channel: grpc.aio.Channel | None = None

    def __repr__(self) -> str:
        return f"Health({self._address})"

    async def is_serving(self) -> bool:
        """True when it says so, of the whole process."""
        return await self._state("", TIMEOUT_S) == "serving"

    async def answers(self) -> bool:
        """True when it says anything but that it is stuck, be it that it has too much to do."""
        said = (await self._state(LIVE, PING_TIMEOUT_S)).partition(":")[0]
        return said not in ("unavailable", "deadline_exceeded", "not serving")

    async def _state(self, service: str, timeout_s: float) -> str:
        # Who starts has none for seconds, and a connection that fails is dearer than a look.
        if self._socket is not None and not self._socket.exists():
            return "unavailable: it does not listen yet"
        if self._channel is None:
            self._channel = aio_channel(self._address, False, RECONNECT)
        return await _said(self._channel, service, timeout_s)


async def state_of(
    address: str, service: str = "", timeout_s: float = TIMEOUT_S, tls: TLS | None = None
) -> str:
    """ "serving", "not serving: why", or why nobody answered; by no proxy, as parts are reached."""
    async with aio_channel(address, tls or False, DIRECT) as channel:
        return await _said(channel, service, timeout_s)


async def _said(channel: "grpc.aio.Channel", service: str, timeout_s: float) -> str:
    call = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=timeout_s)
    try:
        answer = await call
        trailers = dict(await call.trailing_metadata() or ())
    except grpc.aio.AioRpcError as error:
        said = error.details() or ""
        why = certificate_problem(said) or explained(said)
        return f"{error.code().name.lower()}: {why}"
    if answer.status == HealthCheckResponse.SERVING:
        return "serving"
    # Parts of an older version, and those of others, give no reason.
    reason = trailers.get(REASON, "")
    return f"not serving: {reason}" if reason else "not serving"
