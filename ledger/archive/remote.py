"""Archives of schedulers elsewhere, read through ReadArchive and merged into one."""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import grpc

from ledger.archive.reader import Wanted
from protos.kaiten.v1.archive_pb2 import ArchiveEntry
from protos.kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest
from protos.kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

# A chunk, and the longest prompt behind it.
MESSAGE_BYTES_MAX: Final = 64 << 20


def remote_entries(addresses: Sequence[str], wanted: Wanted) -> Iterator[ArchiveEntry]:
    """As `reader.entries`, of the schedulers at these host:port. grpc.RpcError: one is away."""
    request = ReadArchiveRequest(
        after_epoch=wanted.after.epoch,
        after_seq=wanted.after.seq,
        since_unix_ns=wanted.since_ns,
        until_unix_ns=wanted.until_ns,
        id=wanted.id,
    )
    with ExitStack() as open_channels:
        streams = []
        for address in addresses:
            options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
            channel = open_channels.enter_context(grpc.insecure_channel(address, options))
            streams.append(_by_epoch(SchedulerServiceStub(channel).ReadArchive(request)))
        for _, _, entries in heapq.merge(*streams, key=lambda item: item[:2]):
            yield from entries


def _by_epoch(
    responses: "Iterator[object]",
) -> Iterator[tuple[int, int, Sequence[ArchiveEntry]]]:
    """Each with the leadership and the segment that it is of."""
    epoch = segment = 0
    for response in responses:
        entries: Sequence[ArchiveEntry] = response.entries  # type: ignore[attr-defined]
        if entries[0].HasField("header"):
            epoch, segment = entries[0].header.epoch, entries[0].header.segment
        yield epoch, segment, entries
