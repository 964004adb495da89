"""The KV manager of one worker: who holds which blocks, and which prefixes they still remember.

The only place that knows blocks. A sequence has a `BlockTable`; the `KVManager` of the worker where
it runs fills and empties it:

    lookup    blocks of earlier sequences that begin with the same tokens
    allocate  blocks for every token known now, beginning with those found
    fork      the partly filled block that a further choice copies instead of computing it
    extend    blocks for tokens to come
    commit    full blocks whose content is certain are cached: they can be looked up from now on
    release   everything back

A block is held (ref count >= 1) or free. A cached block keeps its hash after it is freed, so that a
later sequence with the same prefix can claim it; the least recently freed is forgotten first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from scheduler_svc.core.types import BlockId, WorkerSpec

# What prefix hashes are made for: the worker's fingerprint and block size.
Layout = tuple[str, int]
# A full block's hash, and its tokens packed: a hit compares them, so that a collision cannot leak
# content.
BlockKey = tuple[bytes, bytes]


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` KV places (ceiling division)."""
    return -(-tokens // block_size)


def root_hash(fingerprint: str, tenant: str) -> bytes:
    """Where a chain of prefix hashes starts: nothing is shared across models or tenants."""
    return hashlib.sha256(f"{fingerprint}\0{tenant}".encode()).digest()


def chain_hash(parent: bytes, content: bytes) -> bytes:
    """SHA-256 over the parent's hash and one block's tokens (vLLM's automatic prefix caching)."""
    return hashlib.sha256(parent + content).digest()


def block_keys(root: bytes, tokens: Items[int], block_size: int) -> list[BlockKey]:
    """Of every full block of tokens; `root` is the hash of what comes before them."""
    keys: list[BlockKey] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = array("I", tokens[start : start + block_size]).tobytes()
        root = chain_hash(root, content)
        keys.append((root, content))
    return keys


@dataclass(eq=False, slots=True, kw_only=True)
class BlockTable:
    """The blocks of one sequence on the worker where it runs; empty while it runs nowhere."""

    # The sequence's own list, which grows.
    tokens: list[int]
    tenant: str
    # KV places of the longest it can become: the last token's KV is never needed.
    places_max: int
    blocks: list[BlockId] = field(default_factory=list)
    # KV places that the blocks have.
    capacity: int = 0
    # So many blocks from the front are cached, and so many computed tokens make one more.
    num_cached_blocks: int = 0
    commit_at: int = 0
    # It counts in `worst_case_need`.
    may_grow: bool = False
    # Of full blocks from the front, as far as computed; they outlive the residency on a worker.
    keys: list[BlockKey] = field(default_factory=list)
    layout: Layout | None = None


class BlockPool:
    """Ref-counted blocks with a prefix cache over the free ones.

    Invariant: every block is either in the free queue or has a ref count, never both; `check()`
    proves it.
    """

    def __init__(self, *, block_count: int, block_size: int) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self._refs = [0] * block_count
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(block_count))
        self._block_of: dict[bytes, BlockId] = {}
        self._key_of: dict[BlockId, BlockKey] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.free_count}/{self.block_count} free, {len(self._key_of)} cached>"

    @property
    def free_count(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    def take(self, count: int) -> list[BlockId]:
        """Hold `count` blocks of unspecified content. The caller has seen that so many are free."""
        assert count <= len(self._free), f"{count} blocks taken, {len(self._free)} free"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Blocks that hold the longest cached run of `keys`; nothing is held yet."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of.get(key[0])
            if block is None or self._key_of[block] != key:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` are free: holding them costs that many free blocks."""
        return sum(self._refs[block] == 0 for block in blocks)

    def freed_by(self, tables: Iterable[Items[BlockId]]) -> set[BlockId]:
        """Blocks that would become free if nobody held them for these tables any more."""
        held: dict[BlockId, int] = {}
        for blocks in tables:
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        return {block for block, count in held.items() if self._refs[block] == count}

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one holder to each."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def free(self, blocks: Items[BlockId]) -> None:
        """Drop one holder of each.

        The tail goes first: a prefix is worth more than what follows it.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} given back but not held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: BlockId, key: BlockKey) -> None:
        """A held block is full and committed: it can be found by its key from now on."""
        assert self._refs[block] > 0, f"block {block} cached but not held"
        if key[0] not in self._block_of and block not in self._key_of:
            self._block_of[key[0]] = block
            self._key_of[block] = key

    def _forget(self, block: BlockId) -> None:
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key[0]]

    def check(self, tables: Iterable[Items[BlockId]]) -> None:
        """Raise AssertionError when the books do not balance with the tables that hold blocks."""
        held = [0] * self.block_count
        for blocks in tables:
            for block in blocks:
                held[block] += 1
        assert held == self._refs
        assert all((self._refs[b] == 0) == (b in self._free) for b in range(self.block_count))
        assert {key[0]: block for block, key in self._key_of.items()} == self._block_of


class KVManager:
    """Block tables over one pool."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.block_size = spec.block_size
        self.block_count = spec.block_count
        # Blocks that the tables may still come to need, each at its longest.
        self.worst_case_need = 0
        self._layout = (spec.fingerprint, spec.block_size)
        self._pool = BlockPool(block_count=spec.block_count, block_size=spec.block_size)

    def __repr__(self) -> str:
        return repr(self._pool)

    # Questions

    @property
    def free_count(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self._pool.free_count

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` KV places."""
        return blocks_for(tokens, self.block_size)

    def lookup(self, table: BlockTable, num_tokens: int) -> list[BlockId]:
        """The longest run of cached full blocks with the first `num_tokens` tokens at most."""
        count = num_tokens // self.block_size
        self._compute_keys(table, count)
        return self._pool.find(table.keys[:count])

    def saved_by(self, hits: list[BlockId], freed: set[BlockId]) -> int:
        """Free blocks that a table spares by starting from `hits`: those that somebody else holds.

        `freed`: blocks that are about to be free.
        """
        return len(hits) - self._pool.free_among(hits) - sum(block in freed for block in hits)

    def shortfall(self, table: BlockTable, places: int) -> int:
        """Blocks that the table lacks for `places` KV places, or for its longest."""
        return max(0, self.blocks_for(min(places, table.places_max)) - len(table.blocks))

    def freed_by(self, tables: Iterable[BlockTable]) -> set[BlockId]:
        """Blocks that would be free if these tables were released."""
        return self._pool.freed_by(table.blocks for table in tables)

    # Commands

    def allocate(self, table: BlockTable, hits: list[BlockId]) -> None:
        """Fill an empty table with blocks for all its tokens, the first of them cached `hits`."""
        assert not table.blocks
        self._pool.hold(hits)
        fresh = self._pool.take(self.blocks_for(len(table.tokens)) - len(hits))
        table.blocks = hits + fresh
        table.capacity = len(table.blocks) * self.block_size
        self._set_cached(table, len(hits))
        table.may_grow = True
        self.worst_case_need += self._worst_case_need(table)

    def fork(
        self, parent: BlockTable, child: BlockTable, num_tokens: int
    ) -> tuple[BlockId, BlockId] | None:
        """Source and target of the block copy that brings `num_tokens` tokens of the parent's KV.

        None when there is nothing to copy, or when the child does not start from all the full
        blocks before it.
        """
        full, rest = divmod(num_tokens, self.block_size)
        if not rest or child.num_cached_blocks != full:
            return None
        return parent.blocks[full], child.blocks[full]

    def extend(self, table: BlockTable, count: int) -> list[BlockId]:
        """So many more blocks. The caller has seen that they are free."""
        blocks = self._pool.take(count)
        table.blocks += blocks
        table.capacity = len(table.blocks) * self.block_size
        self.worst_case_need -= len(blocks)
        return blocks

    def commit(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Cache the blocks that are full of computed, committed tokens."""
        full = min(num_computed_tokens // self.block_size, len(table.blocks))
        if full <= table.num_cached_blocks:
            return
        self._compute_keys(table, full)
        for index in range(table.num_cached_blocks, full):
            self._pool.cache(table.blocks[index], table.keys[index])
        self._set_cached(table, full)

    def close(self, table: BlockTable) -> None:
        """The table will not be extended any more; what it holds it keeps."""
        if table.may_grow:
            self.worst_case_need -= self._worst_case_need(table)
            table.may_grow = False

    def release(self, table: BlockTable) -> None:
        """Give everything back; of an empty table, nothing."""
        self.close(table)
        self._pool.free(table.blocks)
        table.blocks, table.capacity = [], 0

    def check(self, tables: Items[BlockTable]) -> None:
        """Raise AssertionError unless exactly these tables hold blocks here."""
        self._pool.check(table.blocks for table in tables)
        open_tables = [table for table in tables if table.may_grow]
        assert self.worst_case_need == sum(map(self._worst_case_need, open_tables))
        for table in tables:
            assert table.capacity == len(table.blocks) * self.block_size

    # Inside

    def _worst_case_need(self, table: BlockTable) -> int:
        return self.blocks_for(table.places_max) - len(table.blocks)

    def _set_cached(self, table: BlockTable, count: int) -> None:
        table.num_cached_blocks = count
        table.commit_at = (count + 1) * self.block_size

    def _compute_keys(self, table: BlockTable, count: int) -> None:
        """Of the first `count` blocks of tokens at least, all full; once per layout."""
        if table.layout != self._layout:
            table.layout, table.keys = self._layout, []
        if (known := len(table.keys)) < count:
            fingerprint, size = self._layout
            root = table.keys[-1][0] if known else root_hash(fingerprint, table.tenant)
            table.keys += block_keys(root, table.tokens[known * size : count * size], size)
