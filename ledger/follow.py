"""Follow the journal: one tail per process, handed out to any number of subscriptions.

Every gateway sees every record, so the dispatch is one dictionary look-up per token. What a
subscriber has not taken yet piles up as plain token lists, merged per sequence. Anything the tail
cannot give (records before the subscription, records trimmed away while we were disconnected) is
filled in from the ledger's history, and positions decide what is new: no gap, no repeat.
"""

import asyncio
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from kaiten.v1.ledger_pb2 import JournalRecord
from ledger.shared_history import RETRY_WAIT_S_FIRST, RETRY_WAIT_S_MAX, Histories, SharedHistory
from ledger.subscription import Pending, Subscription
from ledger.tokens import tokens_of
from ledger.types import Lease, StoreLost
from service_kit.errors import Unavailable

# Records remembered for subscriptions that start a little in the past: the time between a submit
# reply and its subscription, in steps.
RECENT_RECORDS: Final = 64
BATCH_RECORDS: Final = 256
BLOCK_MS: Final = 1000


class Journal(Histories, Protocol):
    """What a follower needs of the ledger."""

    async def leader(self) -> Lease | None: ...

    async def journal_read(
        self, after_seq: int, *, block_ms: int, count: int
    ) -> list[JournalRecord]: ...


class Follower:
    """The journal's reader of one process. `run` must be running for subscriptions to move."""

    def __init__(self, ledger: Journal, *, recent_records: int = RECENT_RECORDS) -> None:
        self._journal = ledger
        self.is_connected = False
        self._passed_seq: int | None = None
        # Of the leader whose record that was.
        self._epoch = 0
        self._history = SharedHistory(ledger, lambda: self._passed_seq or 0)
        self._recent: deque[JournalRecord] = deque(maxlen=recent_records)
        # Several subscriptions may follow one sequence.
        self._pending: dict[int, tuple[Pending, ...]] = {}
        # Subscriptions that start beyond what we have passed, or before we have started.
        self._future: list[tuple[int, int, Subscription]] = []
        self._order = itertools.count()
        self._error: Exception | None = None

    @property
    def sequence_count(self) -> int:
        """Sequences followed now."""
        return len(self._pending)

    def subscribe(
        self,
        sequence_ids: Sequence[int],
        *,
        from_seq: int,
        positions: Mapping[int, int] | None = None,
    ) -> Subscription:
        """Updates from the journal records after from_seq.

        `positions` names the next position wanted per sequence id; without it a sequence starts
        with the first token after from_seq, and if these records are no longer in the journal, at
        position 0. For a request just submitted, from_seq is Submitted.journal_seq; to attach,
        from_seq=0 with positions gives everything.
        """
        subscription = Subscription(self, sequence_ids, positions or {})
        if self._error is not None:
            subscription.fail(self._error)
        elif self._passed_seq is None or from_seq > self._passed_seq:
            heapq.heappush(self._future, (from_seq, next(self._order), subscription))
        else:
            self._place(subscription, from_seq, self._passed_seq)
        return subscription

    def _place(self, subscription: Subscription, from_seq: int, passed_seq: int) -> None:
        """Register for what comes; give what has passed since, or leave it to the history."""
        for pending in subscription.pending:
            self._pending[pending.sequence_id] = (
                *self._pending.get(pending.sequence_id, ()),
                pending,
            )
        if from_seq >= passed_seq:
            return
        if self._recent and self._recent[0].seq <= from_seq + 1:
            own = {pending.sequence_id: (pending,) for pending in subscription.pending}
            for record in self._recent:
                if record.seq > from_seq:
                    _dispatch(record, own)
            return
        for pending in subscription.pending:
            pending.open_hole()
            subscription.mark(pending)

    def forget(self, subscription: Subscription) -> None:
        """Drop every reference to a subscription."""
        for pending in subscription.pending:
            self.forget_sequence(pending)
        kept = [entry for entry in self._future if entry[2] is not subscription]
        if len(kept) < len(self._future):
            heapq.heapify(kept)
            self._future = kept

    def forget_sequence(self, pending: Pending) -> None:
        rest = tuple(p for p in self._pending.get(pending.sequence_id, ()) if p is not pending)
        if rest:
            self._pending[pending.sequence_id] = rest
        else:
            self._pending.pop(pending.sequence_id, None)

    async def fill(self, holed: Sequence[Pending]) -> None:
        """Close holes from the ledger's history. Cancelled or failed, it can be called again."""
        for pending in holed:
            pending.late = []
            pending.has_hole = False
        try:
            histories = await self._history.of([pending.sequence_id for pending in holed])
        except BaseException:
            for pending in holed:
                pending.late, pending.has_hole = None, True
            raise
        for pending, history in zip(holed, histories, strict=True):
            pending.take_history(history)

    async def run(self) -> None:
        """Tail the journal until cancelled. An unreachable store only pauses; StoreLost ends it."""
        try:
            await self._tail()
        except Exception as error:
            # Whatever ends the tail must reach those who wait on it.
            self._fail(error)
            raise

    async def _tail(self) -> None:
        wait_s = RETRY_WAIT_S_FIRST
        while True:
            try:
                if not self.is_connected:
                    await self._greet()
                await self._read()
            except StoreLost:
                raise
            except Unavailable:
                self.is_connected = False
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_WAIT_S_MAX)
            else:
                wait_s = RETRY_WAIT_S_FIRST

    async def _greet(self) -> None:
        """Find the store answering, and where the journal ends. A store that has gone back, and
        whose clock is behind, gives numbers once more that we have passed.
        """
        lease = await self._journal.leader()
        epoch, seq = (0, 0) if lease is None else (lease.epoch, lease.journal_seq)
        if self._passed_seq is None:
            self.start_at(seq)
        elif seq < self._passed_seq or epoch != self._epoch:
            self._passed_seq = min(seq, self._passed_seq)
            self._recent.clear()
            # Who waits for a record beyond may wait for one that is lost: the history knows.
            self._activate(sys.maxsize)
            self._mark_holes()
        self._epoch = epoch
        self.is_connected = True

    def start_at(self, seq: int) -> None:
        """The tail begins after this record; what lies before is left to the history."""
        self._passed_seq = seq
        self._activate(seq)

    async def _read(self) -> None:
        records = await self._journal.journal_read(
            self._passed_seq or 0, block_ms=BLOCK_MS, count=BATCH_RECORDS
        )
        for record in records:
            self.take(record)

    def take(self, record: JournalRecord) -> None:
        """Hand one record to those who follow its sequences. Synchronous: all or nothing."""
        passed_seq = self._passed_seq or 0
        if record.seq <= passed_seq:
            return
        before_seq = record.after_seq if record.HasField("after_seq") else record.seq - 1
        if before_seq != passed_seq:
            # Trimmed while we were away: what is missing has been folded. Or the store went back
            # in time, and lost what we have seen.
            self._recent.clear()
            self._mark_holes()
        if self._future:
            self._activate(record.seq - 1)
        self._passed_seq, self._epoch = record.seq, record.epoch
        self._recent.append(record)
        _dispatch(record, self._pending)

    def _activate(self, passed_seq: int) -> None:
        while self._future and self._future[0][0] <= passed_seq:
            from_seq, _, subscription = heapq.heappop(self._future)
            self._place(subscription, from_seq, passed_seq)

    def _mark_holes(self) -> None:
        for followers in self._pending.values():
            for pending in followers:
                pending.open_hole()
                pending.owner.mark(pending)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.is_connected = False
        owners = dict.fromkeys(p.owner for each in self._pending.values() for p in each)
        for subscription in (*owners, *(entry[2] for entry in self._future)):
            subscription.fail(error)
        self._pending.clear()
        self._future.clear()


