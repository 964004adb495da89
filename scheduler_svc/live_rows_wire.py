"""Who is on a worker, as whoever watches is told of them: in columns, or one by one.

Most of a batch gets a token with every step, so most of it is told of every time. A message for
each costs ten times what its numbers do; only who does not take columns is told in that form.
"""

from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from operator import eq
from typing import Final

from kaiten.v1.watch_pb2 import WatchedRows, WatchedSequence, WatchResponse
from scheduler_svc.core.types import BlockId, SequenceId
from scheduler_svc.live_view import Rows, Seen

NEVER: Final = Seen(0, (), (), 0)


def rows_to_proto(
    message: WatchedRows, before: Rows, now: Rows, sequence_ids: Sequence[SequenceId], groups: int
) -> bool:
    """What is otherwise; whether anything is. `groups`: of layers, that the worker has."""
    is_same_batch = [*before.seen] == [*now.seen]
    if not is_same_batch:
        message.sequence_ids.extend(sequence_ids)
    is_counted = bool(now.counts) and not (is_same_batch and before.counts == now.counts)
    if is_counted:
        num_tokens, num_scheduled_tokens, num_computed_tokens = zip(*now.counts, strict=True)
        message.num_tokens.extend(num_tokens)
        message.num_scheduled_tokens.extend(num_scheduled_tokens)
        message.num_computed_tokens.extend(num_computed_tokens)
    were = map(before.seen.get, now.seen)
    changed = [
        (row, was or NEVER, seen)
        for row, was, seen in zip(count(), were, now.seen.values(), strict=False)
        if was is not seen
    ]
    _tell_tables(message, changed, groups)
    return not is_same_batch or is_counted or bool(changed)


def _tell_tables(
    message: WatchedRows, changed: Sequence[tuple[int, Seen, Seen]], groups: int
) -> None:
    """Of rows: as they were seen before, and now."""
    told: list[tuple[int, int, int]] = []
    block_ids: list[BlockId] = []
    for _, before, now in changed:
        for group in range(groups):
            # Who has given up all blocks has no groups.
            blocks = now.blocks[group] if now.blocks else ()
            skipped = now.num_skipped_blocks[group] if blocks else 0
            kept = _kept(before.blocks[group] if before.blocks else (), blocks, skipped)
            told.append((skipped, kept, len(blocks) - kept))
            block_ids += blocks[kept:]
    if told:
        num_skipped_blocks, num_kept_blocks, num_new_blocks = zip(*told, strict=True)
        message.table_rows.extend([row for row, _, _ in changed])
        message.num_skipped_blocks.extend(num_skipped_blocks)
        message.num_kept_blocks.extend(num_kept_blocks)
        message.num_new_blocks.extend(num_new_blocks)
        message.block_ids.extend(block_ids)


def _kept(before: tuple[BlockId, ...], now: tuple[BlockId, ...], num_skipped_blocks: int) -> int:
    """How many blocks from the front are as before, or given back; as a rule all of before."""
    if num_skipped_blocks:
        before, now = before[num_skipped_blocks:], now[num_skipped_blocks:]
    if before == now[: len(before)]:
        return num_skipped_blocks + len(before)
    same: int = sum(takewhile(bool, map(eq, before, now)))
    return num_skipped_blocks + same


def tell_one_by_one(
    response: WatchResponse, sequence_ids: Mapping[str, Sequence[SequenceId]]
) -> None:
    """The same to who takes no rows. `sequence_ids`: of them, by worker."""
    told = {one.sequence_id: one for one in response.sequences}
    for rows in response.rows:
        ids = sequence_ids[rows.worker_id]
        missing = [one for one in ids if one not in told]
        told |= {one: response.sequences.add(sequence_id=one) for one in missing}
        theirs = [told[one] for one in ids]
        columns = rows.num_tokens, rows.num_scheduled_tokens, rows.num_computed_tokens
        for one, counts in zip(theirs, zip(*columns, strict=True), strict=False):
            # Who has no tokens has counts, too.
            one.counts.SetInParent()
            one.counts.num_tokens, one.counts.num_scheduled_tokens, computed = counts
            one.counts.num_computed_tokens = computed
        _tables_one_by_one(rows, theirs)
    del response.rows[:]
    quiet = [one for one in response.sequences if len(one.ListFields()) < 2]
    for one in quiet:
        response.sequences.remove(one)


def _tables_one_by_one(rows: WatchedRows, theirs: Sequence[WatchedSequence]) -> None:
    told = zip(rows.num_skipped_blocks, rows.num_kept_blocks, rows.num_new_blocks, strict=True)
    groups = len(rows.num_new_blocks) // max(1, len(rows.table_rows))
    start = 0
    for row in rows.table_rows:
        theirs[row].tables.SetInParent()
        for _ in range(groups):
            num_skipped_blocks, num_kept_blocks, num_new_blocks = next(told)
            end = start + num_new_blocks
            theirs[row].tables.groups.add(
                num_skipped_blocks=num_skipped_blocks,
                num_kept_blocks=num_kept_blocks,
                block_ids=rows.block_ids[start:end],
            )
            start = end
