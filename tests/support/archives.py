"""Archives to write and to read: of records a second apart, of one token each."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveHeader
from kaiten.v1.ledger_pb2 import ConfiguredInput, FoldedTokens, JournalRecord, SubmitRecord
from ledger import InboxEntry
from ledger.archive import ArchiveBounds, ArchiveWriter, Wanted, entries

BOUNDS = ArchiveBounds(bytes_max=64 << 20, age_s_max=3600.0)
SECOND = 1_000_000_000


def header(epoch: int = 7, journal_seq: int = 100, *, has_tokens: bool = True) -> ArchiveHeader:
    return ArchiveHeader(
        version="0.2.0",
        cell="0",
        epoch=epoch,
        journal_seq=journal_seq,
        after_seq=journal_seq,
        configured=ConfiguredInput(policy="fair"),
        has_tokens=has_tokens,
        unix_ns=journal_seq * SECOND,
    )


def record(seq: int, sequence_ids: Sequence[int] = (1,), epoch: int = 7) -> JournalRecord:
    """Of one token each, a second behind the one before."""
    return JournalRecord(
        seq=seq,
        epoch=epoch,
        unix_ns=seq * SECOND,
        sequence_ids=sequence_ids,
        positions=[seq] * len(sequence_ids),
        token_ids=[seq * 7 % 1000] * len(sequence_ids),
    )


def entry(sequence_id: int, prompt: Sequence[int] = (5, 6, 7), n: int = 1) -> InboxEntry:
    submit = SubmitRecord(
        id=f"t:{sequence_id}", tenant="t", n=n, prompt_token_ids=prompt, timeout_ms=1
    )
    return InboxEntry(entry_id="17-0", sequence_id=sequence_id, record=submit)


def take_in(
    archive: ArchiveWriter, one: InboxEntry, outputs: Sequence[FoldedTokens | None] = ()
) -> None:
    assert isinstance(one.record, SubmitRecord)
    archive.request(one, one.record, outputs)


@contextmanager
def archive_of(folder: Path, head: ArchiveHeader | None = None) -> Iterator[ArchiveWriter]:
    """One that is closed, and so written, behind the block."""
    archive = ArchiveWriter(folder, head or header(), BOUNDS)
    yield archive
    archive.close()


def seqs(folder: Path, wanted: Wanted | None = None) -> list[int]:
    found = entries([folder], wanted or Wanted())
    return [each.record.seq for each in found if each.HasField("record")]


def kinds(found: Iterator[ArchiveEntry]) -> list[str | None]:
    return [each.WhichOneof("entry") for each in found]


def write_records(folder: Path, count: int, *, is_apart: bool = False) -> list[JournalRecord]:
    """`is_apart`: a chunk each."""
    told = [record(101 + index) for index in range(count)]
    with archive_of(folder) as archive:
        for each in told:
            archive.record(each)
            if is_apart:
                until_written(archive)
    return told


def until_written(archive: ArchiveWriter) -> None:
    """The queue was taken; what is handed over now is another chunk's."""
    while archive._queue:
        threading.Event().wait(0.001)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.001)
