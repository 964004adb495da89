"""The KV manager alone against a model that is too simple to be wrong.

The model is the memory itself: what each place of each block was last filled with, and by which
layer group, written and read by the tables of a worker, which are told of changes with the next
plan only.

    KAITEN_TEST_KV_HISTORIES=10000 python -m pytest --timeout 0 tests/property/test_kv_machine.py

tries more histories than usual.
"""

import os
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.kv import NO_BLOCK, BlockTable, Hits, KVManager
from scheduler_svc.core.types import WorkerSpec

# Of each layer group.
BLOCK_COUNT = 7
# Prompts are beginnings of these, so that many begin alike.
PROMPTS = ([1] * 9, [1, 1, 2] * 3, [2, 1] * 5)
WINDOWS = ((None,), (None,), (None, 3), (2, 5), (1, None), (4, None, 2))
FEWER = st.sampled_from([0, 0, 0, 1])
HISTORIES = int(os.environ.get("KAITEN_TEST_KV_HISTORIES", "60"))


@dataclass(eq=False)
class Owner:
    """A table, what its sequence has computed, and the same table as the worker has it."""

    table: BlockTable
    # Answered, and computed: the worker is ahead of what we hear of it.
    num_computed: int
    num_scheduled: int
    is_open: bool = True
    prompt: int = field(init=False)
    mirror: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.table.tokens)
        self.mirror = [list(blocks) for blocks in self.table.blocks]

    def prefix(self, length: int) -> tuple[str, tuple[int, ...]]:
        """What the KV of its token number `length` stands for."""
        return (self.table.tenant, tuple(self.table.tokens[:length]))


