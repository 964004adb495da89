"""The KV manager alone against a model that is too simple to be wrong.

The model is the memory itself: what each place of each block was last filled with, written only by
the table that computes there. KAITEN_TEST_KV_HISTORIES asks for more histories than usual.
"""

import os
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.kv import BlockTable, KVManager
from scheduler_svc.core.types import WorkerSpec

BLOCK_COUNT = 7
# Prompts are beginnings of these, so that many begin alike.
PROMPTS = ([1] * 9, [1, 1, 2] * 3, [2, 1] * 5)
FEWER = st.sampled_from([0, 0, 0, 1])
HISTORIES = int(os.environ.get("KAITEN_TEST_KV_HISTORIES", "100"))


@dataclass(eq=False)
class Owner:
    """A table and what its sequence has computed."""

    table: BlockTable
    num_computed: int
    is_open: bool = True
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.table.tokens)

    def prefix(self, length: int) -> tuple[str, tuple[int, ...]]:
        """What the KV of its token number `length` stands for."""
        return (self.table.tenant, tuple(self.table.tokens[:length]))


class KVMachine(RuleBasedStateMachine):
    """Any interleaving: every hit is true, nobody writes where another reads, nothing leaks."""

    @initialize(block_size=st.sampled_from([1, 2, 3]))
    def start(self, block_size: int) -> None:
        self.size = block_size
        self.kv = KVManager(
            WorkerSpec(
                fingerprint="f",
                block_size=block_size,
                block_count=BLOCK_COUNT,
                slots_max=1,
                step_tokens_max=9,
                vocab_size=3,
            )
        )
        self.owners: list[Owner] = []
        self.memory: dict[tuple[int, int], object] = {}

    # What a worker does

    def read(self, owner: Owner) -> None:
        """As attention does: all that counts as computed."""
        for position in range(owner.num_computed):
            place = (owner.table.blocks[position // self.size], position % self.size)
            assert self.memory.get(place) == owner.prefix(position + 1), "what is read is its own"

    def compute(self, owner: Owner, end: int) -> None:
        """Write KV up to the token number `end`, having read all before it; then commit."""
        self.read(owner)
        for position in range(owner.num_computed, end):
            place = (owner.table.blocks[position // self.size], position % self.size)
            self.memory[place] = owner.prefix(position + 1)
        owner.num_computed = max(end, owner.num_computed)
        self.kv.commit(owner.table, owner.num_computed)

    def owner(self, data: st.DataObject) -> Owner:
        return data.draw(st.sampled_from(self.owners))

    def start_one(self, tokens: list[int], tenant: str, longer: int, fewer: int) -> Owner | None:
        """From what is cached, or from less of it; None when there is no room."""
        table = BlockTable(tokens=list(tokens), tenant=tenant, places_max=len(tokens) + longer)
        hits = self.kv.lookup(table, len(tokens) - 1)
        hits = hits[: max(0, len(hits) - fewer)]
        need = self.kv.blocks_for(len(tokens)) - self.kv.saved_by(hits, set())
        if need > (free := self.kv.free_count):
            return None
        self.kv.allocate(table, hits)
        assert self.kv.free_count == free - need
        owner = Owner(table, len(hits) * self.size)
        self.read(owner)
        self.owners.append(owner)
        return owner

    # Rules

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 9),
        tenant=st.sampled_from(["a", "a", "a", "b"]),
        longer=st.integers(0, 6),
        fewer=FEWER,
        count=st.integers(0, 9),
    )
    def allocate(
        self, prompt: list[int], length: int, tenant: str, longer: int, fewer: int, count: int
    ) -> None:
        """A sequence starts and computes so much of its prompt."""
        owner = self.start_one(prompt[:length], tenant, longer, fewer)
        if owner is not None:
            self.compute(owner, min(owner.num_computed + count, length))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), fewer=FEWER)
    def fork(self, data: st.DataObject, fewer: int) -> None:
        """A further choice starts from the prompt of one that has computed it."""
        parent = self.owner(data)
        if parent.num_computed < parent.prompt or not parent.table.blocks:
            return
        prompt = parent.table.tokens[: parent.prompt]
        child = self.start_one(prompt, parent.table.tenant, 3, fewer)
        if child is None:
            return
        if (copy := self.kv.fork(parent.table, child.table, parent.prompt - 1)) is None:
            return
        source, target = copy
        others = [other for other in self.owners if other is not child]
        assert not any(target in other.table.blocks for other in others), "a copy is its own"
        for offset in range(self.size):
            if (source, offset) in self.memory:
                self.memory[target, offset] = self.memory[source, offset]
        child.num_computed = parent.prompt - 1
        self.read(child)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 5))
    def advance(self, data: st.DataObject, count: int) -> None:
        """A chunk of a prompt, or a token."""
        owner = self.owner(data)
        places = owner.table.capacity
        self.compute(owner, min(owner.num_computed + count, len(owner.table.tokens), places))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), token=st.integers(1, 2))
    def sample(self, data: st.DataObject, token: int) -> None:
        """One more token, and a place for it, if there is one."""
        owner = self.owner(data)
        table = owner.table
        if not owner.is_open or len(table.tokens) >= table.places_max:
            return
        count = self.kv.shortfall(table, len(table.tokens) + 1)
        assert count in (0, 1)
        if count <= self.kv.free_count:
            held = {block for other in self.owners for block in other.table.blocks}
            assert not held & set(self.kv.extend(table, count)), "new blocks are nobody's"
            table.tokens.append(token)
            assert self.kv.shortfall(table, len(table.tokens)) == 0

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        owner = self.owner(data)
        self.kv.close(owner.table)
        owner.is_open = False

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 3))
    def release(self, data: st.DataObject, count: int) -> None:
        """What would be free is what is free afterwards."""
        gone = data.draw(st.lists(st.sampled_from(self.owners), max_size=count, unique_by=id))
        free = self.kv.free_count
        freed = self.kv.freed_by([owner.table for owner in gone])
        for owner in gone:
            self.kv.release(owner.table)
            self.owners.remove(owner)
        assert self.kv.free_count == free + len(freed)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check([owner.table for owner in self.owners])
        held = {block for owner in self.owners for block in owner.table.blocks}
        assert self.kv.free_count == BLOCK_COUNT - len(held)
        longest = [self.kv.blocks_for(o.table.places_max) for o in self.owners if o.is_open]
        have = [len(o.table.blocks) for o in self.owners if o.is_open]
        assert self.kv.worst_case_need == sum(longest) - sum(have)


TestKVManager = KVMachine.TestCase
TestKVManager.settings = settings(max_examples=HISTORIES, stateful_step_count=40)
