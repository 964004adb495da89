"""The archives of a cell's schedulers, read as one story."""

from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple

import grpc

from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from service_kit.peers import Peers

CHANNEL_OPTIONS: Final = (
    # A chunk of an archive, and the longest prompt behind it.
    ("grpc.max_receive_message_length", 64 << 20),
    # A scheduler that is put aside, or whose host is gone, is not waited for.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


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
                self.problem = said(self._address, error)


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


def said(address: str, error: grpc.aio.AioRpcError) -> str:
    return f"the scheduler at {address}: {error.code().name}: {error.details()}"