class KVMachine(RuleBasedStateMachine):
    """Any interleaving: every hit is true, nobody writes where another reads, nothing leaks."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from(WINDOWS),
        step_tokens=st.sampled_from([2, 9]),
        host_block_count=st.sampled_from([0, 1, 2, 5, 40]),
    )
    def start(
        self,
        block_size: int,
        windows: tuple[int | None, ...],
        step_tokens: int,
        host_block_count: int,
    ) -> None:
        self.size, self.windows, self.step_tokens = block_size, windows, step_tokens
        self.block_count = BLOCK_COUNT * len(windows)
        self.kv = KVManager(
            WorkerSpec(
                fingerprint="f",
                block_size=block_size,
                block_count=self.block_count,
                slots_max=1,
                step_tokens_max=step_tokens,
                vocab_size=3,
                windows=windows,
                host_block_count=host_block_count,
            )
        )
        self.owners: list[Owner] = []
        self.memory: dict[tuple[int, int], object] = {}
        # What the next plan will tell.
        self.replaced: list[tuple[Owner, int, int]] = []
        # Nobody was let in but by the worst case of all.
        self.is_reserved = True

    # What a worker does

    def needed(self, window: int | None, length: int) -> range:
        """Positions to which the token after `length` others attends, itself excluded."""
        return range(0 if window is None else max(0, length - window + 1), length)

    def read(self, owner: Owner) -> None:
        """As attention does."""
        for group, window in enumerate(self.windows):
            for position in self.needed(window, owner.num_scheduled):
                place = (owner.mirror[group][position // self.size], position % self.size)
                right = (group, owner.prefix(position + 1))
                assert self.memory.get(place) == right, "what is read is its own"

    def compute(self, owner: Owner, count: int) -> None:
        """Read what was computed before, and write KV for so many tokens more."""
        self.read(owner)
        end = min(owner.num_scheduled + min(count, self.step_tokens), len(owner.table.tokens))
        end = min(end, owner.table.capacity)
        for group, blocks in enumerate(owner.mirror):
            for position in range(owner.num_scheduled, end):
                place = (blocks[position // self.size], position % self.size)
                self.memory[place] = (group, owner.prefix(position + 1))
        owner.num_scheduled = max(owner.num_scheduled, end)

    def answer(self, owner: Owner, count: int) -> None:
        owner.num_computed = min(owner.num_scheduled, owner.num_computed + count)
        for group, index in self.kv.commit(owner.table, owner.num_computed):
            self.replaced.append((owner, group, index))
            assert index * self.size < owner.num_computed

    def tell(self) -> None:
        """A plan: what it gives away is written from now on, and nobody reads it there any more."""
        for owner, group, index in self.replaced:
            if owner in self.owners and (block := owner.table.blocks[group][index]) != NO_BLOCK:
                own = owner.mirror[group][index]
                for offset in range(self.size):
                    right = (group, owner.prefix(index * self.size + offset + 1))
                    assert self.memory[block, offset] == self.memory[own, offset] == right
                owner.mirror[group][index] = block
        self.replaced.clear()
        for owner in self.owners:
            for blocks, mirror in zip(owner.table.blocks, owner.mirror, strict=True):
                pairs = zip(blocks, mirror, strict=True)
                assert all(block in (NO_BLOCK, known) for block, known in pairs)

    def swap(self) -> None:
        """A plan begins with it: nobody has written into what was just taken."""
        for source, target in self.kv.take_swaps():
            assert (source < self.block_count) != (target < self.block_count)
            for offset in range(self.size):
                self.memory[target, offset] = self.memory[source, offset]

    def owner(self, data: st.DataObject) -> Owner:
        return data.draw(st.sampled_from(self.owners))

    def start_one(self, tokens: list[int], tenant: str, longer: int, fewer: int) -> Owner | None:
        """From what is cached, or from less of it; None when there is no room."""
        table = BlockTable(tokens=list(tokens), tenant=tenant, places_max=len(tokens) + longer)
        hits = self.kv.lookup(table, len(tokens) - 1 - fewer * self.size)
        self.check_hits(table, hits, len(tokens) - 1 - fewer * self.size)
        need, worst = self.kv.cost(table, hits, set())
        if need > (free := self.kv.free_count):
            return None
        self.tell()
        self.is_reserved &= worst + self.kv.worst_case_need <= free
        self.kv.allocate(table, hits)
        self.swap()
        assert self.kv.free_count == free - need
        owner = Owner(table, hits.num_tokens, hits.num_tokens)
        self.read(owner)
        self.owners.append(owner)
        return owner

    def check_hits(self, table: BlockTable, hits: Hits, num_tokens: int) -> None:
        """No longer one would have had all that the next token attends to."""
        for count in range(hits.num_tokens // self.size + 1, num_tokens // self.size + 1):
            assert not all(
                self.kv._pool.get(self.kv._keys(table, 0)[position // self.size], group) is not None
                for group, window in enumerate(self.windows)
                for position in self.needed(window, count * self.size)
            )

    def trim(self) -> None:
        """What is behind the windows of what was sent to the worker is free, and nothing else."""
        for owner in self.owners:
            self.kv.trim(owner.table, owner.num_scheduled)
            for window, blocks in zip(self.windows, owner.table.blocks, strict=True):
                first = self.needed(window, owner.num_scheduled).start // self.size
                held = [index for index, block in enumerate(blocks) if block != NO_BLOCK]
                assert held == list(range(min(first, len(blocks)), len(blocks)))

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
            self.compute(owner, count)
            self.answer(owner, count)

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
        copies = self.kv.fork(parent.table, child.table, parent.prompt - 1)
        others = [
            block for o in self.owners if o is not child for b in o.table.blocks for block in b
        ]
        assert not {target for _, target in copies} & set(others), "a copy is its own"
        for source, target in copies:
            for offset in range(self.size):
                if (source, offset) in self.memory:
                    self.memory[target, offset] = self.memory[source, offset]
        if copies:
            child.num_computed = child.num_scheduled = parent.prompt - 1
            self.read(child)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 5))
    def schedule(self, data: st.DataObject, count: int) -> None:
        """A chunk of a prompt, or a token; nobody has heard of it yet."""
        self.compute(self.owner(data), count)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 9))
    def step_done(self, data: st.DataObject, count: int) -> None:
        """What became of steps."""
        self.answer(self.owner(data), count)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), token=st.integers(1, 2), ahead=st.integers(0, 3))
    def grow(self, data: st.DataObject, token: int, ahead: int) -> None:
        """One more token, and places for the next step, if there are any."""
        owner = self.owner(data)
        table, ahead = owner.table, min(ahead, self.kv.ahead_max)
        if not owner.is_open:
            return
        if len(table.tokens) < table.places_max:
            table.tokens.append(token)
        counts = self.kv.shortfall(table, owner.num_scheduled, len(table.tokens), ahead)
        if sum(counts) > self.kv.free_count:
            self.trim()
        if sum(counts) > self.kv.free_count:
            worst = sum(self.kv.worst(other.table.places_max) for other in self.owners)
            assert worst > self.block_count, "each at its longest, they fit"
            assert not self.is_reserved
            return
        self.tell()
        held = {block for o in self.owners for blocks in o.table.blocks for block in blocks}
        taken = self.kv.extend(table, counts)
        self.swap()
        assert list(map(len, taken)) == counts
        for mirror, blocks in zip(owner.mirror, taken, strict=True):
            assert not held & set(blocks), "new blocks are nobody's"
            mirror += blocks
        assert not any(self.kv.shortfall(table, owner.num_scheduled, len(table.tokens), ahead))
        next_step = min(len(table.tokens), owner.num_scheduled + self.step_tokens)
        assert table.capacity >= min(next_step + ahead, table.places_max)

    @precondition(lambda self: self.owners)
    @rule()
    def reclaim(self) -> None:
        self.trim()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        owner = self.owner(data)
        self.kv.close(owner.table)
        owner.is_open = False

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Its tokens are found by nobody, wherever they were kept."""
        table = self.owner(data).table
        self.kv.forget(table)
        assert not self.kv.lookup(table, len(self.kv._keys(table, 0)) * self.size).num_tokens

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
        held = {block for o in self.owners for blocks in o.table.blocks for block in blocks}
        assert self.kv.free_count == self.block_count - len(held - {NO_BLOCK})


TestKVManager = KVMachine.TestCase
TestKVManager.settings = settings(max_examples=HISTORIES, stateful_step_count=40)
