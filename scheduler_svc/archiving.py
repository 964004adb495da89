"""The archive of a leadership: what a leader writes beside the ledger, and where."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

import structlog

from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveHeader, Snapshot
from kaiten.v1.ledger_pb2 import FoldedTokens, JournalRecord, SubmitRecord
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest
from ledger import InboxEntry, Leader
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.settings import SchedulerSettings
from service_kit.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from ledger.archive import ArchiveWriter

log = structlog.get_logger()

MIB = 1 << 20


class Archive(Protocol):
    """What a leadership tells its archive. No call waits or raises."""

    def request(
        self, entry: InboxEntry, record: SubmitRecord, outputs: Sequence[FoldedTokens | None] = ()
    ) -> None: ...

    def record(self, record: JournalRecord, data: bytes = b"") -> None: ...

    @property
    def wants_snapshot(self) -> bool: ...

    def snapshot(self, seq: int, made: Callable[[], Snapshot]) -> None: ...


def check(settings: SchedulerSettings) -> None:
    """ConfigError for an archive that could not be written here."""
    if settings.archive_dir is None:
        return
    try:
        import_module("ledger.archive")
    except ImportError:
        raise ConfigError(
            "--archive-dir needs the package backports.zstd. Fix: pip install 'kaiten[scheduler]',"
            " or leave the flag out (kaiten serve: --archive-mb 0)"
        ) from None


def folder_of(settings: SchedulerSettings) -> Path | None:
    """Where this scheduler keeps what it decided for its cell; None: nowhere."""
    if settings.archive_dir is None:
        return None
    return settings.archive_dir / f"cell-{quote(settings.cell, safe='')}"


def begin(settings: SchedulerSettings, leader: Leader, store: str) -> "ArchiveWriter | None":
    """The archive of this leadership; None when none is kept."""
    folder = folder_of(settings)
    if folder is None:
        return None
    from ledger.archive import ArchiveBounds, ArchiveWriter

    header = ArchiveHeader(
        version=version("kaiten"),
        cell=settings.cell,
        store=store,
        epoch=leader.epoch,
        journal_seq=leader.journal_seq,
        after_seq=leader.after_seq,
        configured=configured_to_proto(settings.configured),
        has_tokens=settings.archive_prompts,
        has_outcomes=True,
        unix_ns=time.time_ns(),
    )
    bounds = ArchiveBounds(
        bytes_max=settings.archive_mb * MIB, age_s_max=settings.archive_hours * 3600
    )
    return ArchiveWriter(folder, header, bounds, _tell)


async def read(
    settings: SchedulerSettings, request: ReadArchiveRequest
) -> AsyncIterator[Sequence[ArchiveEntry]]:
    """What is wanted of all this scheduler has written. NotFound: it keeps no archive."""
    folder = folder_of(settings)
    if folder is None:
        raise NotFound("an archive of this scheduler (--archive-dir)")
    from ledger.archive import Cursor, Wanted, chunks

    wanted = Wanted(
        after=Cursor(request.after_epoch, request.after_seq),
        since_ns=request.since_unix_ns,
        until_ns=request.until_unix_ns,
        id=request.id,
    )
    found = chunks([folder], wanted)
    while (entries := await asyncio.to_thread(next, found, None)) is not None:
        yield entries


def _tell(trouble: str) -> None:
    if trouble:
        log.error("archive.gap", reason=trouble)
    else:
        log.info("archive.goes_on")
