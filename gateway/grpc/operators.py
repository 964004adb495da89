"""What only operators may see: the live core of the cell, and the archives of its schedulers.

Gateways decide nothing and keep nothing. They know where the schedulers are, the leader from its
lease and who stands by from what it says of its cell, ask them, and hand on what these say. The
methods are SchedulerService's own, so whoever can ask a scheduler can ask a gateway.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import grpc
import structlog

from gateway.grpc.inference import metadata
from gateway.requests.ledger_session import LedgerLink
from gateway.tenants import AUTHORIZATION_CHARS_MAX, Keyring
from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveGap
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest, ReadArchiveResponse
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.watch_pb2 import WatchRequest
from service_kit.clock import Clock
from service_kit.errors import NotFound, Overloaded, Unavailable
from service_kit.grpc_health import AtMost
from service_kit.peers import Peers

log = structlog.get_logger()

SERVICE: Final = "kaiten.v1.SchedulerService"
STREAMS_MAX: Final = 16
RETRY_S: Final = 0.2
# Without a leader, until whoever watches is told so.
NOBODY_LEADS_S_MAX: Final = 10.0
# Who does not lead (any more), or is not there: another does, or will soon.
ELSEWHERE: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
CHANNEL_OPTIONS: Final = (
    # A chunk of an archive, and the longest prompt behind it.
    ("grpc.max_receive_message_length", 64 << 20),
    # A scheduler that is put aside, or whose host is gone, is not waited for.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class Operators:
    """Watch and ReadArchive of a cell, whichever of its schedulers leads or led."""

    def __init__(
        self, link: LedgerLink, keyring: Keyring, clock: Clock, peers: Peers | None = None
    ) -> None:
        self._link, self._keyring, self._clock = link, keyring, clock
        self._peers = peers or Peers()
        self._streams = AtMost(STREAMS_MAX, "operators' streams")

    def add_to(self, server: "grpc.aio.Server") -> None:
        """These methods and no others: all else of the service is between schedulers and workers.
        What the leader says is handed on unread.
        """
        handlers = {
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.Watch, request_deserializer=WatchRequest.FromString
            ),
            "ReadArchive": grpc.unary_stream_rpc_method_handler(
                self.ReadArchive,
                request_deserializer=ReadArchiveRequest.FromString,
                response_serializer=ReadArchiveResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[bytes]:
        await self._check(context)
        with self._streams:
            async with aclosing(self._watched(request)) as responses:
                async for response in responses:
                    yield response

    async def ReadArchive(
        self, request: ReadArchiveRequest, context: Any
    ) -> AsyncIterator[ReadArchiveResponse]:
        await self._check(context)
        with self._streams:
            schedulers = await self._schedulers()
            archives = [Archive(address, request, self._peers) for address in schedulers]
            async with aclosing(merged([archive.parts() for archive in archives])) as parts:
                async for part in parts:
                    yield ReadArchiveResponse(entries=part.entries)
            if not any(archive.is_kept for archive in archives):
                raise NotFound("an archive of this cell's schedulers (--archive-dir)")
            if gaps := [archive.problem for archive in archives if archive.problem]:
                yield ReadArchiveResponse(
                    entries=[ArchiveEntry(gap=ArchiveGap(reason=reason)) for reason in gaps]
                )

    async def _check(self, context: Any) -> None:
        authorization = metadata(context, "authorization", AUTHORIZATION_CHARS_MAX)
        await self._keyring.admit_operator(authorization, context.peer())

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
                    raise Unavailable(_said(address, error)) from None
                log.info("watch.interrupted", address=address, reason=error.details())


class Part(NamedTuple):
    """Some of a segment, in order."""

    epoch: int
    segment: int
    entries: Sequence[ArchiveEntry]


class Archive:
    """What one scheduler has written."""

    def __init__(self, address: str, request: ReadArchiveRequest, peers: Peers) -> None:
        self._address, self._request, self._peers = address, request, peers
        # Whether it keeps one, as far as is known; and why not all of it came.
        self.is_kept = True
        self.problem = ""

    async def parts(self) -> AsyncGenerator[Part, None]:
        """In order of leadership and segment. Never raises for the scheduler's sake."""
        epoch = segment = 0
        proof = self._peers.proof()
        async with self._peers.channel(self._address, CHANNEL_OPTIONS) as channel:
            read = SchedulerServiceStub(channel).ReadArchive
            try:
                async for response in proof.stream(read(self._request, metadata=proof.metadata)):
                    entries = response.entries
                    if entries and entries[0].HasField("header"):
                        epoch, segment = entries[0].header.epoch, entries[0].header.segment
                    yield Part(epoch, segment, entries)
            except grpc.aio.AioRpcError as error:
                self.is_kept = error.code() is not grpc.StatusCode.NOT_FOUND
                self.problem = _said(self._address, error)


async def merged(sources: Sequence[AsyncGenerator[Part, None]]) -> AsyncGenerator[Part, None]:
    """One story by epoch and segment, of sources that are in that order each.

    Schedulers of one host may share a folder: a segment is taken from the first source that has it.
    """
    heads: dict[int, Part] = {}
    takers: dict[tuple[int, int], int] = {}
    ahead = list(range(len(sources)))
    try:
        while True:
            for index in ahead:
                if (part := await anext(sources[index], None)) is not None:
                    heads[index] = part
            if not heads:
                return
            index = min(heads, key=lambda each: (*heads[each][:2], each))
            part, ahead = heads.pop(index), [index]
            if takers.setdefault(part[:2], index) == index:
                yield part
    finally:
        for source in sources:
            await source.aclose()


def _said(address: str, error: grpc.aio.AioRpcError) -> str:
    return f"the scheduler at {address}: {error.code().name}: {error.details()}"
