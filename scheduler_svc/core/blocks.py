"""The KV blocks of one worker: who holds which, and which prefixes they still remember.

A block is held (ref count ≥ 1) or free. A full block whose content was committed keeps its hash
after it is freed, so that a later sequence with the same prefix can claim it; the least recently
freed is forgotten first. Invariant: every block is either in the free queue or has a ref count,
never both; `check()` proves it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items

from scheduler_svc.core.types import BlockId


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` KV places (ceiling division)."""
    return -(-tokens // block_size)


def root_hash(fingerprint: str, tenant: str) -> bytes:
    """Where a chain of prefix hashes starts: nothing is shared across models or tenants."""
    return hashlib.sha256(f"{fingerprint}\0{tenant}".encode()).digest()


def chain_hash(parent: bytes, tokens: Items[int]) -> bytes:
    """SHA-256 over the parent's hash and one block's tokens (vLLM's automatic prefix caching)."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class BlockPool:
    """Ref-counted blocks with a prefix cache over the free ones."""

    def __init__(self, *, block_count: int, block_size: int) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self._refs = [0] * block_count
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(range(block_count))
        self._block_of: dict[bytes, BlockId] = {}
        # Hash, and the tokens it stands for: a hit compares them, so a collision cannot leak
        # content.
        self._content: dict[BlockId, tuple[bytes, tuple[int, ...]]] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.free_count}/{self.block_count} free, {len(self._content)} cached>"

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

    def find(self, hashes: Items[bytes], tokens: Items[int]) -> list[BlockId]:
        """Blocks that hold the longest cached prefix of `tokens`; nothing is held yet."""
        found: list[BlockId] = []
        size = self.block_size
        for index, digest in enumerate(hashes):
            block = self._block_of.get(digest)
            wanted = tuple(tokens[index * size : (index + 1) * size])
            if block is None or self._content[block][1] != wanted:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Items[BlockId]) -> int:
        """How many of `blocks` are free: holding them costs that many free blocks."""
        return sum(self._refs[block] == 0 for block in blocks)

    def hold(self, blocks: Items[BlockId]) -> None:
        """Add one holder to each."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def give_back(self, blocks: Items[BlockId]) -> None:
        """Drop one holder of each.

        The tail goes first: a prefix is worth more than what follows it.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} given back but not held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._content:
                    self._free.move_to_end(block, last=False)

    def remember(self, block: BlockId, digest: bytes, tokens: tuple[int, ...]) -> None:
        """A held block is full and committed: it can be found by its hash from now on."""
        assert self._refs[block] > 0
        assert len(tokens) == self.block_size
        if digest not in self._block_of and block not in self._content:
            self._block_of[digest] = block
            self._content[block] = (digest, tokens)

    def _forget(self, block: BlockId) -> None:
        if (content := self._content.pop(block, None)) is not None:
            del self._block_of[content[0]]

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        assert all((self._refs[b] == 0) == (b in self._free) for b in range(self.block_count))
        assert {d: b for b, (d, _) in self._content.items()} == self._block_of
