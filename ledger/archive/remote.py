"""Archives of schedulers elsewhere, read through ReadArchive and merged into one."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import grpc

from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from ledger.archive.reader import Wanted
from service_kit.peers import Peers

# A chunk, and the longest prompt behind it.
MESSAGE_BYTES_MAX: Final = 64 << 20
Missed = Callable[[str], None]


def remote_entries(
    addresses: Sequence[str],
    wanted: Wanted,
    api_key: str = "",
    peers: Peers | None = None,
    *,
    own: Iterable[Sequence[ArchiveEntry]] = (),
    missed: Missed | None = None,
) -> Iterator[ArchiveEntry]:
    """As `reader.entries`, of the schedulers at these host:port. grpc.RpcError: one is away, unless
    `missed` is to be told why. `own`: what is here, which is taken where others have it, too.

    A gateway knows its cell's schedulers, and wants an operator's key; schedulers want a proof of
    `peers`, and give one.
    """
    peers = peers or Peers()
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    request = ReadArchiveRequest(
        after_epoch=wanted.after.epoch,
        after_seq=wanted.after.seq,
        since_unix_ns=wanted.since_ns,
        until_unix_ns=wanted.until_ns,
        id=wanted.id,
    )
    with ExitStack() as open_channels:
        streams: list[Iterable[Sequence[ArchiveEntry]]] = [own]
        for address in addresses:
            options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
            channel = open_channels.enter_context(peers.blocking_channel(address, options))
            proof = peers.proof()
            responses = SchedulerServiceStub(channel).ReadArchive(
                request, metadata=metadata + proof.metadata
            )
            streams.append(_chunks(proof.blocking_stream(responses), missed))
        # Schedulers of one host may share a folder: a segment is read from one of them.
        readers: dict[tuple[int, int], int] = {}
        placed = [_by_epoch(chunks, index) for index, chunks in enumerate(streams)]
        for epoch, segment, index, entries in heapq.merge(*placed, key=lambda item: item[:3]):
            if readers.setdefault((epoch, segment), index) == index:
                yield from entries


def _chunks(responses: Iterator[Any], missed: Missed | None) -> Iterator[Sequence[ArchiveEntry]]:
    try:
        for response in responses:
            yield response.entries
    except grpc.RpcError as error:
        if missed is None:
            raise
        missed(f"{error.code().name}: {error.details()}")


def _by_epoch(
    chunks: Iterable[Sequence[ArchiveEntry]], index: int
) -> Iterator[tuple[int, int, int, Sequence[ArchiveEntry]]]:
    """Each with the leadership and the segment that it is of, and who says it."""
    epoch = segment = 0
    for entries in chunks:
        if entries[0].HasField("header"):
            epoch, segment = entries[0].header.epoch, entries[0].header.segment
        yield epoch, segment, index, entries
