"""Blocks in host memory: what the pool has to forget is brought back, and nothing else is."""

import pytest

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.outcome import Plan
from tests.support.cell import Cell, keys, spec

PROMPT = tuple(range(1, 18))


def served(cell: Cell, *prompts: tuple[int, ...]) -> list[Plan]:
    """One after the other, a token each."""
    plans: list[Plan] = []
    for prompt in prompts:
        cell.submit(prompt, 1)
        plans += cell.finish()
    return plans


def other(number: int) -> tuple[int, ...]:
    """A prompt that takes the whole pool of eight."""
    return tuple(range(100 * number, 100 * number + 32))


@pytest.mark.parametrize(("host_blocks", "computed"), [(0, 0), (3, 12), (4, 16), (50, 16)])
def test_what_was_evicted_is_not_computed_again(host_blocks: int, computed: int) -> None:
    """Nor its beginning, where there is no room for all: a prefix goes from its tail on."""
    cell = Cell(spec(blocks=8, host_blocks=host_blocks))
    served(cell, PROMPT)
    (evicting, *_) = served(cell, other(1))
    assert len(evicting.swaps) == (4 if host_blocks else 0)
    cell.submit(PROMPT, 3)
    plan = cell.must_plan()
    assert plan.joins[0].num_computed_tokens == computed
    if computed:
        # Those of the other go where those of this one come from, after they have been read.
        into = [target for source, target in plan.swaps if source >= 8]
        assert into == list(plan.joins[0].block_tables[0][1][: computed // 4])
    cell.finish()
    assert cell.worker().kv.counts.swapped_in == computed // 4


def test_only_what_is_lost_is_copied_and_that_once() -> None:
    cell = Cell(spec(blocks=8, host_blocks=50))
    assert not any(plan.swaps for plan in served(cell, PROMPT, PROMPT))
    served(cell, other(1), PROMPT)
    counts = cell.worker().kv.counts
    assert (counts.swapped_out, counts.swapped_in) == (4 + 5, 4)
    # It is still there: the second time nothing has to be copied to forget it.
    served(cell, other(1))
    again = cell.worker().kv.counts.since(counts)
    assert (again.evicted, again.swapped_out, again.swapped_in) == (4, 0, 4)


def test_what_was_wanted_longest_ago_makes_place() -> None:
    cell = Cell(spec(blocks=8, host_blocks=8))
    served(cell, PROMPT, other(1), other(2))
    # Of the first one two are left by the seven of the second.
    cell.submit(PROMPT, 1)
    assert cell.must_plan().joins[0].num_computed_tokens == 0
    cell.finish()


def test_who_is_preempted_computes_nothing_twice() -> None:
    """Whole blocks, that is: others had taken theirs meanwhile."""
    cell = Cell(spec(blocks=10, host_blocks=50), lease=1)
    for _ in range(3):
        cell.submit(8, 24)
    joins = [join for plan in cell.finish() for join in plan.joins]
    again = [join for join in joins if len(join.tokens) > join.num_prompt_tokens]
    assert again
    for join in again:
        assert join.num_computed_tokens >= (len(join.tokens) - 1) // 4 * 4
    assert cell.worker().kv.counts.swapped_in > 0


def test_what_a_spoilt_row_left_is_not_brought_back() -> None:
    cell = Cell(spec(blocks=8, host_blocks=50))
    served(cell, PROMPT, other(1))
    bad = cell.submit(PROMPT, 5)
    cell.bad_sequence_ids.add(bad)
    cell.finish()
    cell.submit(PROMPT, 1)
    assert cell.must_plan().joins[0].num_computed_tokens == 0
    cell.finish()


def test_windows_find_their_blocks_there_too() -> None:
    cell = Cell(spec(blocks=24, host_blocks=50, windows=(None, 6)))
    served(cell, PROMPT, tuple(range(100, 148)), tuple(range(200, 248)))
    cell.submit(PROMPT, 1)
    assert cell.must_plan().joins[0].num_computed_tokens == 16
    cell.finish()


def test_who_comes_in_the_same_plan_shares_what_was_brought_back() -> None:
    cell = Cell(spec(blocks=16, host_blocks=50))
    served(cell, PROMPT, tuple(range(100, 164)))
    cell.submit(PROMPT, 2)
    cell.submit(PROMPT, 2)
    plan = cell.must_plan()
    assert [join.num_computed_tokens for join in plan.joins] == [16, 16]
    assert sum(source >= 16 for source, _ in plan.swaps) == 4
    cell.finish()


def test_blocks_of_the_host_are_not_counted_as_found_for_free() -> None:
    """They take a free block each, as those that are computed do."""
    cell = Cell(spec(blocks=8, slots=2, host_blocks=50))
    served(cell, PROMPT, other(1))
    cell.submit(other(2)[:20], 9)
    cell.turns(2)
    cell.submit(PROMPT, 2)
    assert cell.plan() is None or not cell.must_plan().joins
    cell.finish()


def test_nothing_takes_the_place_of_what_is_being_brought_back() -> None:
    """The host has room for no more: what is evicted for it is forgotten."""
    pool = BlockPool(block_count=2, block_size=4, host_block_count=2)
    mine, theirs = keys(tuple(range(8)), 4), keys(tuple(range(50, 58)), 4)
    for some in (mine, theirs):
        for key, block in zip(some, taken := pool.take(2), strict=True):
            pool.cache(block, key)
        pool.free(taken)
    pool.host.swaps.clear()
    found = pool.find(mine)
    assert found == [3, 2]
    assert pool.claim([found]) == [[0, 1]]
    assert pool.host.swaps == [(3, 0), (2, 1)]
    assert pool.find(theirs) == []
    pool.check([[0, 1]])
