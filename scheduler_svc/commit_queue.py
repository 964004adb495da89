"""Commits to the ledger, in order, many per round trip, one round trip at a time.

Step k+1 runs while step k is being committed. Nothing is planned while too much has piled
up here, so an unreachable store pauses the streams and loses nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kaiten.v1.ledger_pb2 import FoldedTokens
from ledger import Commit, FoldPart, Leader, Ledger, StoreLost
from scheduler_svc.archiving import Archive
from scheduler_svc.core.types import SequenceId
from scheduler_svc.journal_window import JournalWindow
from scheduler_svc.request_book import Piece
from scheduler_svc.settings import SchedulerSettings
from service_kit.clock import Clock
from service_kit.errors import Unavailable
from service_kit.outages import Outage

BATCH_MAX = 64
# Sequences.
FOLD_PART_MAX = 256
RETRY_S = 0.2
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Tokens of live sequences up to a record, to be moved out of the journal, which is trimmed
    with the last part.
    """

    through_seq: int
    # The newest record when it was made. What ended with it, or before, has no piece.
    newest_seq: int
    trim_seq: int
    part: FoldPart
    pieces: Sequence[tuple[SequenceId, Piece]]


class CommitQueue:
    """The queue between the core's decisions and the durable record."""

    def __init__(
        self,
        ledger: Ledger,
        leader: Leader,
        settings: SchedulerSettings,
        clock: Clock,
        on_progress: Callable[[Sequence[Commit]], None],
        archive: Archive | None = None,
    ) -> None:
        self._ledger = ledger
        self._leader = leader
        self._clock = clock
        self._on_progress = on_progress
        self._archive = archive
        self._outage = Outage("commit.waiting", over="commit.goes_on")
        self._queue: deque[Commit] = deque()
        self._folds: deque[Fold] = deque()
        # Steps of workers among what is queued.
        self.steps_ahead = 0
        self._has_work = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()
        self.committed_seq = self.folded_seq = leader.journal_seq
        self._window = JournalWindow(
            keep_ns=int(settings.journal_s * 1e9),
            bytes_max=settings.journal_mb << 20,
            first_seq=leader.journal_seq,
            now_ns=clock.monotonic_ns(),
        )
        # On the clock's monotonic time: when the ledger last acknowledged something.
        self.committed_ns = clock.monotonic_ns()
        # Of that.
        self.round_trip_ns = 0

    def __repr__(self) -> str:
        return f"<CommitQueue seq={self.committed_seq} backlog={self.backlog}>"

    @property
    def backlog(self) -> int:
        """Records not yet acknowledged by the ledger."""
        return len(self._queue)

    @property
    def oldest_ns(self) -> int | None:
        """When the oldest of those was decided, on the ledger's clock."""
        return self._queue[0].record.unix_ns if self._queue else None

    def put(self, commit: Commit | None) -> None:
        """Commit this after everything before it. None is nothing to say."""
        if commit is not None:
            self._window.put(commit.record.seq, len(commit.data))
            self._queue.append(commit)
            self.steps_ahead += commit.record.HasField("step")
            self._has_more()

    def put_fold(self, through_seq: int, pieces: Mapping[SequenceId, Piece]) -> None:
        """Fold after all records so far are committed: those that it covers, and those by which the
        requests end that it leaves out. In parts, or every worker's next plan and every token would
        wait for thousands of sequences.
        """
        newest_seq = self._queue[-1].record.seq if self._queue else self.committed_seq
        trim_seq = self._window.trim_seq(through_seq, self._clock.monotonic_ns())
        items = list(pieces.items())
        count = max(1, -(-len(items) // FOLD_PART_MAX))
        self._folds.extend(
            Fold(
                through_seq=through_seq,
                newest_seq=newest_seq,
                trim_seq=trim_seq,
                part=FoldPart(index, count),
                pieces=items[index * FOLD_PART_MAX : (index + 1) * FOLD_PART_MAX],
            )
            for index in range(count)
        )
        self._has_more()

    def worked(self) -> None:
        """A step came. Where it brought nothing to commit, nothing stands still all the same."""
        if not self._queue:
            self.committed_ns = self._clock.monotonic_ns()

    async def acknowledged(self) -> None:
        """Wait until the ledger has what was put by now; more may be put meanwhile."""
        if self._queue:
            last_seq = self._queue[-1].record.seq
            while self.committed_seq < last_seq:
                await self._clock.sleep(POLL_S)

    async def flushed(self) -> None:
        """Wait until everything put so far is acknowledged."""
        await self._is_flushed.wait()

    async def run(self) -> None:
        """Commit until cancelled. Raises Fenced (somebody else leads) and StoreLost."""
        try:
            while True:
                await self._has_work.wait()
                await self._try()
        finally:
            self._outage.given_up(self._clock.monotonic_ns())

    async def _try(self) -> None:
        try:
            await self._commit_some()
            self._outage.ended(self._clock.monotonic_ns())
        except StoreLost:
            raise
        except Unavailable as error:
            now_ns = self._clock.monotonic_ns()
            self._outage.failed(now_ns, reason=str(error), backlog=self.backlog)
            await self._clock.sleep(RETRY_S)

    async def _commit_some(self) -> None:
        """A round trip for what is committed, and one for a part of a fold. What is sent leaves the
        queue only when it is acknowledged.
        """
        if self._queue:
            await self._commit_batch()
        if self._folds and self._folds[0].newest_seq <= self.committed_seq:
            await self._fold_part(self._folds[0])
        if not self._queue and not self._folds:
            self._has_work.clear()
            self._is_flushed.set()

    async def _commit_batch(self) -> None:
        batch, began_ns = list(islice(self._queue, BATCH_MAX)), self._clock.monotonic_ns()
        await self._ledger.commit_many(self._leader, batch)
        self.committed_seq = batch[-1].record.seq
        self.committed_ns = self._clock.monotonic_ns()
        self.round_trip_ns = self.committed_ns - began_ns
        for commit in batch:
            self._queue.popleft()
            self.steps_ahead -= commit.record.HasField("step")
        self._on_progress(batch)
        if self._archive is not None:
            for commit in batch:
                self._archive.record(commit.record, commit.data)

    async def _fold_part(self, fold: Fold) -> None:
        await self._ledger.fold(
            self._leader,
            fold.through_seq,
            {
                sequence_id: FoldedTokens(token_ids=piece.token_ids, logprobs=piece.logprobs)
                for sequence_id, piece in fold.pieces
            },
            trim_seq=fold.trim_seq,
            part=fold.part,
        )
        self._folds.popleft()
        if fold.part.number + 1 == fold.part.of:
            self.folded_seq = fold.through_seq

    def _has_more(self) -> None:
        self._has_work.set()
        self._is_flushed.clear()
