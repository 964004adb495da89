"""The KV manager of one worker: the block tables of its sequences.

The only place that knows blocks. A sequence has a `BlockTable`; the `KVManager` of the worker where
it runs fills and empties it:

    lookup    blocks of earlier sequences that begin with the same tokens
    allocate  blocks for the tokens known now, beginning with those found
    fork      the partly filled blocks that a further choice copies instead of computing them
    extend    blocks for tokens to come
    commit    full blocks whose content is certain are cached: they can be looked up from now on,
              and of two that are equal one is given back
    trim      what no token to come attends to
    release   everything back
    forget    none of its tokens can be looked up any more

Layers of one attention kind are a group, and a table has blocks for each group, all of one pool. In
a group of full attention they stay to the end. A sliding window passes over its blocks: those
behind it are given back, and none are taken before the next step may need them.

    [ given back ..)[ window ......)[ one step's tokens ..)[ steps that may happen ..)
                                    ^ num_scheduled_tokens
"""

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Items
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from scheduler_svc.core.blocks import (
    BlockCounts,
    BlockKey,
    BlockPool,
    LayerGroup,
    block_keys,
    blocks_for,
    root_hash,
)
from scheduler_svc.core.types import BlockId, WorkerSpec

# What prefix hashes are made for: the worker's fingerprint and block size.
Layout = tuple[str, int]
# In place of a block that was given back.
NO_BLOCK: BlockId = -1
# More tokens or blocks than anything has.
_ENDLESS = 1 << 40


