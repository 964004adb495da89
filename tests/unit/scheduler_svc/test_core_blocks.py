"""Blocks: who holds which, and which prefixes they still remember."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler_svc.core import blocks as blocks_module
from scheduler_svc.core import kv as kv_module
from scheduler_svc.core.blocks import (
    BlockKey,
    BlockPool,
    block_keys,
    blocks_for,
    chain_hash,
    root_hash,
)
from scheduler_svc.core.commands import WorkerChanged
from scheduler_svc.core.kv import NO_BLOCK, BlockTable, KVManager
from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, spec


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)],
)
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


@pytest.mark.parametrize(
    ("prompt", "blocks"),
    [(3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)],
)
def test_a_join_brings_blocks_for_every_known_token(prompt: int, blocks: int) -> None:
    cell = Cell(spec(block_size=4), lease=1)
    cell.submit(prompt, 6)
    (join,) = cell.must_plan().joins
    ((skipped, held),) = join.block_tables
    assert (skipped, len(held)) == (0, blocks)
    cell.finish()


@pytest.mark.parametrize("prompt", [3, 4, 5])
def test_a_block_is_appended_exactly_when_the_next_place_needs_one(prompt: int) -> None:
    cell = Cell(spec(block_size=4), lease=1, in_flight=1)
    cell.submit(prompt, 9)
    for places in range(prompt, prompt + 8):
        plan = cell.must_plan()
        is_border = places > prompt and places % 4 == 1
        assert len(plan.appends) == is_border, f"{places} places"
        cell.step()
    cell.finish()


def test_a_pool_hands_out_each_block_once() -> None:
    pool = BlockPool(block_count=7, block_size=4)
    first, second = pool.take(4), pool.take(3)
    assert sorted(first + second) == list(range(7))
    assert pool.free_count == 0
    with pytest.raises(AssertionError, match="1 blocks taken, 0 free"):
        pool.take(1)
    pool.free(first)
    assert pool.free_count == 4
    pool.check([second])


def test_what_is_not_held_cannot_be_given_back() -> None:
    pool = BlockPool(block_count=2, block_size=4)
    with pytest.raises(AssertionError, match="given back but not held"):
        pool.free([0])


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    pool = BlockPool(block_count=2, block_size=4)
    blocks = pool.take(1)
    pool.hold(blocks)
    pool.free(blocks)
    assert pool.free_count == 1
    pool.free(blocks)
    assert pool.free_count == 2


def keys(tokens: tuple[int, ...], size: int) -> list[BlockKey]:
    return block_keys(root_hash("model", ""), tokens, size)


def remembered(pool: BlockPool, tokens: tuple[int, ...]) -> list[int]:
    """Blocks that hold and remember `tokens`."""
    size = pool.block_size
    blocks = pool.take(len(tokens) // size)
    for block, key in zip(blocks, keys(tokens, size), strict=True):
        pool.cache(block, key)
    return blocks


def test_a_freed_prefix_is_found_and_claimed_again() -> None:
    pool, tokens = BlockPool(block_count=4, block_size=2), (1, 2, 3, 4)
    blocks = remembered(pool, tokens)
    pool.free(blocks)
    found = pool.find(keys(tokens, 2))
    assert found == blocks
    assert pool.free_among(found) == 2
    pool.hold(found)
    assert (pool.free_count, pool.free_among(found)) == (2, 0)
    pool.check([found])


def test_the_longest_prefix_is_found_and_no_more() -> None:
    pool = BlockPool(block_count=4, block_size=2)
    blocks = remembered(pool, (1, 2, 3, 4))
    other = (1, 2, 9, 9)
    assert pool.find(keys(other, 2)) == blocks[:1]


def test_a_block_taken_anew_forgets_its_prefix() -> None:
    pool, tokens = BlockPool(block_count=1, block_size=2), (1, 2)
    pool.free(remembered(pool, tokens))
    taken = pool.take(1)
    assert pool.find(keys(tokens, 2)) == []
    pool.check([taken])


def test_blocks_without_a_prefix_are_reused_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(block_count=4, block_size=1)
    (old,) = remembered(pool, (1,))
    (young,) = remembered(pool, (2,))
    plain = pool.take(2)
    pool.free([old])
    pool.free(plain)
    pool.free([young])
    taken = pool.take(4)
    assert sorted(taken[:2]) == sorted(plain)
    assert taken[2:] == [old, young]


def test_the_tail_of_a_prefix_is_forgotten_before_its_head() -> None:
    pool, tokens = BlockPool(block_count=3, block_size=1), (1, 2, 3)
    blocks = remembered(pool, tokens)
    pool.free(blocks)
    pool.take(1)
    assert pool.find(keys(tokens, 1)) == blocks[:2]


def test_the_first_block_to_remember_a_prefix_stays_the_one_that_is_found() -> None:
    pool, tokens = BlockPool(block_count=3, block_size=2), (1, 2)
    first, second = remembered(pool, tokens), remembered(pool, tokens)
    assert pool.find(keys(tokens, 2)) == first
    pool.free(second)
    pool.check([first])


def test_only_a_held_block_is_remembered() -> None:
    pool = BlockPool(block_count=2, block_size=2)
    with pytest.raises(AssertionError, match="cached but not held"):
        pool.cache(0, keys((1, 2), 2)[0])


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys((1, 2, 3)[:count], 2)) for count in range(4)] == [0, 0, 1, 1]


def test_check_finds_a_block_that_is_neither_free_nor_held() -> None:
    pool = BlockPool(block_count=2, block_size=2)
    pool._free.popitem()
    with pytest.raises(AssertionError):
        pool.check([])


def test_hash_chains_start_from_model_and_tenant() -> None:
    roots = {root_hash("m", "a"), root_hash("m", "b"), root_hash("n", "a"), root_hash("n", "b")}
    assert len(roots) == 4
    assert chain_hash(b"x", b"12") != chain_hash(b"y", b"12") != chain_hash(b"y", b"21")


# Prefixes in use: every output below is checked against the undisturbed one, and the model worker
# compares the content of each block with the tokens it should stand for.

PROMPT = tuple(range(1, 14))


def test_a_second_request_starts_from_the_blocks_of_the_first() -> None:
    cell = Cell(spec(block_size=4))
    first = cell.submit(PROMPT)
    cell.finish()
    second = cell.submit(PROMPT)
    cell.finish()
    assert cell.overs[first].num_cached_tokens == 0
    assert cell.overs[second].num_cached_tokens == 12


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_one_token_is_always_left_to_compute(length: int, hit: int) -> None:
    cell = Cell(spec(block_size=4))
    cell.submit(PROMPT)
    cell.finish()
    again = cell.submit(PROMPT[:length])
    cell.finish()
    assert cell.overs[again].num_cached_tokens == hit


def test_output_is_found_as_a_prefix_too() -> None:
    cell = Cell(spec(block_size=4))
    first = cell.submit((1, 2, 3), 10)
    cell.finish()
    second = cell.submit((1, 2, 3, *cell.outputs[first]))
    cell.finish()
    assert cell.overs[second].num_cached_tokens == 12


def test_tenants_never_share_and_a_tenant_shares_with_itself() -> None:
    cell = Cell(spec(block_size=4))
    cell.submit(PROMPT, tenant="a")
    cell.finish()
    stranger, same = cell.submit(PROMPT, tenant="b"), cell.submit(PROMPT, tenant="a")
    cell.finish()
    assert cell.overs[stranger].num_cached_tokens == 0
    assert cell.overs[same].num_cached_tokens == 12


def test_a_hash_collision_is_detected_by_comparing_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "chain_hash", lambda parent, content: b"always the same")
    cell = Cell(spec(block_size=4))
    cell.submit((1, 2, 3, 4, 5))
    cell.finish()
    collides, hits = cell.submit((6, 7, 8, 9, 5)), cell.submit((1, 2, 3, 4, 6))
    cell.finish()
    assert cell.overs[collides].num_cached_tokens == 0
    assert cell.overs[hits].num_cached_tokens == 4


def test_a_cached_prefix_survives_until_its_blocks_are_needed() -> None:
    cell = Cell(spec(block_size=4, blocks=6))
    cell.submit(PROMPT, 1)
    cell.finish()
    cell.submit((50,) * 20, 1)  # takes five of six blocks
    cell.finish()
    again = cell.submit(PROMPT, 1)
    cell.finish()
    assert cell.overs[again].num_cached_tokens < 12


def test_a_hit_on_free_blocks_is_not_counted_twice() -> None:
    # Four blocks in all, three of them a cached prefix: a request for all four fits exactly.
    cell = Cell(spec(block_size=4, blocks=4))
    cell.submit(PROMPT, 1)
    cell.finish()
    again = cell.submit(PROMPT, 4)
    cell.finish()
    assert cell.overs[again].num_cached_tokens == 12


def test_shared_blocks_cost_nothing_to_share() -> None:
    # Six blocks, four held: the second needs four too, but only one that is not shared.
    cell = Cell(spec(block_size=4, blocks=6), lease=1)
    first = cell.submit(PROMPT, 4)
    cell.turn()
    second = cell.submit(PROMPT, 4)
    assert cell.must_plan().admitted == (second,)
    assert cell.running() == [first, second]
    cell.finish()


def test_a_block_is_remembered_only_when_its_step_is_committed() -> None:
    cell = Cell(spec(block_size=4))
    cell.submit(PROMPT)
    cell.must_plan()
    cell.compute()  # never committed
    second = cell.submit(PROMPT)
    (join,) = cell.must_plan().joins
    assert (join.sequence_id, join.num_computed_tokens) == (second, 0)


def test_a_prompt_in_chunks_can_be_found_as_far_as_it_is_done() -> None:
    cell = Cell(spec(block_size=4, slots=4, step_tokens=12), in_flight=1, prefill_tokens=4)
    prompt = tuple(range(1, 41))
    cell.submit(prompt)
    cell.turns(2)
    cell.submit(prompt)
    (join,) = cell.must_plan().joins
    assert join.num_computed_tokens == 24
    cell.finish()


def test_a_failed_step_registers_none_of_its_blocks() -> None:
    cell = Cell(spec(block_size=4))
    bad = cell.submit(PROMPT)
    cell.bad_sequence_ids.add(bad)
    cell.finish()
    again = cell.submit(PROMPT)
    cell.finish()
    assert cell.overs[again].num_cached_tokens == 0


def test_who_failed_leaves_nothing_of_its_prompt_to_be_found() -> None:
    """Nor of what it had found: what it was given may be what failed it."""
    cell = Cell(spec(block_size=4, slots=4, step_tokens=12), in_flight=1, prefill_tokens=4)
    prompt = tuple(range(1, 41))
    cell.submit(prompt[:20])
    cell.finish()
    bad = cell.submit(prompt)
    cell.bad_sequence_ids.add(bad)
    cell.finish()
    again = cell.submit(prompt)
    cell.finish()
    assert cell.overs[bad].num_cached_tokens == 20
    assert cell.overs[again].num_cached_tokens == 0


def test_workers_with_other_block_sizes_or_models_have_prefixes_of_their_own() -> None:
    cell = Cell(spec(block_size=4))
    request = cell.submit(PROMPT, 30)
    cell.turns(3)
    cell.kill("w1", is_crash=False)
    cell.join("w2", spec(block_size=8, fingerprint="other"))
    cell.turns(3)
    assert cell.running("w2") == [request]
    same = cell.submit(PROMPT)
    cell.finish()
    assert cell.overs[same].num_cached_tokens == 8


def test_a_prompt_is_hashed_once_for_each_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look in turns at whoever is next, after every step of theirs."""
    prompt, sizes = tuple(range(500, 541)), list[int]()

    def noted(root: bytes, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
        if tokens[0] == prompt[0]:
            sizes.append(block_size)
        return block_keys(root, tokens, block_size)

    monkeypatch.setattr(kv_module, "block_keys", noted)
    cell = Cell(spec(block_size=4, blocks=16), spec(block_size=8, blocks=8), lease=1)
    for _ in range(2):
        cell.submit(41, 20)
    cell.turns(2)
    cell.submit(prompt, 5)
    cell.turns(6)
    assert cell.waiting()
    assert sorted(sizes) == [4, 8]
    cell.finish()


# Layer groups


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
    pool = cell.worker().kv._pool
    block = pool.get(keys(tokens, 4)[index], group)
    assert block is not None
    pool.forget(block)


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


# De-duplication


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
