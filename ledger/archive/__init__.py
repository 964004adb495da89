"""The archive: every decision of a leader in files of its own, for tomorrow (docs/archive.md).

The ledger forgets what is over; these files do not. Needs zstd, which the scheduler's extra brings.
"""

from ledger.archive.reader import (
    Cursor,
    Problem,
    Segment,
    Wanted,
    chunks,
    entries,
    segments,
    verify,
)
from ledger.archive.writer import ArchiveBounds, ArchiveWriter

__all__ = [
    "ArchiveBounds",
    "ArchiveWriter",
    "Cursor",
    "Problem",
    "Segment",
    "Wanted",
    "chunks",
    "entries",
    "segments",
    "verify",
]
