"""A leader's core as `Watch` tells it: what was told put together, response by response."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kaiten.v1.ledger_pb2 import ConfiguredInput
from kaiten.v1.watch_pb2 import (
    PassedOver,
    SequenceCounts,
    SequenceIdentity,
    SequencePlace,
    WatchedRows,
    WatchedSequence,
    WatchedTable,
    WatchedWorker,
    WatchResponse,
)

# In place of a block that was given back.
NO_BLOCK = -1


@dataclass(slots=True)
class LiveSequence:
    """One sequence. `tables`: by layer group, its blocks from the front."""

    identity: SequenceIdentity = field(default_factory=SequenceIdentity)
    place: SequencePlace = field(default_factory=SequencePlace)
    counts: SequenceCounts = field(default_factory=SequenceCounts)
    tables: list[list[int]] = field(default_factory=list)
    passed_over: list[PassedOver] = field(default_factory=list)

    def take(self, told: WatchedSequence) -> None:
        """Parts that are not told are as before."""
        if told.HasField("identity"):
            self.identity = told.identity
        if told.HasField("place"):
            self.place = told.place
        if told.HasField("counts"):
            self.counts = told.counts
        if told.HasField("tables"):
            self.take_tables(told.tables.groups)
        if told.HasField("passed_over"):
            self.passed_over = list(told.passed_over.by)

    def take_tables(self, groups: Sequence[WatchedTable]) -> None:
        """Of each layer group. Who has none has no groups."""
        before = [*self.tables, *([] for _ in groups)]
        tables = [_blocks(*each) for each in zip(before, groups, strict=False)]
        self.tables = tables if any(tables) else []


def _blocks(before: list[int], told: WatchedTable) -> list[int]:
    skipped, kept = told.num_skipped_blocks, told.num_kept_blocks
    return [NO_BLOCK] * skipped + before[skipped:kept] + list(told.block_ids)


@dataclass(slots=True)
class LiveCore:
    """All of it, as of the newest response."""

    epoch: int = 0
    seq: int = 0
    committed_seq: int = 0
    unix_ns: int = 0
    configured: ConfiguredInput = field(default_factory=ConfiguredInput)
    workers: dict[str, WatchedWorker] = field(default_factory=dict)
    sequences: dict[int, LiveSequence] = field(default_factory=dict)
    # Of each worker: who is there, row by row, as it was told last.
    rows: dict[str, list[int]] = field(default_factory=dict, compare=False)
    # Who waits, in order, as far as it is told; and how many do.
    queue: list[int] = field(default_factory=list)
    waiting: int = 0

    def take(self, told: WatchResponse) -> None:
        """What is not told is as before."""
        if told.is_snapshot:
            self.workers, self.sequences, self.rows = {}, {}, {}
        self.epoch, self.seq, self.committed_seq = told.epoch, told.seq, told.committed_seq
        self.unix_ns = told.unix_ns
        if told.HasField("configured"):
            self.configured = told.configured
        if told.HasField("queue"):
            self.queue, self.waiting = list(told.queue.sequence_ids), told.queue.length
        for worker_id in told.worker_ids_gone:
            del self.workers[worker_id]
            self.rows.pop(worker_id, None)
        for sequence_id in told.sequence_ids_gone:
            del self.sequences[sequence_id]
        self.workers |= {worker.worker_id: worker for worker in told.workers}
        for sequence in told.sequences:
            self.sequences.setdefault(sequence.sequence_id, LiveSequence()).take(sequence)
        for rows in told.rows:
            self._take_rows(rows)

    def _take_rows(self, told: WatchedRows) -> None:
        if told.sequence_ids:
            self.rows[told.worker_id] = list(told.sequence_ids)
        ids = self.rows.get(told.worker_id, [])
        columns = told.num_tokens, told.num_scheduled_tokens, told.num_computed_tokens
        if told.num_tokens:
            for sequence_id, tokens, scheduled, computed in zip(ids, *columns, strict=True):
                self.sequences[sequence_id].counts = SequenceCounts(
                    num_tokens=tokens, num_scheduled_tokens=scheduled, num_computed_tokens=computed
                )
        groups = len(told.num_new_blocks) // max(1, len(told.table_rows))
        tables = _tables(told)
        for row in told.table_rows:
            self.sequences[ids[row]].take_tables([*islice(tables, groups)])


def _tables(told: WatchedRows) -> Iterator[WatchedTable]:
    start = 0
    columns = told.num_skipped_blocks, told.num_kept_blocks, told.num_new_blocks
    for num_skipped_blocks, num_kept_blocks, num_new_blocks in zip(*columns, strict=True):
        end = start + num_new_blocks
        yield WatchedTable(
            num_skipped_blocks=num_skipped_blocks,
            num_kept_blocks=num_kept_blocks,
            block_ids=told.block_ids[start:end],
        )
        start = end
