"""Every way in which a plan can be wrong is refused in words, and nothing of it stays."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, InvalidPlan, Join, Plan
from gpu_worker.batch.rows import Rows
from tests.support.mini_scheduler import checksum, plan, sampling

LIMITS = RowLimits(
    slots=4,
    context_tokens=20,
    step_tokens=8,
    block_size=4,
    block_count=10,
    vocab_size=50,
    host_block_count=3,
)


def join(slot: int = 1, **changes: Any) -> Join:
    """Five tokens of prompt in two blocks, three tokens to sample: valid by itself."""
    blocks = changes.pop("blocks", (8, 9))
    base: dict[str, Any] = {
        "slot": slot,
        "sequence_id": 70 + slot,
        "token_ids": (1, 2, 3, 4, 5),
        "prompt_tokens": 5,
        "num_computed_tokens": 0,
        "block_tables": (BlockTable(blocks),),
        "sampling": sampling(max_tokens=3),
    }
    return Join(**(base | changes))


def occupied() -> Rows:
    """Slot 0 decodes with a gap of one and two of its blocks full; the next plan is number 2."""
    rows = Rows(LIMITS)
    first = join(0, blocks=(0, 1), num_computed_tokens=4, sampling=sampling(max_tokens=10))
    rows.apply(plan(1, joins=(first,), membership_checksum=checksum([(0, 70)])))
    return rows


def state(rows: Rows) -> tuple[object, ...]:
    """Everything that can be seen of the batch."""
    slots = range(LIMITS.slots)
    inputs = rows.step_inputs(rows.steady_counts())
    return (
        repr(rows),
        rows.members,
        [rows.tokens(slot) for slot in slots],
        [rows.blocks(slot) for slot in slots],
        [rows.num_computed_tokens(slot) for slot in slots],
        [rows.is_idle(slot) for slot in slots],
        inputs.tables().slot_mapping.tolist(),
        inputs.sampling.temperature.tolist(),
    )


def after(*joins: Join, **changes: Any) -> Plan:
    """Plan 2 on `occupied()`, with the right checksum unless it says otherwise."""
    members = [(0, 70), *((item.slot, item.sequence_id) for item in joins)]
    base = {"joins": joins, "membership_checksum": checksum(members)}
    return plan(2, **(base | changes))


def test_the_builders_are_valid() -> None:
    rows = occupied()
    counts = rows.apply(after(join(), chunks=((1, 5),)))
    assert counts.tolist() == [1, 5, 0, 0]


def test_a_join_samples_by_its_own_wishes_alone() -> None:
    """Also in a slot where somebody else had wished for something."""
    wishes = [
        {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "seed": 3, "logprobs": 2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.5, "min_p": 0.125, "seed": 4, "logprobs": 1},
    ]
    rows = Rows(LIMITS)
    for number, wish in enumerate(wishes, start=1):
        joins = (join(0, sequence_id=70, sampling=sampling(**wish)),)
        leaves = (0,) if number > 1 else ()
        members = checksum([(0, 70)])
        counts = rows.apply(
            plan(number, joins=joins, leaves=leaves, chunks=((0, 5),), membership_checksum=members)
        )
        columns = rows.step_inputs(counts).sampling
        assert {name: getattr(columns, name).tolist() for name in wish} == {
            name: [value] for name, value in wish.items()
        }


NAN, INF = float("nan"), float("inf")

WRONG: list[tuple[Plan, str]] = [
    (replace(after(), plan_id=1), "expected plan 2"),
    (replace(after(), plan_id=3), "expected plan 2"),
    (after(lease_steps=0), "a lease is of 1 to"),
    (after(lease_steps=4097), "a lease is of 1 to"),
    (after(leaves=(4,)), "slot 4 is not below 4"),
    (after(leaves=(2,)), "slot 2 leaves but nobody is in it"),
    (after(leaves=(0, 0)), "slot 0 leaves but nobody is in it"),
    (after(join(4)), "slot 4 is not below 4"),
    (after(join(0)), "slot 0 is taken"),
    (after(join(1), join(1)), "slot 1 is taken"),
    (after(join(token_ids=())), "slot 1: the prompt is 1 to 0"),
    (after(join(prompt_tokens=0)), "the prompt is 1 to 5"),
    (after(join(prompt_tokens=6)), "the prompt is 1 to 5"),
    (after(join(num_computed_tokens=5)), "leave nothing to compute"),
    (after(join(token_ids=(1, 2, 50))), "slot 1: the prompt"),
    (after(join(token_ids=(1, 2, 3, 4, 50))), "token id 50 is not in the vocabulary of 50"),
    (after(join(token_ids=(1,) * 20, prompt_tokens=20)), "20 known tokens leave none"),
    (after(join(token_ids=(1,) * 8)), "8 known tokens leave none below the limit of 8"),
    (after(join(blocks=(8, 10))), "block 10 is not below 10"),
    (after(join(blocks=(8, 8))), "a block is listed twice"),
    (after(join(blocks=(2, 3, 4, 5, 6, 7))), "6 blocks are more than the 5"),
    (after(join(blocks=(), num_computed_tokens=1)), "1 tokens done do not fit 0 blocks"),
    (after(join(sampling=sampling(temperature=NAN))), "temperature is a number"),
    (after(join(sampling=sampling(temperature=INF))), "temperature is a number"),
    (after(join(sampling=sampling(temperature=-0.1))), "temperature is a number"),
    (after(join(sampling=sampling(top_p=0.0))), "top_p is in (0, 1]"),
    (after(join(sampling=sampling(top_p=NAN))), "top_p is in (0, 1]"),
    (after(join(sampling=sampling(min_p=1.1))), "min_p is in [0, 1]"),
    (after(join(sampling=sampling(min_p=NAN))), "min_p is in [0, 1]"),
    (after(join(sampling=sampling(top_k=-1))), "top_k is at least 0"),
    (after(join(sampling=sampling(seed=1 << 64))), "the seed has 64 bits"),
    (after(join(sampling=sampling(choice=-1))), "choice is at least 0"),
    (after(join(sampling=sampling(max_tokens=0))), "5 known tokens leave none"),
    (after(join(sampling=sampling(min_tokens=-1))), "min_tokens is at least 0"),
    (after(join(sampling=sampling(logprobs=-2))), "logprobs is at most the vocabulary"),
    (after(join(sampling=sampling(logprobs=51))), "logprobs is at most the vocabulary"),
    (after(join(sampling=sampling(prompt_logprobs=51))), "prompt_logprobs is at most the voc"),
    (after(join(sampling=sampling(stop_token_ids=(50,)))), "token id 50 is not in"),
    (after(join(sampling=sampling(stop_token_ids=(1,) * 257))), "at most 256 stop tokens"),
    (after(join(sampling=sampling(repetition_penalty=NAN))), "repetition_penalty is a number"),
    (after(join(sampling=sampling(repetition_penalty=INF))), "repetition_penalty is a number"),
    (after(join(sampling=sampling(repetition_penalty=-1.0))), "repetition_penalty is a number"),
    (after(join(sampling=sampling(presence_penalty=NAN))), "presence_penalty is a number"),
    (after(join(sampling=sampling(frequency_penalty=INF))), "frequency_penalty is a number"),
    (after(join(sampling=sampling(logit_bias=((1, NAN),)))), "a bias is a number"),
    (after(join(sampling=sampling(logit_bias=((1, 1.0), (1, 2.0))))), "a token has one bias"),
    (after(join(sampling=sampling(logit_bias=((50, 1.0),)))), "token id 50 is not in"),
    (after(join(sampling=sampling(logit_bias=((1, 1.0),) * 1025))), "at most 1024 biases"),
    (after(join(sampling=sampling(allowed_token_ids=(50,)))), "token id 50 is not in"),
    (after(join(sampling=sampling(allowed_token_ids=(1, 1)))), "an allowed token is listed once"),
    (after(join(sampling=sampling(bad_words=((1,),) * 65))), "at most 64 bad words"),
    (after(join(sampling=sampling(bad_words=((1,) * 33,)))), "a bad word has at most 32 tokens"),
    (after(join(sampling=sampling(bad_words=((),)))), "a bad word has a token"),
    (after(join(sampling=sampling(bad_words=((1, 50),)))), "token id 50 is not in"),
    (after(appends=((4, 2, 0),)), "slot 4 is not below 4"),
    (after(appends=((0, 10, 0),)), "block 10 is not below 10"),
    (after(appends=((1, 2, 0),)), "slot 1 gets a block but nobody is in it"),
    (after(appends=((0, 1, 0),)), "slot 0 already has block 1"),
    (after(appends=((0, 2, 0), (0, 2, 0))), "slot 0 already has block 2"),
    (after(join(), appends=((1, 9, 0),)), "slot 1 already has block 9"),
    (after(appends=tuple((0, block, 0) for block in (2, 3, 4, 5))), "has all the 5 blocks"),
    (after(replacements=((4, 0, 2, 0),)), "slot 4 is not below 4"),
    (after(replacements=((0, 0, 10, 0),)), "block 10 is not below 10"),
    (after(replacements=((1, 0, 2, 0),)), "slot 1 has a block replaced but nobody is in it"),
    (after(replacements=((0, 2, 3, 0),)), "slot 0 has 2 blocks, number 2 is to be replaced"),
    (after(replacements=((0, 1, 3, 0),)), "block number 1 is to be replaced with 4 tokens done"),
    (after(replacements=((0, 0, 1, 0),)), "slot 0 already has block 1"),
    (after(replacements=((0, 0, 0, 0),)), "slot 0 already has block 0"),
    (after(join(), replacements=((1, 0, 3, 0),)), "is to be replaced with 0 tokens done"),
    (after(appends=((0, 2, 0),), replacements=((0, 0, 2, 0),)), "slot 0 already has block 2"),
    (after(swaps=((1, 2),)), "block 1 to 2: exactly one of the two is a host block, from 10 on"),
    (after(swaps=((10, 12),)), "block 10 to 12: exactly one of the two is a host block"),
    (after(swaps=((0, 10), (12, 12))), "block 12 to 12: exactly one of the two is a host block"),
    (after(swaps=((13, 1),)), "block 13 to 1: there are 10 blocks, and 3 host blocks from 10 on"),
    (after(swaps=((1, 13),)), "block 1 to 13: there are 10 blocks"),
    (after(swaps=((-1, 10),)), "block -1 to 10: there are 10 blocks"),
    (after(copies=((10, 1),)), "block 10 is not below 10"),
    (after(copies=((1, 10),)), "block 10 is not below 10"),
    (after(copies=((1, 3), (2, 3))), "two copies have the same target"),
    (after(copies=((1, 3), (3, 2))), "block 3 is the target of a copy and a source"),
    (after(copies=((1, 1),)), "block 1 is the target of a copy and a source"),
    (after(chunks=((4, 1),)), "slot 4 is not below 4"),
    (after(chunks=((1, 1),)), "slot 1 has a chunk but nobody is in it"),
    (after(join(), chunks=((1, -1),)), "a chunk of -1 tokens for a gap of 5"),
    (after(join(), chunks=((1, 6),)), "a chunk of 6 tokens for a gap of 5"),
    (after(chunks=((0, 2),)), "a chunk of 2 tokens for a gap of 1"),
    (after(join(), chunks=((1, 2), (1, 2))), "slot 1 has two chunks"),
    (after(join(), join(2, blocks=(6, 7)), chunks=((1, 5), (2, 3))), "computes 9 tokens"),
    (after(join(blocks=(9,)), chunks=((1, 5),)), "up to token 5, but its 1 blocks hold 4"),
    # Slot 0 has four tokens done and eight places: the fifth step of a lease finds none.
    (after(lease_steps=5), "slot 0: the lease can compute up to token 9"),
    (after(membership_checksum=0), "membership checksum 0x0, the batch of 1 rows has 0x47"),
    (after(join(), membership_checksum=checksum([(0, 70)])), "membership checksum"),
    (after(leaves=(0,)), "membership checksum"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_a_wrong_plan_is_refused_and_changes_nothing(wrong: Plan, said: str) -> None:
    rows = occupied()
    before = state(rows)
    with pytest.raises(InvalidPlan) as caught:
        rows.apply(wrong)
    assert said in str(caught.value)
    assert state(rows) == before


def test_swaps_may_follow_each_other_in_any_order() -> None:
    """Unlike copies: a block may be written twice, or read and written."""
    occupied().apply(after(swaps=((0, 12), (10, 0), (0, 10), (9, 12)), copies=((0, 2),)))


def test_who_has_no_host_blocks_swaps_none() -> None:
    rows = Rows(replace(LIMITS, host_block_count=0))
    members = checksum([(1, 71)])
    swapped = plan(1, joins=(join(),), membership_checksum=members, swaps=((0, 10),))
    with pytest.raises(InvalidPlan, match=r"^swaps: this worker has no host blocks, and says so$"):
        rows.apply(swapped)
    rows.apply(replace(swapped, swaps=()))


def test_a_lease_may_use_every_place_up_to_the_limit() -> None:
    """The last token of a row is never computed, so it needs no place."""
    rows = occupied()
    rows.apply(after(lease_steps=4))
    rows = occupied()
    # limit 8: five prompt tokens and three sampled; seven are computed, in two blocks of four.
    rows.apply(after(join(), chunks=((1, 5),), lease_steps=4))
    rows = Rows(LIMITS)
    tight = join(0, sampling=sampling(max_tokens=3))
    members = checksum([(0, 70)])
    rows.apply(
        plan(1, joins=(tight,), chunks=((0, 5),), lease_steps=4096, membership_checksum=members)
    )


def test_a_row_may_be_appended_the_block_that_it_has_given_up() -> None:
    rows = occupied()
    rows.apply(after(replacements=((0, 0, 5, 0),), appends=((0, 0, 0),)))
    assert rows.blocks(0) == [5, 1, 0]
    rows = occupied()
    joined = join(num_computed_tokens=4)
    rows.apply(after(joined, replacements=((1, 0, 5, 0),), appends=((1, 8, 0), (0, 3, 0))))
    assert (rows.blocks(0), rows.blocks(1)) == ([0, 1, 3], [5, 9, 8])


def test_a_row_whose_prompt_is_not_all_computed_rests_for_the_lease() -> None:
    """It needs places for its chunk only, whatever the others go on to compute."""
    rows = occupied()
    rows.apply(after(join(blocks=(9,)), chunks=((1, 3),), lease_steps=4))
    assert rows.blocks(1) == [9]


@pytest.mark.parametrize(
    "most",
    [
        {"bad_words": ((1,) * 32,)},
        {"bad_words": ((1,),) * 64},
        {"stop_token_ids": (1,) * 256},
        {"allowed_token_ids": (49,)},
        {"top_p": 1.0, "min_p": 1.0, "seed": (1 << 64) - 1},
        {"logprobs": LIMITS.vocab_size},
    ],
    ids=" ".join,
)
def test_every_bound_of_sampling_may_be_reached(most: dict[str, Any]) -> None:
    rows = occupied()
    rows.apply(after(join(sampling=sampling(**most))))
    assert rows.members == ((0, 70), (1, 71))


def test_a_chunk_for_a_row_that_has_ended_is_no_error() -> None:
    rows = occupied()
    rows.fail(0)
    counts = rows.apply(after(chunks=((0, 7),)))
    assert counts.tolist() == [0, 0, 0, 0]


def test_a_slot_can_be_left_and_taken_in_one_plan() -> None:
    rows = occupied()
    rows.fail(0)
    rows.apply(
        after(
            replace(join(0), sequence_id=99), leaves=(0,), membership_checksum=100, chunks=((0, 5),)
        )
    )
    assert rows.members == ((0, 99),)
    assert not rows.is_idle(0)
    assert rows.blocks(0) == [8, 9]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((), 0x0),
        (((0, 0),), 0x1),
        (((0, 70),), 0x47),
        (((3, 4), (0, 70)), 0x6A),
        (((1, (1 << 64) - 2),), 0xFFFFFFFFFFFFFFFD),
        (((3, (1 << 63)), (2, (1 << 62))), 0xC00000000000000C),
    ],
)
def test_the_checksum_is_the_one_of_the_contract(
    members: tuple[tuple[int, int], ...], expected: int
) -> None:
    """Golden values: both sides of the wire must agree on them for ever."""
    assert checksum(members) == expected
    rows = Rows(LIMITS)
    joins = tuple(
        join(slot, sequence_id=sequence_id, blocks=(2 * index, 2 * index + 1))
        for index, (slot, sequence_id) in enumerate(members)
    )
    rows.apply(plan(1, joins=joins, membership_checksum=expected))
    assert sorted(rows.members) == sorted(members)
    assert np.all(rows.steady_counts() == 0)


def test_a_chunk_of_no_tokens_sits_the_first_step_out() -> None:
    rows = occupied()
    counts = rows.apply(after(join(), chunks=((0, 0), (1, 5))))
    assert counts.tolist() == [0, 5, 0, 0]
    step = rows.step_inputs(counts)
    assert (step.slots.tolist(), step.token_count) == ([1], 5)
    assert rows.steady_counts().tolist()[0] == 1, "and no other"
