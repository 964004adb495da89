"""Blocks of KV places: who holds which, and which contents they still remember.

A block is held (ref count >= 1) or free. A cached block keeps its key after it is freed, so that a
later sequence with the same prefix can claim it; the least recently freed is forgotten first.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import chain, compress

from scheduler_svc.core.types import BlockId

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
    packed = array("I", tokens)
    content, size = packed.tobytes(), block_size * packed.itemsize
    for start in range(0, len(content) - size + 1, size):
        block = content[start : start + size]
        root = chain_hash(root, block)
        keys.append((root, block))
    return keys


class BlockPool:
    """Ref-counted blocks with a prefix cache over the free ones, by layer group.

    Invariant: every block is either in the free queue or has a ref count, never both; `check()`
    proves it.
    """

    def __init__(self, *, block_count: int, block_size: int, group_count: int = 1) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self._refs = [0] * block_count
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(block_count))
        # By layer group and hash.
        self._block_of: list[dict[bytes, BlockId]] = [{} for _ in range(group_count)]
        self._key_of: dict[BlockId, tuple[int, BlockKey]] = {}
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
            self.forget(block)
            self._refs[block] = 1
        return taken

    def get(self, key: BlockKey, group: int = 0) -> BlockId | None:
        """The block that is cached under a key; nothing is held yet."""
        block = self._block_of[group].get(key[0])
        return None if block is None or self._key_of[block][1] != key else block

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

    def forget(self, block: BlockId | None) -> None:
        """What it holds, if it is cached, is found no more. Who holds it goes on."""
        if block is not None and (known := self._key_of.pop(block, None)) is not None:
            self.num_evicted += 1
            group, key = known
            self.cached[block] = 0
            del self._block_of[group][key[0]]

    def check(self, tables: Iterable[Items[BlockId]]) -> None:
        """Raise AssertionError when the books do not balance with the tables that hold blocks."""
        held = [0] * self.block_count
        for block in chain.from_iterable(tables):
            held[block] += 1
        assert held == self._refs
        assert len(self._free) == held.count(0)
        assert not any(map(held.__getitem__, self._free))
        # As many as there are, and of each its own: no other.
        assert sum(map(len, self._block_of)) == len(self._key_of)
        found = [self._block_of[group].get(key[0]) for group, key in self._key_of.values()]
        assert found == list(self._key_of)
        assert list(compress(range(self.block_count), self.cached)) == sorted(self._key_of)
