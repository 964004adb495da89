"""Who leads the cell, whoever that is by now: looked for, and asked until somebody answers."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc
import structlog

from gateway.cell.archives import CHANNEL_OPTIONS, said
from gateway.cell.ledger_session import LedgerLink
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from service_kit.clock import Clock
from service_kit.errors import Unavailable
from service_kit.peers import Peers

log = structlog.get_logger()

RETRY_S: Final = 0.2
# Without a word of one, until whoever asks is told so; a leader's change takes less.
LEADERLESS_S_MAX: Final = 10.0
# Who does not lead (any more), or is not there: another does, or will soon.
ELSEWHERE: Final = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
# What a leader says of what it was asked, for each question to make of it what it means there.
ANSWERS: Final = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Search:
    """For who leads, for as long as one was heard of lately."""

    def __init__(self, link: LedgerLink, clock: Clock) -> None:
        self._link, self._clock = link, clock
        # Why the one asked last was none.
        self._reason = ""
        self.heard()

    def heard(self) -> None:
        self._heard_ns = self._clock.monotonic_ns()

    def missed(self, address: str, error: grpc.aio.AioRpcError) -> None:
        """AioRpcError → another is looked for. Unavailable: it says something else."""
        self._reason = said(address, error)
        if error.code() not in ELSEWHERE:
            raise Unavailable(self._reason) from None
        log.info("leader.missed", address=address, reason=error.details())

    async def addresses(self) -> AsyncGenerator[str, None]:
        """Where it is, look by look. Unavailable: nobody was heard of for too long."""
        while True:
            lease = (await self._link.cell()).lease
            if lease is not None and lease.nonce:
                yield lease.address
            if self._clock.monotonic_ns() - self._heard_ns > LEADERLESS_S_MAX * 1e9:
                because = f"; {self._reason}" if self._reason else ""
                raise Unavailable(f"no scheduler leads{because}")
            await self._clock.sleep(RETRY_S)


class LeaderClient:
    """Of this gateway's cell."""

    def __init__(self, link: LedgerLink, clock: Clock, peers: Peers) -> None:
        self._link, self._clock, self._peers = link, clock, peers

    def search(self) -> Search:
        return Search(self._link, self._clock)

    async def ask(
        self, method: Callable[[SchedulerServiceStub], Any], request: Any, call_s: float
    ) -> Any:
        """What it answers. AioRpcError: it refuses, as in ANSWERS; Unavailable: nobody leads."""
        search = self.search()
        async with aclosing(search.addresses()) as addresses:
            async for address in addresses:
                async with self._peers.channel(address, CHANNEL_OPTIONS) as channel:
                    try:
                        asked = method(SchedulerServiceStub(channel))
                        return await self._peers.ask(asked, request, call_s)
                    except grpc.aio.AioRpcError as error:
                        if error.code() in ANSWERS:
                            raise
                        search.missed(address, error)
        raise AssertionError("addresses ended")
