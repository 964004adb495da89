"""Blocks: who holds which, and which prefixes they still remember."""

from collections.abc import Sequence

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
from tests.support.cell import Cell, keys, spec


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


# De-duplication