def _dispatch(record: JournalRecord, pending_of: Mapping[int, tuple[Pending, ...]]) -> None:
    if record.logprobs:
        for sequence_id, position, token_id, logprobs in tokens_of(record):
            for pending in pending_of.get(sequence_id, ()):
                pending.take_token(position, token_id, logprobs)
                if len(pending.token_ids) >= pending.stream_interval or pending.has_hole:
                    pending.owner.mark(pending)
    else:
        _dispatch_plain(record, pending_of)
    for ended in record.finished:
        for pending in pending_of.get(ended.sequence_id, ()):
            pending.take_end(ended)
            pending.owner.mark(pending)


def _dispatch_plain(record: JournalRecord, pending_of: Mapping[int, tuple[Pending, ...]]) -> None:
    # The hot loop of every gateway: it sees all tokens of the cell, mostly of other gateways'
    # requests.
    find = pending_of.get
    for sequence_id, position, token_id in zip(
        record.sequence_ids, record.positions, record.token_ids, strict=True
    ):
        found = find(sequence_id)
        if found is None:
            continue
        for pending in found:
            if position == pending.next and pending.late is None:
                pending.next = position + 1
                pending.token_ids.append(token_id)
            else:
                pending.take_token(position, token_id, None)
            if pending.is_ready:
                continue
            if len(pending.token_ids) >= pending.stream_interval or pending.has_hole:
                pending.owner.mark(pending)
