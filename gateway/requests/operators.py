"""What only operators may see: the live core of the cell, and the archives of its schedulers.

Gateways decide nothing and keep nothing. They know where the schedulers are, the leader from its
lease and who stands by from what it says of its cell, ask them, and hand on what these say.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import grpc
import structlog

from gateway.requests.archives import CHANNEL_OPTIONS, Archive, merged, said
from gateway.requests.ledger_session import LedgerLink
from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveGap
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest, RehearseRequest, RehearseResponse
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.watch_pb2 import WatchRequest
from service_kit.clock import Clock
from service_kit.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from service_kit.grpc_health import AtMost
from service_kit.peers import Peers

log = structlog.get_logger()

SERVICE: Final = "kaiten.v1.SchedulerService"
STREAMS_MAX: Final = 16
RETRY_S: Final = 0.2
REHEARSE_S: Final = 20.0
# Without a leader, until whoever watches is told so.
NOBODY_LEADS_S_MAX: Final = 10.0
# Who does not lead (any more), or is not there: another does, or will soon.
ELSEWHERE: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)


def _refusal(address: str, request: RehearseRequest, error: grpc.aio.AioRpcError) -> Exception:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(f"worker {request.worker_id!r}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, _, rule = (error.details() or "").partition(": ")
            return InvalidRequest(field, rule)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded("the leader is busy with another rehearsal", 1.0)
    return Unavailable(said(address, error))


class Operators:
    """One per gateway, for both doors, which have asked who calls."""

    def __init__(self, link: LedgerLink, clock: Clock, peers: Peers | None = None) -> None:
        self._link, self._clock = link, clock
        self._peers = peers or Peers()
        self._streams = AtMost(STREAMS_MAX, "operators' streams")

    async def watch(self, request: WatchRequest) -> AsyncGenerator[bytes, None]:
        """Serialized responses, of one leader after the other, each beginning with a snapshot."""
        with self._streams:
            async with aclosing(self._watched(request)) as responses:
                async for response in responses:
                    yield response

    async def read_archive(
        self, request: ReadArchiveRequest
    ) -> AsyncGenerator[Sequence[ArchiveEntry], None]:
        """Of whichever schedulers led, in order. Who does not answer is a gap at the end."""
        with self._streams:
            schedulers = await self._schedulers()
            archives = [Archive(address, request, self._peers) for address in schedulers]
            async with aclosing(merged([archive.parts() for archive in archives])) as parts:
                async for part in parts:
                    yield part.entries
            if not any(archive.is_kept for archive in archives):
                raise NotFound("an archive of this cell's schedulers (--archive-dir)")
            if gaps := [archive.problem for archive in archives if archive.problem]:
                yield [ArchiveEntry(gap=ArchiveGap(reason=reason)) for reason in gaps]

    async def rehearse(self, request: RehearseRequest) -> RehearseResponse:
        """By whoever leads now. NotFound: it has no such worker; InvalidRequest says its reason."""
        lease = await self._link.ledger.leader()
        if lease is None or not lease.nonce:
            raise Unavailable("no scheduler leads")
        async with self._peers.channel(lease.address, CHANNEL_OPTIONS) as channel:
            method = SchedulerServiceStub(channel).Rehearse
            try:
                response: RehearseResponse = await self._peers.ask(method, request, REHEARSE_S)
            except grpc.aio.AioRpcError as error:
                raise _refusal(lease.address, request, error) from None
        return response

    async def _schedulers(self) -> list[str]:
        """The leader, or who led last, and those who stood by then."""
        lease = await self._link.ledger.leader()
        record = (await self._link.ledger.cell()).record
        if lease is None:
            raise Unavailable("no scheduler has led this cell yet")
        standbys = record.standby_addresses if record is not None else ()
        return [address for address in dict.fromkeys([lease.address, *standbys]) if address]

    async def _watched(self, request: WatchRequest) -> AsyncGenerator[bytes, None]:
        """Of one leader after the other, each beginning with a snapshot."""
        heard_ns = self._clock.monotonic_ns()
        while True:
            lease = await self._link.ledger.leader()
            if lease is not None and lease.nonce:
                async with aclosing(self._watch(lease.address, request)) as responses:
                    async for response in responses:
                        yield response
                        heard_ns = self._clock.monotonic_ns()
            if self._clock.monotonic_ns() - heard_ns > NOBODY_LEADS_S_MAX * 1e9:
                raise Unavailable("no scheduler leads")
            await self._clock.sleep(RETRY_S)

    async def _watch(self, address: str, request: WatchRequest) -> AsyncGenerator[bytes, None]:
        """For as long as this scheduler leads, unparsed. Nothing, when it does not."""
        proof = self._peers.proof()
        async with self._peers.channel(address, CHANNEL_OPTIONS) as channel:
            method = channel.unary_stream(
                f"/{SERVICE}/Watch", request_serializer=WatchRequest.SerializeToString
            )
            try:
                async for response in proof.stream(method(request, metadata=proof.metadata)):
                    yield response
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise Overloaded("the leader has as many watchers as it takes", 1.0) from None
                if error.code() not in ELSEWHERE:
                    raise Unavailable(said(address, error)) from None
                log.info("watch.interrupted", address=address, reason=error.details())