@dataclass(eq=False, slots=True, kw_only=True)
class BlockTable:
    """The blocks of one sequence on the worker where it runs; empty while it runs nowhere."""

    # The sequence's own list, which grows.
    tokens: list[int]
    tenant: str
    # KV places of the longest it can become: the last token's KV is never needed.
    places_max: int
    # By layer group: all blocks from the front, and how many of those were given back.
    blocks: list[list[BlockId]] = field(default_factory=list)
    num_skipped_blocks: list[int] = field(default_factory=list)
    # How often these two have changed: whoever has seen them at this version knows them.
    version: int = 0
    # KV places that the blocks have, or had, in every group.
    capacity: int = 0
    # So many blocks from the front are cached, or were.
    num_cached_blocks: int = 0
    # So many computed tokens make one more, or one that a window has passed.
    commit_at: int = 0
    # It counts in `worst_case_need`.
    may_grow: bool = False
    # By what they are made for: of full blocks from the front, as far as computed; they outlive the
    # residency on a worker.
    keys: dict[Layout, list[BlockKey]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[tuple[int, tuple[BlockId, ...]], ...]:
        """By layer group: how many blocks were given back, and those that it holds."""
        counts = zip(self.num_skipped_blocks, self.blocks, strict=True)
        return tuple((count, tuple(blocks[count:])) for count, blocks in counts)


@dataclass(frozen=True, eq=False, slots=True)
class Hits:
    """Tokens to spare, and by layer group the cached blocks that those to come attend to."""

    num_tokens: int
    blocks: list[list[BlockId]]


class KVManager:
    """Block tables over one pool."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.block_size, self.block_count = spec.block_size, spec.block_count
        # Blocks that the tables may still come to need, each at its longest.
        self.worst_case_need = 0
        ahead_max = spec.step_tokens_max * spec.slot_tokens_max
        self._groups = [
            LayerGroup(_ENDLESS, _ENDLESS, _ENDLESS, spec.block_size)
            if window is None
            # A fork begins with up to a block that it has not computed.
            else LayerGroup(
                window, max(spec.step_tokens_max, spec.block_size), ahead_max, spec.block_size
            )
            for window in spec.windows
        ]
        self._full = [i for i, window in enumerate(spec.windows) if window is None]
        self._sliding = [i for i, window in enumerate(spec.windows) if window is not None]
        self.group_count, self.has_windows = len(self._groups), bool(self._sliding)
        # Tokens of a step that tables of windows are made for, whatever the worker says later; and
        # those beyond the next step's that may be asked for.
        self.step_tokens_max = spec.step_tokens_max if self._sliding else _ENDLESS
        self.ahead_max = ahead_max if self._sliding else _ENDLESS
        # KV places of the longest sequence that it can hold; a sequence's last token needs none.
        size, context_max = spec.block_size, spec.context_tokens_max or _ENDLESS
        fits = bisect_right(range(_ENDLESS), self.block_count, key=lambda n: self.worst(n * size))
        self.places_max = min((fits - 1) * size, context_max - 1)
        self._layout = (spec.fingerprint, spec.block_size)
        self._pool = BlockPool(
            block_count=spec.block_count,
            block_size=spec.block_size,
            group_count=self.group_count,
            host_block_count=spec.host_block_count,
        )

    def __repr__(self) -> str:
        return repr(self._pool)

    # Questions

    @property
    def free_count(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self._pool.free_count

    @property
    def cached(self) -> bytes:
        """By block, whether what it holds can be looked up."""
        return bytes(self._pool.cached)

    @property
    def counts(self) -> BlockCounts:
        """Since the worker joined."""
        pool, host = self._pool, self._pool.host
        here = pool.num_taken, pool.num_evicted, pool.num_hits, pool.num_freed
        return BlockCounts(*here, host.num_out, host.num_in)

    @property
    def host_used(self) -> int:
        """Blocks in the host's memory that hold something."""
        return len(self._pool.host)

    def worst(self, places_max: int) -> int:
        """Blocks that a sequence of so many KV places holds at once."""
        return sum(group.num_blocks_max(places_max) for group in self._groups)

    def lookup(self, table: BlockTable, num_tokens: int) -> Hits:
        """The longest hit of `num_tokens` tokens at most that every group has its part of."""
        count = num_tokens // self.block_size
        keys, found = self._keys(table, count)[:count], [list[BlockId]() for _ in self._groups]
        for index in self._full:
            found[index] = self._pool.find(keys, index)
            keys = keys[: len(found[index])]
        counts = [self._counts(index, keys) for index in self._sliding]
        count = max(set.intersection(*counts)) if counts else len(keys)
        for index in self._full:
            del found[index][count:]
        for index in self._sliding:
            start = self._groups[index].num_skipped_blocks(count * self.block_size)
            found[index] = self._pool.find(keys[start:count], index)
        return Hits(count * self.block_size, found)

    def cost(
        self, table: BlockTable, hits: Hits | None, freed: AbstractSet[BlockId], ahead: int = 0
    ) -> tuple[int, int]:
        """Free blocks that a table takes to start from `hits`, and at its longest, when a window
        has passed those that it shares. `freed`: blocks that are about to be free; `ahead`: tokens
        beyond those known now.
        """
        start, found = (hits.num_tokens, hits.blocks) if hits else (0, [[]] * self.group_count)
        now, worst = 0, self.worst(table.places_max)
        for index, group in enumerate(self._groups):
            blocks, places = found[index], min(len(table.tokens), start + group.step_tokens_max)
            places = min(places + ahead, table.places_max)
            saved = len(blocks) - self._pool.free_among(blocks) - sum(b in freed for b in blocks)
            now += blocks_for(places, self.block_size) - group.num_skipped_blocks(start) - saved
            worst -= saved if index in self._full else 0
        return now, worst

    def shortfall(
        self, table: BlockTable, num_scheduled_tokens: int, num_tokens: int, ahead: int
    ) -> list[int]:
        """Blocks that the table lacks, by group, for the next step and `ahead` tokens more."""
        size, counts = self.block_size, []
        if not self.has_windows:
            count = blocks_for(min(num_tokens + ahead, table.places_max), size)
            return [max(0, count - len(table.blocks[0]))] * self.group_count
        for group, blocks in zip(self._groups, table.blocks, strict=True):
            places = min(num_tokens, num_scheduled_tokens + group.step_tokens_max) + ahead
            counts.append(max(0, blocks_for(min(places, table.places_max), size) - len(blocks)))
        return counts

    def worst_case_of(self, tables: Iterable[BlockTable]) -> int:
        """What of `worst_case_need` these tables are."""
        return sum(self._worst_case_need(table) for table in tables)

    def freed_by(self, tables: Iterable[BlockTable]) -> set[BlockId]:
        """Blocks that would be free if these tables were released."""
        return self._pool.freed_by(blocks for table in tables for _, blocks in table.parts)

    # Commands

    def allocate(self, table: BlockTable, hits: Hits, ahead: int = 0) -> None:
        """Fill an empty table with blocks for its tokens and `ahead` more, `hits` first."""
        assert not table.blocks
        for group, found in zip(self._groups, self._pool.claim(hits.blocks), strict=True):
            skipped = group.num_skipped_blocks(hits.num_tokens)
            table.blocks.append([NO_BLOCK] * skipped + found)
            table.num_skipped_blocks.append(skipped)
        table.num_cached_blocks = hits.num_tokens // self.block_size
        self._set_commit_at(table)
        table.may_grow = True
        self.worst_case_need += self._worst_case_need(table)
        self.extend(table, self.shortfall(table, hits.num_tokens, len(table.tokens), ahead))

    def fork(
        self, parent: BlockTable, child: BlockTable, num_tokens: int
    ) -> list[tuple[BlockId, BlockId]]:
        """Sources and targets of the copies that bring `num_tokens` tokens of the parent's KV.

        None unless the child starts from all full blocks before, and no window has passed them.
        """
        full, rest = divmod(num_tokens, self.block_size)
        if not rest or child.num_cached_blocks != full or max(parent.num_skipped_blocks) > full:
            return []
        pairs = zip(parent.blocks, child.blocks, strict=True)
        return [(source[full], target[full]) for source, target in pairs]

    def take_swaps(self) -> tuple[tuple[BlockId, BlockId], ...]:
        """Sources and targets of the copies between the pool and the host's memory that the next
        plan has to begin with, in order.
        """
        swaps, self._pool.host.swaps = tuple(self._pool.host.swaps), []
        return swaps

    def extend(self, table: BlockTable, counts: list[int]) -> list[list[BlockId]]:
        """So many more blocks by group. The caller has seen that they are free."""
        taken = [self._pool.take(count) for count in counts]
        for blocks, more in zip(table.blocks, taken, strict=True):
            blocks += more
        self.worst_case_need -= sum([counts[group] for group in self._full])
        capacity = min(map(len, table.blocks)) * self.block_size
        table.capacity, table.version = capacity, table.version + 1
        return taken

    def commit(self, table: BlockTable, num_computed_tokens: int) -> list[tuple[int, int]]:
        """Cache the blocks that are full of computed, committed tokens, and trim the table.

        Groups and indices of those that have given way to cached ones of equal content.
        """
        replaced: list[tuple[int, int]] = []
        full = min(num_computed_tokens, table.capacity) // self.block_size
        if full > table.num_cached_blocks:
            keys = self._keys(table, full)
            for group, blocks in enumerate(table.blocks):
                start = max(table.num_cached_blocks, table.num_skipped_blocks[group])
                for index in range(start, full):
                    own = blocks[index]
                    cached = blocks[index] = self._pool.cache(own, keys[index], group)
                    if cached != own:
                        self._pool.hold([cached])
                        self._pool.free([own])
                        replaced.append((group, index))
            table.num_cached_blocks, table.version = full, table.version + bool(replaced)
        if self.has_windows:
            self.trim(table, num_computed_tokens)
        self._set_commit_at(table)
        return replaced

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Give back blocks to which no token after the first `num_tokens` attends."""
        for group in self._sliding if table.blocks else ():
            blocks, start = table.blocks[group], table.num_skipped_blocks[group]
            end = min(self._groups[group].num_skipped_blocks(num_tokens), len(blocks))
            if end > start:
                self._pool.free(blocks[start:end])
                blocks[start:end] = [NO_BLOCK] * (end - start)
                table.num_skipped_blocks[group], table.version = end, table.version + 1

    def close(self, table: BlockTable) -> None:
        """The table will not be extended any more; what it holds it keeps."""
        if table.may_grow:
            self.worst_case_need -= self._worst_case_need(table)
            table.may_grow = False

    def release(self, table: BlockTable) -> None:
        """Give everything back; of an empty table, nothing."""
        self.close(table)
        for _, blocks in table.parts:
            self._pool.free(blocks)
        table.blocks, table.num_skipped_blocks = [], []
        table.capacity, table.version = 0, table.version + 1

    def forget(self, table: BlockTable) -> None:
        """What is cached of the table's tokens, be it another's, is found no more."""
        for group in range(self.group_count):
            for key in self._keys(table, 0):
                self._pool.forget(key, group)

    def check(self, tables: Items[BlockTable]) -> None:
        """Raise AssertionError unless exactly these tables hold blocks here."""
        self._pool.check(blocks for table in tables for _, blocks in table.parts)
        assert self.worst_case_need == self.worst_case_of(t for t in tables if t.may_grow)
        for table in tables:
            assert table.capacity == min(map(len, table.blocks), default=0) * self.block_size

    # Inside

    def _counts(self, index: int, keys: list[BlockKey]) -> set[int]:
        """Possible lengths of a hit, in blocks, as far as the group is concerned."""
        group, counts, run = self._groups[index], {0}, 0
        for count, key in enumerate(keys, start=1):
            run = 0 if self._pool.get(key, index) is None else run + 1
            if run >= count - group.num_skipped_blocks(count * self.block_size):
                counts.add(count)
        return counts

    def _worst_case_need(self, table: BlockTable) -> int:
        """Of a sliding group all: what it gives back is not free while somebody else holds it."""
        return self.worst(table.places_max) - sum(len(table.blocks[i]) for i in self._full)

    def _set_commit_at(self, table: BlockTable) -> None:
        size = self.block_size
        table.commit_at = (table.num_cached_blocks + 1) * size
        for group in self._sliding if table.blocks else ():
            passed_at = (table.num_skipped_blocks[group] + 1) * size + self._groups[group].window
            table.commit_at = min(table.commit_at, passed_at - 1)

    def _keys(self, table: BlockTable, count: int) -> list[BlockKey]:
        """Of the first `count` blocks of tokens at least, all full; each is computed once."""
        fingerprint, size = self._layout
        keys = table.keys.setdefault(self._layout, [])
        if (known := len(keys)) < count:
            root = keys[-1][0] if known else root_hash(fingerprint, table.tenant)
            keys += block_keys(root, table.tokens[known * size : count * size], size)
        return keys
