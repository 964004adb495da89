"""Writes the archive of one leadership, from a thread of its own behind a bounded queue.

What is handed over here is never waited for. A disk that is slow or full costs entries, not steps:
they are dropped, and a gap is written where they should stand as soon as the disk takes it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kaiten.v1.archive_pb2 import (
    ArchivedRequest,
    ArchiveEntry,
    ArchiveGap,
    ArchiveHeader,
    ResumedChoice,
    Snapshot,
)
from kaiten.v1.ledger_pb2 import FoldedTokens, JournalRecord, SubmitRecord
from ledger.archive.redaction import BLOCK_TOKENS, Redactor
from ledger.archive.segment import FORMAT, SUFFIX, Span, entry_of, name_of, seal
from ledger.types import InboxEntry

# What a killed process loses of its archive. Chunks of less cost more, of time and of bytes.
FLUSH_S: Final = 0.5
# Raw; a chunk is closed above it.
CHUNK_BYTES: Final = 1 << 20
QUEUE_BYTES_MAX: Final = 32 << 20
# Old segments are looked for this often while nothing is written.
PRUNE_S: Final = 60.0
# Segments that the bounds are divided into: so much of them is thrown away at a time.
SEGMENTS: Final = 8
# A reader begins at most so many records, or raw bytes, before what it wants: a second of its time.
SNAPSHOT_RECORDS: Final = 16_384
SNAPSHOT_BYTES: Final = 16 << 20
# Of a segment's bounds: then it ends with the next snapshot, which begins the one after it.
FULL: Final = 0.9

_REQUEST: Final = ArchiveEntry.REQUEST_FIELD_NUMBER
_RECORD: Final = ArchiveEntry.RECORD_FIELD_NUMBER
_HEADER: Final = ArchiveEntry.HEADER_FIELD_NUMBER
_GAP: Final = ArchiveEntry.GAP_FIELD_NUMBER
_BLOCK: Final = ArchiveEntry.BLOCK_FIELD_NUMBER
_SNAPSHOT: Final = ArchiveEntry.SNAPSHOT_FIELD_NUMBER
TOO_SLOW: Final = "the disk did not keep up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveBounds:
    """Of all segments in a folder, whoever wrote them."""

    bytes_max: int
    age_s_max: float

    @property
    def segment_bytes(self) -> int:
        return self.bytes_max // SEGMENTS

    @property
    def segment_s(self) -> float:
        return self.age_s_max / SEGMENTS


class _Item(NamedTuple):
    """A serialized message that waits to be written; `seq` and `unix_ns` of a record, or 0."""

    kind: int
    message: bytes
    seq: int = 0
    unix_ns: int = 0


class _PendingSnapshot(NamedTuple):
    """A snapshot that waits to be made, with the requests that no record knows of yet."""

    seq: int
    made: Callable[[], Snapshot]
    taken: list[ArchivedRequest]


# What waits to be written.
_Waiting = _Item | ArchiveGap | _PendingSnapshot


class ArchiveWriter:
    """`request`, `record` and `snapshot` may be called until `close`; they cost microseconds and
    raise nothing.

    `on_trouble` is told what is wrong with the disk, from the thread, and "" when it is well again.
    """

    def __init__(
        self,
        folder: Path,
        header: ArchiveHeader,
        bounds: ArchiveBounds,
        on_trouble: Callable[[str], None] = lambda reason: None,
    ) -> None:
        # Entries that nobody will read.
        self.dropped = 0
        self._folder, self._bounds, self._on_trouble = folder, bounds, on_trouble
        self._header = ArchiveHeader()
        self._header.CopyFrom(header)
        self._header.format, self._header.block_tokens = FORMAT, BLOCK_TOKENS
        self._redactor = None if header.has_tokens else Redactor()
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        # Since the newest snapshot was handed over, and behind which record it stands; and
        # one whose record has not come yet.
        self._records_since = self._bytes_since = self._snapshot_seq = 0
        self._pending: _PendingSnapshot | None = None
        self._wake = threading.Condition()
        self._is_closed = self._is_idle = False
        # Of the last record written, for chunks that have none.
        self._seq, self._unix_ns = header.journal_seq, header.unix_ns
        # What could not be written, to be said first as soon as anything can be.
        self._gap: ArchiveGap | None = None
        self._file: int | None = None
        self._end, self._opened_s = 0, 0.0
        # A snapshot should come: the segment has none at its head, or ends with the next one;
        # and that is said once of each.
        self._is_snapshot_due = self._is_asked = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    # Handed over

    def request(
        self, entry: InboxEntry, record: SubmitRecord, outputs: Sequence[FoldedTokens | None] = ()
    ) -> None:
        """A request is live from here on. `outputs`: committed by earlier leaders, None: ended."""
        told = ArchivedRequest(
            entry_id=entry.entry_id,
            sequence_id=entry.sequence_id,
            prompt_tokens=len(record.prompt_token_ids),
            snapshot_seq=self._snapshot_seq,
            choices=[
                ResumedChoice(is_finished=True)
                if output is None
                else ResumedChoice(token_ids=output.token_ids, tokens=len(output.token_ids))
                for output in outputs
            ],
        )
        if self._pending is not None:
            bare = SubmitRecord(id=record.id, tenant=record.tenant, n=record.n)
            taken = ArchivedRequest(
                entry_id=entry.entry_id,
                sequence_id=entry.sequence_id,
                submit=bare,
                snapshot_seq=self._pending.seq,
            )
            self._pending.taken.append(taken)
        told.submit.CopyFrom(record)
        self._put(_Item(_REQUEST, told.SerializeToString()))

    def record(self, record: JournalRecord, data: bytes = b"") -> None:
        """This was committed, in order, without holes. `data`: itself, serialized already."""
        data = data or record.SerializeToString()
        self._put(_Item(_RECORD, data, record.seq, record.unix_ns))
        self._records_since += 1
        if (pending := self._pending) is not None and record.seq >= pending.seq:
            self._pending = None
            if record.seq == pending.seq and self._put(pending):
                self._snapshot_seq = pending.seq

    @property
    def wants_snapshot(self) -> bool:
        """So much was handed over that readers should begin anew."""
        is_long = self._records_since >= SNAPSHOT_RECORDS or self._bytes_since >= SNAPSHOT_BYTES
        return self._pending is None and (is_long or self._is_snapshot_due)

    def snapshot(self, seq: int, made: Callable[[], Snapshot]) -> None:
        """Behind record `seq`, which has yet to come, readers may begin; `made` is called by the
        thread.
        """
        self._records_since = self._bytes_since = 0
        self._is_snapshot_due = False
        self._pending = _PendingSnapshot(seq, made, [])

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what was handed over, if the disk does; nothing is taken any more."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _put(self, item: _Item | _PendingSnapshot) -> bool:
        """False: it was dropped."""
        size = len(item.message) if isinstance(item, _Item) else 0
        with self._wake:
            if self._is_closed:
                return False
            if self._bytes + size > QUEUE_BYTES_MAX:
                self._drop(item)
                return False
            is_full = self._bytes < CHUNK_BYTES <= self._bytes + size
            self._queue.append(item)
            self._bytes += size
            self._bytes_since += size
            if self._is_idle or is_full:
                self._wake.notify()
        return True

    def _drop(self, item: _Item | _PendingSnapshot) -> None:
        last = self._queue[-1] if self._queue else None
        if not isinstance(last, ArchiveGap):
            last = ArchiveGap(reason=TOO_SLOW)
            self._queue.append(last)
        _count(last, [item])
        self.dropped += 1

    # In the thread

    def _run(self) -> None:
        while True:
            items = self._next()
            if items:
                self._write(items)
            elif self._is_closed and not self._queue:
                break
            elif not self._queue:
                with suppress(OSError):
                    self._prune(0)
        self._close_file()

    def _next(self) -> list[_Waiting]:
        """What the next chunk is of: one snapshot, or what is before the next one; nothing
        once in a while, and at the end.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._bytes >= CHUNK_BYTES or self._is_closed, FLUSH_S)
            if not self._queue:
                # While records come, nobody is woken for the first of them.
                self._is_idle = True
                self._wake.wait_for(lambda: self._queue or self._is_closed, PRUNE_S)
                self._is_idle = False
                return []
            items: list[_Waiting] = []
            taken = 0
            while self._queue and taken < CHUNK_BYTES:
                if isinstance(self._queue[0], _PendingSnapshot) and items:
                    break
                item = self._queue.popleft()
                items.append(item)
                if isinstance(item, _PendingSnapshot):
                    break
                taken += len(item.message) if isinstance(item, _Item) else 0
            self._bytes -= taken
            return items

    def _write(self, items: list[_Waiting]) -> None:
        is_snapshot = isinstance(items[0], _PendingSnapshot)
        try:
            chunk = self._chunk([self._gap, *items] if self._gap is not None else items)
            self._append(chunk, is_snapshot=is_snapshot)
        except Exception as error:
            # Of ours too: a thread that ends would say nothing any more.
            reason = error.strerror if isinstance(error, OSError) else ""
            self._say(reason or type(error).__name__)
            if self._gap is None:
                self._gap = ArchiveGap()
            self._gap.reason = self._trouble
            _count(self._gap, items)
            self.dropped += len(items)
        else:
            self._say("")
            self._gap = None

    def _say(self, trouble: str) -> None:
        """Once when it begins, and once when it is over."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._on_trouble(trouble)

    def _chunk(self, items: Iterable[_Waiting]) -> bytes:
        first_seq, first_ns, entries = 0, 0, []
        for item in items:
            if isinstance(item, ArchiveGap):
                entries.append(entry_of(_GAP, item.SerializeToString()))
                continue
            if isinstance(item, _PendingSnapshot):
                point = item.made()
                point.taken.extend(item.taken)
                entries.append(entry_of(_SNAPSHOT, point.SerializeToString()))
                continue
            if item.seq:
                self._seq, self._unix_ns = item.seq, item.unix_ns
                first_seq, first_ns = first_seq or item.seq, first_ns or item.unix_ns
            entries += self._entries(item)
        return seal(entries, self._span(first_seq, first_ns))

    def _span(self, first_seq: int = 0, first_ns: int = 0) -> Span:
        last_seq, last_ns = self._seq, self._unix_ns
        return Span(first_seq or last_seq + 1, last_seq, first_ns or last_ns, last_ns)

    def _entries(self, item: _Item) -> list[bytes]:
        if self._redactor is None:
            return [entry_of(item.kind, item.message)]
        if item.kind == _REQUEST:
            bare = self._redactor.request(ArchivedRequest.FromString(item.message))
            return [entry_of(_REQUEST, bare.SerializeToString())]
        record = JournalRecord.FromString(item.message)
        blocks = self._redactor.record(record)
        return [
            entry_of(_RECORD, record.SerializeToString()),
            *(entry_of(_BLOCK, block.SerializeToString()) for block in blocks),
        ]

    # The files

    def _append(self, chunk: bytes, *, is_snapshot: bool) -> None:
        """OSError: nothing of it is there, as far as the disk allows."""
        if self._file is not None and self._is_over(len(chunk), FULL if is_snapshot else 1.0):
            self._close_file()
        if self._file is None:
            # A leadership's first is read from its beginning.
            self._is_snapshot_due = bool(self._header.segment) and not is_snapshot
            self._is_asked = self._is_snapshot_due
            self._open(len(chunk))
        assert self._file is not None
        try:
            _write_all(self._file, chunk)
        except OSError:
            self._undo(self._file)
            raise
        self._end += len(chunk)
        if not self._is_asked and self._is_over(0, FULL):
            self._is_snapshot_due = self._is_asked = True

    def _undo(self, file: int) -> None:
        """Cut off what was half written; where that fails, a reader finds the tear."""
        try:
            os.ftruncate(file, self._end)
            os.lseek(file, self._end, os.SEEK_SET)
        except OSError:
            self._close_file()

    def _is_over(self, more: int, share: float) -> bool:
        """Of its bounds the segment would have that share."""
        assert self._file is not None
        is_old = time.monotonic() - self._opened_s > share * self._bounds.segment_s
        is_deleted = not os.fstat(self._file).st_nlink
        return is_old or is_deleted or self._end + more > share * self._bounds.segment_bytes

    def _open(self, more: int) -> None:
        """The next segment, after room was made for it."""
        header = seal([entry_of(_HEADER, self._header.SerializeToString())], self._span())
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._prune(max(self._bounds.segment_bytes, len(header) + more))
        path = self._folder / name_of(self._header.epoch, self._header.segment)
        # What was said is nobody else's.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(file, header)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self._end, self._opened_s = file, len(header), time.monotonic()
        self._header.segment += 1

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _prune(self, needed: int) -> None:
        """Delete what is too old, and the oldest until so many bytes may be added."""
        paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        # Another scheduler may have deleted one.
        found = [(path, status) for path in paths if (status := _status(path)) is not None]
        total = sum(status.st_size for _, status in found)
        oldest_s = time.time_ns() / 1e9 - self._bounds.age_s_max
        for path, status in found:
            if total + needed <= self._bounds.bytes_max and status.st_mtime >= oldest_s:
                continue
            path.unlink(missing_ok=True)
            total -= status.st_size


def _count(gap: ArchiveGap, items: Iterable[_Waiting]) -> None:
    """These are missing too."""
    for item in items:
        if isinstance(item, _PendingSnapshot):
            continue
        if isinstance(item, ArchiveGap):
            gap.requests += item.requests
            first_seq, last_seq = item.first_seq, item.last_seq
        else:
            gap.requests += item.kind == _REQUEST
            first_seq = last_seq = item.seq
        if last_seq:
            gap.first_seq, gap.last_seq = gap.first_seq or first_seq, last_seq


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
