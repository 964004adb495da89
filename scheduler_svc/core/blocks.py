"""Blocks of KV places: who holds which, and which contents they still remember.

A block is held (ref count >= 1) or free. A cached block keeps its key after it is freed, so that a
later sequence with the same prefix can claim it; the least recently freed is forgotten first. Where
the worker has blocks in host memory too, what is forgotten is kept there, and comes back when it is
claimed (the second tier of SGLang's HiCache and of vLLM's KV offloading).
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from operator import sub
from typing import NamedTuple

from scheduler_svc.core.types import BlockId

# A full block's hash, and its tokens packed: a hit compares them, so that a collision cannot leak
# content.
BlockKey = tuple[bytes, bytes]
# Layer group and key: what is cached.
Content = tuple[int, BlockKey]


class BlockCounts(NamedTuple):
    """Of a pool, since its worker joined or since another look at it: blocks taken anew; cached
    ones that were forgotten, for that or as they spoilt a row; those found in the cache; those
    given back; and those copied to the host's memory and back.
    """

    allocated: int = 0
    evicted: int = 0
    shared: int = 0
    freed: int = 0
    swapped_out: int = 0
    swapped_in: int = 0

    def since(self, before: "BlockCounts") -> "BlockCounts":
        return BlockCounts(*map(sub, self, before))


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
    packed = array("I", tokens)
    content, size = packed.tobytes(), block_size * packed.itemsize
    for start in range(0, len(content) - size + 1, size):
        block = content[start : start + size]
        root = chain_hash(root, block)
        keys.append((root, block))
    return keys


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What a sequence needs in one layer group. Full attention is a window without an end."""

    # A token attends to so many newest tokens, itself included.
    window: int
    # So many tokens a step may compute of a sequence, and so many `ahead` of that may be asked for.
    step_tokens_max: int
    ahead_max: int
    block_size: int

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Blocks at the front to which no token after the first `num_tokens` attends."""
        return max(0, num_tokens - self.window + 1) // self.block_size

    def num_blocks_max(self, places_max: int) -> int:
        """Blocks that so many KV places need at once, wherever in a block the window begins."""
        places = self.block_size - 1 + self.window - 1 + self.step_tokens_max + self.ahead_max
        return blocks_for(min(places_max, places), self.block_size)


class HostBlocks:
    """What the pool has forgotten, in memory of the host: what was wanted longest ago goes first.

    `swaps`: sources and targets of the copies that keep it and bring it back, in order.
    """

    def __init__(self, first: BlockId, count: int) -> None:
        self.count = count
        self.swaps: list[tuple[BlockId, BlockId]] = []
        # For readers, since the beginning: contents that were kept, and that were brought back.
        self.num_out = self.num_in = 0
        self._free = list(range(first + count - 1, first - 1, -1))
        self._held = set[BlockId]()
        self._block_of: dict[tuple[int, bytes], BlockId] = {}
        self._content_of: OrderedDict[BlockId, Content] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that hold something."""
        return len(self._content_of)

    def get(self, group: int, key: BlockKey) -> BlockId | None:
        """The block that holds a content."""
        block = self._block_of.get((group, key[0]))
        return None if block is None or self._content_of[block] != (group, key) else block

    def keep(self, source: BlockId, content: Content) -> None:
        """A block of the pool is about to hold something else; for want of room it is forgotten."""
        group, (hash_, _) = content
        if (known := self._block_of.get((group, hash_))) is not None:
            self._content_of.move_to_end(known)
            return
        if not self._free:
            oldest = next(iter(self._content_of), None)
            if oldest is None or oldest in self._held:
                return
            self.drop(oldest)
        block = self._free.pop()
        self._block_of[group, hash_], self._content_of[block] = block, content
        self.swaps.append((source, block))
        self.num_out += 1

    def drop(self, block: BlockId) -> None:
        """It is free for something else."""
        group, (hash_, _) = self._content_of.pop(block)
        del self._block_of[group, hash_]
        self._free.append(block)

    def hold(self, blocks: Items[BlockId]) -> None:
        """They are about to be loaded: nothing takes their place before."""
        for block in blocks:
            self._content_of.move_to_end(block)
        self._held.update(blocks)

    def load(self, block: BlockId, target: BlockId) -> Content:
        """Into a block of the pool; it stays here too."""
        self._held.remove(block)
        self.swaps.append((block, target))
        self.num_in += 1
        return self._content_of[block]

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        assert not self._held
        assert {block: key for key, block in self._block_of.items()} == {
            block: (group, key[0]) for block, (group, key) in self._content_of.items()
        }
        assert not self._content_of.keys() & set(self._free)
        assert len(self._free) + len(self) == self.count


