"""Commits to the ledger, in order, many per round trip, one round trip at a time.

Step k+1 runs while step k is being committed. Nothing is planned while too much has piled
up here, so an unreachable store pauses the streams and loses nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from ledger import Commit, Leader, Ledger, StoreLost
from protos.kaiten.v1.ledger_pb2 import FoldedTokens
from scheduler_svc.archiving import Archive
from scheduler_svc.journal_window import JournalWindow
from scheduler_svc.settings import SchedulerSettings
from service_kit.clock import Clock
from service_kit.errors import Unavailable

log = structlog.get_logger()

BATCH_MAX = 64
RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Tokens of live sequences up to a record, to be moved out of the journal, which is trimmed."""

    through_seq: int
    trim_seq: int
    pieces: Mapping[int, FoldedTokens]


class CommitQueue:
    """The queue between the core's decisions and the durable record."""

    def __init__(
        self,
        ledger: Ledger,
        leader: Leader,
        settings: SchedulerSettings,
        clock: Clock,
        on_progress: Callable[[], None],
        archive: Archive | None = None,
    ) -> None:
        self._ledger = ledger
        self._leader = leader
        self._clock = clock
        self._on_progress = on_progress
        self._archive = archive
        self._queue: deque[Commit | Fold] = deque()
        self._has_work = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()
        self.committed_seq = leader.journal_seq
        self._window = JournalWindow(
            keep_ns=int(settings.journal_s * 1e9),
            bytes_max=settings.journal_mb << 20,
            first_seq=leader.journal_seq,
            now_ns=clock.monotonic_ns(),
        )
        # On the clock's monotonic time: when the ledger last acknowledged something.
        self.committed_ns = clock.monotonic_ns()

    def __repr__(self) -> str:
        return f"<CommitQueue seq={self.committed_seq} backlog={self.backlog}>"

    @property
    def backlog(self) -> int:
        """Records not yet acknowledged by the ledger."""
        return len(self._queue)

    def put(self, commit: Commit | None) -> None:
        """Commit this after everything before it. None is nothing to say."""
        if commit is not None:
            self._window.put(commit.record.seq, len(commit.data))
            self._append(commit)

    def put_fold(self, through_seq: int, pieces: Mapping[int, FoldedTokens]) -> None:
        """Fold after the records it covers are committed."""
        trim_seq = self._window.trim_seq(through_seq, self._clock.monotonic_ns())
        self._append(Fold(through_seq=through_seq, trim_seq=trim_seq, pieces=pieces))

    async def flushed(self) -> None:
        """Wait until everything put so far is acknowledged."""
        await self._is_flushed.wait()

    async def run(self) -> None:
        """Commit until cancelled. Raises Fenced (somebody else leads) and StoreLost."""
        while True:
            await self._has_work.wait()
            try:
                await self._commit_some()
            except StoreLost:
                raise
            except Unavailable as error:
                log.warning("commit.waiting", reason=str(error), backlog=self.backlog)
                await self._clock.sleep(RETRY_S)

    async def _commit_some(self) -> None:
        """One round trip. What is sent leaves the queue only when it is acknowledged."""
        first = self._queue[0]
        if isinstance(first, Fold):
            await self._ledger.fold(
                self._leader, first.through_seq, first.pieces, trim_seq=first.trim_seq
            )
            self._drop(1)
            return
        batch: list[Commit] = []
        for item in self._queue:
            if isinstance(item, Fold) or len(batch) == BATCH_MAX:
                break
            batch.append(item)
        await self._ledger.commit_many(self._leader, batch)
        self.committed_seq = batch[-1].record.seq
        self.committed_ns = self._clock.monotonic_ns()
        self._drop(len(batch))
        if self._archive is not None:
            for commit in batch:
                self._archive.record(commit.record, commit.data)

    def _append(self, item: Commit | Fold) -> None:
        self._queue.append(item)
        self._has_work.set()
        self._is_flushed.clear()

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft()
        if not self._queue:
            self._has_work.clear()
            self._is_flushed.set()
        self._on_progress()
