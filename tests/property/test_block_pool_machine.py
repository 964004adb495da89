"""The block pool against a model that is too simple to be wrong."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.blocks import BlockPool, block_keys, root_hash

BLOCK_COUNT = 7
BLOCK_SIZE = 2
ROOT = root_hash("model", "")

prefixes = st.lists(st.integers(1, 2), min_size=2, max_size=6).map(
    lambda tokens: tuple(tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE])
)


class BlockPoolMachine(RuleBasedStateMachine):
    """Any interleaving keeps every block owned exactly as often as it is held, and every hit true.

    The model: `content` is what a block was last filled with, written only by its holder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE)
        self.holders: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @precondition(lambda self: self.pool.free_count > 0)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.free_count))
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & {block for blocks in self.holders for block in blocks}
        for block in taken:
            self.content.pop(block, None)
        self.holders.append(taken)

    @rule(prefix=prefixes)
    def start_from_a_prefix(self, prefix: tuple[int, ...]) -> None:
        """As a sequence does: claim the cached part, take the rest, fill it, remember it."""
        keys = block_keys(ROOT, prefix, BLOCK_SIZE)
        hits = self.pool.find(keys)
        for index, block in enumerate(hits):
            assert self.content[block] == prefix[: (index + 1) * BLOCK_SIZE], "a hit is true"
        free_before, cost = self.pool.free_count, self.pool.free_among(hits)
        if free_before - cost < len(keys) - len(hits):
            return
        self.pool.hold(hits)
        assert self.pool.free_count == free_before - cost
        fresh = self.pool.take(len(keys) - len(hits))
        assert not set(fresh) & set(hits)
        for index, block in enumerate(fresh, start=len(hits)):
            start = index * BLOCK_SIZE
            self.content[block] = prefix[: start + BLOCK_SIZE]
            self.pool.cache(block, keys[index])
        assert self.pool.find(keys) == hits + fresh, "what was just filled is found"
        self.holders.append(hits + fresh)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.hold(blocks)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        self.pool.check(self.holders)
        held = {block for blocks in self.holders for block in blocks}
        assert self.pool.free_count == BLOCK_COUNT - len(held)
        assert self.pool.free_among(range(BLOCK_COUNT)) == self.pool.free_count


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40)