class BlockPool:
    """Ref-counted blocks with a prefix cache over the free ones, by layer group.

    Invariant: every block is either in the free queue or has a ref count, never both; `check()`
    proves it.
    """

    def __init__(
        self, *, block_count: int, block_size: int, group_count: int = 1, host_block_count: int = 0
    ) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self.host = HostBlocks(block_count, host_block_count)
        # Of the host's none is ever held: to start from it takes a free block.
        self._refs = [0] * (block_count + host_block_count)
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(block_count))
        # By layer group and hash.
        self._block_of: list[dict[bytes, BlockId]] = [{} for _ in range(group_count)]
        self._key_of: dict[BlockId, Content] = {}
        # A byte per block, for readers: whether it is in `_key_of`.
        self.cached = bytearray(block_count)
        # For readers, since the beginning: taken anew, with content that was forgotten for it; held
        # for what they remember; given back by whoever had them last.
        self.num_taken = self.num_evicted = self.num_hits = self.num_freed = 0

    def __repr__(self) -> str:
        return f"<BlockPool {self.free_count}/{self.block_count} free, {len(self._key_of)} cached>"

    @property
    def free_count(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    def take(self, count: int) -> list[BlockId]:
        """Hold `count` blocks of unspecified content. The caller has seen that so many are free."""
        assert count <= len(self._free), f"{count} blocks taken, {len(self._free)} free"
        self.num_taken += count
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            if (content := self._uncache(block)) is not None:
                self.host.keep(block, content)
            self._refs[block] = 1
        return taken

    def get(self, key: BlockKey, group: int = 0) -> BlockId | None:
        """The block that is cached under a key, or the host's; nothing is held yet."""
        block = self._block_of[group].get(key[0])
        is_ours = block is not None and self._key_of[block][1] == key
        return block if is_ours else self.host.get(group, key)

    def find(self, keys: Iterable[BlockKey], group: int = 0) -> list[BlockId]:
        """Blocks that hold the longest cached run of `keys`."""
        found: list[BlockId] = []
        for key in keys:
            if (block := self.get(key, group)) is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` are free: holding them costs that many free blocks."""
        return sum(self._refs[block] == 0 for block in blocks)

    def freed_by(self, tables: Iterable[Items[BlockId]]) -> set[BlockId]:
        """Blocks that would become free if nobody held them for these tables any more."""
        held = Counter(chain.from_iterable(tables))
        return {block for block, count in held.items() if self._refs[block] == count}

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one holder to each."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def claim(self, tables: Items[list[BlockId]]) -> list[list[BlockId]]:
        """Hold what was found. What the host has is brought back into blocks that are taken."""
        ours = range(self.block_count)
        wanted = [block for blocks in tables for block in blocks if block not in ours]
        self.host.hold(wanted)
        for blocks in tables:
            self.hold(block for block in blocks if block in ours)
        loaded = dict(zip(wanted, self.take(len(wanted)), strict=True))
        for block, own in loaded.items():
            group, key = self.host.load(block, own)
            self.cache(own, key, group)
        self.num_hits += sum(map(len, tables))
        return [[loaded.get(block, block) for block in blocks] for blocks in tables]

    def free(self, blocks: Items[BlockId]) -> None:
        """Drop one holder of each.

        The tail goes first: a prefix is worth more than what follows it.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} given back but not held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.num_freed += 1
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: BlockId, key: BlockKey, group: int = 0) -> BlockId:
        """A held block is full and committed. The block that is found by its key from now on."""
        assert self._refs[block] > 0, f"block {block} cached but not held"
        cached = self._block_of[group].setdefault(key[0], block)
        if cached == block:
            self._key_of[block] = group, key
            self.cached[block] = 1
            return block
        return cached if self._key_of[cached][1] == key else block

    def forget(self, key: BlockKey, group: int = 0) -> None:
        """It is found no more, here or in the host's memory. Who holds it goes on."""
        while (block := self.get(key, group)) is not None:
            if block < self.block_count:
                self._uncache(block)
            else:
                self.host.drop(block)

    def _uncache(self, block: BlockId) -> Content | None:
        if (content := self._key_of.pop(block, None)) is not None:
            self.num_evicted += 1
            group, key = content
            self.cached[block] = 0
            del self._block_of[group][key[0]]
        return content

    def check(self, tables: Iterable[Items[BlockId]]) -> None:
        """Raise AssertionError when the books do not balance with the tables that hold blocks."""
        self.host.check()
        held = [0] * len(self._refs)
        for block in (holders := [*chain.from_iterable(tables)]):
            held[block] += 1
        assert held == self._refs
        assert len(self._free) == held[: self.block_count].count(0)
        assert self._free.keys().isdisjoint(holders)
        # As many as there are, and of each its own: no other.
        assert sum(map(len, self._block_of)) == len(self._key_of) == self.cached.count(1)
        found = [self._block_of[group].get(key[0]) for group, key in self._key_of.values()]
        assert found == list(self._key_of)
        assert all(map(self.cached.__getitem__, self._key_of))
