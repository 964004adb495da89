"""Layer groups with windows, and equal blocks of which one is given back."""

from dataclasses import replace

import pytest

from scheduler_svc.core import blocks as blocks_module
from scheduler_svc.core.blocks import (
    BlockPool,
)
from scheduler_svc.core.commands import WorkerChanged
from scheduler_svc.core.kv import NO_BLOCK, BlockTable, KVManager
from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, keys, spec

PROMPT = tuple(range(1, 14))


@pytest.mark.parametrize(
    ("computed", "skipped"), [(4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 1), (12, 1), (13, 2)]
)
def test_a_block_is_given_back_when_no_token_to_come_attends_to_it(
    computed: int, skipped: int
) -> None:
    # Token number 9 attends to the 5th and later: four before it, and itself.
    kv = KVManager(spec(block_size=4, blocks=9, windows=(6,)))
    table = BlockTable(tokens=list(range(20)), tenant="", places_max=20)
    kv.allocate(table, kv.lookup(table, 0))
    kv.commit(table, computed)
    assert table.num_skipped_blocks == [skipped]
    assert table.blocks[0].count(NO_BLOCK) == skipped
    assert kv.free_count == 9 - (5 - skipped)


def test_a_window_gives_back_as_it_moves_and_full_attention_never() -> None:
    cell = Cell(spec(block_size=4, windows=(None, 8)), lease=1, in_flight=1)
    sequence_id = cell.submit(3, 40)
    for _ in range(30):
        cell.turn()
        table = cell.sequence(sequence_id).kv
        (full, all_blocks), (skipped, blocks) = table.parts
        computed = cell.sequence(sequence_id).num_computed_tokens
        assert (full, skipped) == (0, max(0, computed - 7) // 4)
        assert len(all_blocks) == skipped + len(blocks)
        assert len(blocks) <= 4
    cell.finish()


def test_a_long_prompt_takes_blocks_of_a_window_step_by_step() -> None:
    cell = Cell(spec(block_size=4, slots=2, step_tokens=12, windows=(8,), blocks=9), in_flight=1)
    sequence_id = cell.submit(150, 20)
    (join,) = cell.must_plan().joins
    assert [(skipped, len(blocks)) for skipped, blocks in join.block_tables] == [(0, 3)]
    cell.finish()
    assert len(cell.outputs[sequence_id]) == 20


def test_the_longest_that_fits_is_counted_by_group() -> None:
    def places(*windows: int | None, blocks: int = 100) -> int:
        return KVManager(
            spec(block_size=4, blocks=blocks, step_tokens=12, windows=windows)
        ).places_max

    assert places(None) == 400
    assert places(None, None) == 200
    # A window of 8, two steps of 12 and what a block has before them: 34 places, nine blocks.
    assert places(None, 8) == 91 * 4
    assert places(None, 8, blocks=14) == 7 * 4
    assert places(8, blocks=8) == 8 * 4
    assert places(8, blocks=9) > 10**6


def test_a_budget_that_grows_is_not_more_than_tables_of_windows_are_made_for() -> None:
    small = spec(block_size=4, step_tokens=24, mixed_tokens=20, windows=(8,), blocks=64)
    cell = Cell(small)
    for step, mixed, first in [(200, 150, 24), (16, 12, 16), (300, None, 24)]:
        grown = replace(small, step_tokens_max=step, mixed_tokens_max=mixed)
        cell.apply(WorkerChanged(worker_id="w1", spec=grown))
        sequence_id = cell.submit(100, 5)
        assert cell.must_plan().chunks == ((0, first),)
        cell.finish()
        assert cell.reason(sequence_id) is Reason.LENGTH


def test_what_no_group_of_windows_can_hold_is_refused_with_both_numbers() -> None:
    cell = Cell(spec(block_size=4, blocks=14, slots=1, step_tokens=12, windows=(None, 8)))
    fits, too_large = cell.submit(20, 9), cell.submit(20, 10)
    assert cell.endings[too_large].error == (
        "prompt and max_tokens need KV for 29 tokens, the largest worker holds 28"
    )
    cell.finish()
    assert len(cell.outputs[fits]) == 9


def test_a_window_needs_no_prefix_but_what_is_in_it() -> None:
    cell = Cell(spec(block_size=4, windows=(None, 6)))
    prompt = tuple(range(1, 30))
    cell.submit(prompt, 1)
    cell.finish()
    cell.submit(prompt, 3)
    (join,) = cell.must_plan().joins
    assert join.num_computed_tokens == 28
    (full, blocks), (skipped, window) = join.block_tables
    assert (full, len(blocks)) == (0, 8)
    # Token number 29 attends to the 24th and later.
    assert (skipped, len(window)) == (5, 3)
    cell.finish()


def forget(cell: Cell, group: int, index: int, tokens: tuple[int, ...]) -> None:
    """As if the block had been given to somebody else."""
    pool, key = cell.worker().kv._pool, keys(tokens, 4)[index]
    assert pool.get(key, group) is not None
    pool.forget(key, group)


@pytest.mark.parametrize(
    ("group", "index", "hit"),
    [(0, 0, 0), (0, 3, 12), (1, 0, 28), (1, 4, 28), (1, 5, 20), (1, 6, 24)],
)
def test_a_hit_is_the_longest_that_every_group_has(group: int, index: int, hit: int) -> None:
    cell = Cell(spec(block_size=4, windows=(None, 6)))
    prompt = tuple(range(1, 30))
    cell.submit(prompt, 1)
    cell.finish()
    forget(cell, group, index, prompt)
    again = cell.submit(prompt, 3)
    cell.finish()
    assert cell.overs[again].num_cached_tokens == hit


def test_groups_do_not_find_each_others_blocks() -> None:
    pool, (key,) = BlockPool(block_count=4, block_size=2, group_count=2), keys((1, 2), 2)
    first, second = pool.take(2)
    pool.cache(first, key, 0)
    assert pool.get(key, 1) is None
    pool.cache(second, key, 1)
    assert [pool.get(key, group) for group in range(2)] == [first, second]


def test_what_only_steps_in_flight_attend_to_is_taken_before_anybody_is_preempted() -> None:
    # Twelve tokens a step and three plans in flight: the answers are far behind.
    size = {"block_size": 4, "slots": 2, "step_tokens": 12, "windows": (4,), "blocks": 8}
    cell = Cell(spec(**size), in_flight=3, prefill_tokens=1)  # type: ignore[arg-type]
    cell.submit(90, 4)
    plans = cell.finish()
    assert not any(plan.preempted for plan in plans)


def test_a_sibling_copies_a_block_of_every_group() -> None:
    cell = Cell(spec(block_size=4, windows=(None, 6)))
    first = cell.submit(PROMPT[:10], 5, n=2)
    plans = cell.finish()
    (plan,) = (plan for plan in plans if plan.copies)
    (join,) = plan.joins
    assert (join.sequence_id, join.num_computed_tokens, len(plan.copies)) == (first + 1, 9, 2)


def test_a_sibling_copies_nothing_that_a_window_has_passed() -> None:
    cell = Cell(spec(block_size=4, windows=(None, 2), slots=1))
    first = cell.submit(PROMPT[:10], 9, n=2)
    other = cell.submit(3, 1)
    plans = cell.finish()
    (join,) = (join for plan in plans for join in plan.joins if join.sequence_id == first + 1)
    assert other in cell.endings
    assert not any(plan.copies for plan in plans)
    assert join.num_computed_tokens == 8


def twins(*windows: int | None, in_flight: int = 1) -> Cell:
    """Two that compute the same prompt side by side; both have computed it, and one more token."""
    cell = Cell(spec(block_size=4, windows=windows), lease=1, in_flight=in_flight)
    cell.submit(PROMPT, 6)
    cell.submit(PROMPT, 6)
    cell.must_plan()
    return cell


def test_of_two_equal_blocks_one_is_given_back_and_the_next_plan_says_so() -> None:
    cell = twins(None)
    free, ((_, own),) = cell.worker().kv.free_count, cell.sequence(2).kv.parts
    cell.step()
    (kept,), (blocks,) = cell.sequence(1).kv.blocks, cell.sequence(2).kv.blocks
    assert blocks == [*kept[:3], own[3]]
    assert cell.worker().kv.free_count == free + 3
    plan = cell.must_plan()
    assert plan.replacements == tuple((1, index, kept[index], 0) for index in range(3))
    cell.step()
    assert cell.must_plan().replacements == ()
    cell.finish()


def test_every_group_gives_its_own_back() -> None:
    cell = twins(None, 7)
    cell.step()
    replaced = cell.must_plan().replacements
    # Block 0 of the window is given back altogether.
    assert [(index, group) for _, index, _, group in replaced] == [
        (0, 0), (1, 0), (2, 0), (1, 1), (2, 1),
    ]  # fmt: skip
    cell.finish()


@pytest.mark.parametrize("goes", ["cancelled", "preempted"])
def test_who_has_left_is_not_told(goes: str) -> None:
    cell = twins(None)
    cell.step()
    if goes == "cancelled":
        cell.cancel(2)
    else:
        cell.scheduler._cell.preempt(cell.worker(), cell.sequence(2))
    plan = cell.must_plan()
    assert plan.leaves == (1,)
    assert plan.replacements == ()
    cell.finish()


def test_a_block_given_back_is_written_by_the_plan_that_tells_of_it_at_the_earliest() -> None:
    """The plans in flight still read it, and the model worker sees whether it is right."""
    cell = twins(None, in_flight=2)
    own = set(cell.sequence(2).kv.parts[0][1][:3])
    cell.must_plan()  # reads the twins' own blocks after they were given back
    cell.step()
    cell.submit(40, 3)
    plan = cell.must_plan()
    (join,) = plan.joins
    assert own <= set(join.block_tables[0][1])
    assert len(plan.replacements) == 3
    cell.finish()


def test_equal_hashes_of_unequal_blocks_replace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "chain_hash", lambda parent, content: b"always the same")
    cell = Cell(spec(block_size=4))
    cell.submit((1, 2, 3, 4, 5))
    cell.submit((6, 7, 8, 9, 5))
    assert not any(plan.replacements for plan in cell.finish())
