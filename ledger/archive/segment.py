"""A segment file in bytes: chunks one behind the other, each whole or not there. Pure.

    chunk    mark "kzA1" | CRC-32 of all that follows | head | payload
    head     payload bytes u32 | raw bytes u32 | first and last seq u64 | first and last time u64
    payload  ArchiveChunk, a zstd frame of its own

Little-endian. A chunk that is torn or damaged costs itself: the next one is found by its mark. The
head says which records are in it, so that a reader passes over what it does not want.
"""

import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from kaiten.v1.archive_pb2 import ArchiveChunk, ArchiveEntry

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    try:
        from backports import zstd
    except ImportError:
        raise ImportError(
            "the archive needs the package backports.zstd. Fix: pip install 'kaiten[scheduler]'"
        ) from None

FORMAT: Final = 1
SUFFIX: Final = ".kza"
MARK: Final = b"kzA1"
# Less is hardly faster, and more hardly smaller.
LEVEL: Final = 3
RAW_BYTES_MAX: Final = 1 << 28
_SUM: Final = struct.Struct("<4sI")
_HEAD: Final = struct.Struct("<IIQQQQ")
HEAD_BYTES: Final = _SUM.size + _HEAD.size
_LENGTH_DELIMITED: Final = 2
_ENTRIES: Final = ArchiveChunk.ENTRIES_FIELD_NUMBER


class Span(NamedTuple):
    """Records [first_seq, last_seq] of a chunk and their times, in ns on the ledger's clock.

    Without records: last_seq and the times are those of the record before, first_seq is the next.
    """

    first_seq: int
    last_seq: int
    first_ns: int
    last_ns: int


class Chunk(NamedTuple):
    """One that is whole."""

    span: Span
    payload: bytes
    raw_bytes: int

    def raw(self) -> bytes:
        """An ArchiveChunk, serialized. ValueError: not what a writer writes."""
        try:
            return zstd.decompress(self.payload)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None

    def entries(self) -> Sequence[ArchiveEntry]:
        """ValueError: not what a writer writes."""
        return ArchiveChunk.FromString(self.raw()).entries


class Damage(NamedTuple):
    """Bytes [start, end) of a file that are no chunk; a tail is what a writer was stopped in."""

    start: int
    end: int
    is_tail: bool


def seal(entries: Sequence[bytes], span: Span) -> bytes:
    """The chunk of some entries, each as `entry_of` makes it."""
    raw = b"".join(entries)
    payload = zstd.compress(raw, LEVEL)
    head = _HEAD.pack(len(payload), len(raw), *span) + payload
    return _SUM.pack(MARK, crc32(head)) + head


def entry_of(kind: int, message: bytes) -> bytes:
    """A serialized message as an entry of an ArchiveChunk, without parsing it again.

    `kind`: its field number in ArchiveEntry.
    """
    return _field(_ENTRIES, _field(kind, message))


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | _LENGTH_DELIMITED,)) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def read(data: bytes) -> Iterator[Chunk | Damage]:
    """What a segment file holds, in order."""
    at, lost_from = 0, -1
    while at < len(data):
        if (chunk := _chunk_at(data, at)) is not None:
            if lost_from >= 0:
                yield Damage(lost_from, at, is_tail=False)
                lost_from = -1
            yield chunk
            at += HEAD_BYTES + len(chunk.payload)
            continue
        if lost_from < 0:
            lost_from = at
        found = data.find(MARK, at + 1)
        at = found if found >= 0 else len(data)
    if lost_from >= 0:
        yield Damage(lost_from, len(data), is_tail=True)


def _chunk_at(data: bytes, at: int) -> Chunk | None:
    if len(data) < at + HEAD_BYTES:
        return None
    mark, checksum = _SUM.unpack_from(data, at)
    length, raw_bytes, *span = _HEAD.unpack_from(data, at + _SUM.size)
    end = at + HEAD_BYTES + length
    if mark != MARK or len(data) < end or raw_bytes > RAW_BYTES_MAX:
        return None
    if crc32(memoryview(data)[at + _SUM.size : end]) != checksum:
        return None
    return Chunk(Span(*span), data[at + HEAD_BYTES : end], raw_bytes)


def name_of(epoch: int, index: int) -> str:
    """Sorted by name, segments are in order of their leaderships."""
    return f"{epoch:020d}-{index:06d}{SUFFIX}"
