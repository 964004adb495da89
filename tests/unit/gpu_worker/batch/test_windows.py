"""Rows of models with sliding windows: blocks behind one are not theirs, in its layer group."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, InvalidPlan, Join
from gpu_worker.batch.rows import Rows
from tests.support.mini_scheduler import checksum, plan, sampling

LIMITS = RowLimits(
    slots=2,
    context_tokens=40,
    step_tokens=8,
    block_size=4,
    block_count=10,
    vocab_size=50,
    windows=(6,),
)
MEMBERS = checksum([(0, 70)])


def join(skipped: int, *blocks: int, computed: int = 15) -> Join:
    """Sixteen tokens, of which the last is to be computed."""
    return Join(
        slot=0,
        sequence_id=70,
        token_ids=tuple(range(16)),
        prompt_tokens=16,
        num_computed_tokens=computed,
        block_tables=(BlockTable(blocks, skipped),),
        sampling=sampling(max_tokens=20),
    )


def rows_with(joined: Join, limits: RowLimits = LIMITS) -> Rows:
    rows = Rows(limits)
    rows.apply(plan(1, joins=(joined,), membership_checksum=MEMBERS))
    return rows


def test_blocks_that_the_window_has_left_are_not_needed() -> None:
    # The token at 15 attends to 10..15: of the first two blocks nothing.
    rows = rows_with(join(2, 7, 3))
    inputs = rows.step_inputs(rows.steady_counts())
    assert inputs.tables().slot_mapping.tolist() == [[3 * 4 + 3]]
    assert inputs.tables().block_tables[0, 0, 2:4].tolist() == [7, 3]
    assert inputs.context_lengths.tolist() == [16]


@pytest.mark.parametrize(("skipped", "computed", "behind"), [(3, 15, 2), (2, 12, 1), (1, 4, 0)])
def test_no_block_is_skipped_that_a_token_to_come_attends_to(
    skipped: int, computed: int, behind: int
) -> None:
    said = f"{skipped} blocks are skipped, and only {behind} are behind the window"
    with pytest.raises(InvalidPlan, match=said):
        rows_with(join(skipped, 7, computed=computed))


def test_without_a_window_no_block_is_skipped() -> None:
    with pytest.raises(InvalidPlan, match="1 blocks are skipped, and only 0 are behind"):
        rows_with(join(1, 7, 3, 5), replace(LIMITS, windows=(None,)))


def test_what_was_given_back_may_be_appended_anew_and_what_is_held_may_not() -> None:
    rows = rows_with(join(0, 1, 2, 7, 3))
    for block in (7, 3):
        with pytest.raises(InvalidPlan, match=f"slot 0 already has block {block}"):
            rows.apply(plan(2, appends=((0, block, 0),), membership_checksum=MEMBERS))
    rows.apply(plan(2, appends=((0, 1, 0), (0, 2, 0)), membership_checksum=MEMBERS))
    assert rows.blocks(0) == [1, 2, 7, 3, 1, 2]


def test_a_table_is_no_longer_than_the_context_with_what_is_skipped() -> None:
    with pytest.raises(InvalidPlan, match="11 blocks are more than the 10 of the context"):
        rows_with(join(2, *range(9)))


# A group of full attention, and one of the window.
BOTH = replace(LIMITS, windows=(None, 6))


def joined(*tables: BlockTable) -> Join:
    return replace(join(0), block_tables=tables)


FULL, SLID = BlockTable((0, 1, 2, 4)), BlockTable((7, 3), 2)


def both(*tables: BlockTable) -> Rows:
    return rows_with(joined(*(tables or (FULL, SLID))), BOTH)


def test_every_layer_group_has_a_table_of_its_own() -> None:
    rows = both()
    rows.apply(
        plan(
            2,
            appends=((0, 8, 1), (0, 9, 0)),
            replacements=((0, 2, 5, 1),),
            membership_checksum=MEMBERS,
        )
    )
    assert (rows.blocks(0), rows.blocks(0, 1)[2:]) == ([0, 1, 2, 4, 9], [5, 3, 8])
    inputs = rows.step_inputs(rows.steady_counts())
    assert inputs.tables().slot_mapping.tolist() == [[4 * 4 + 3], [3 * 4 + 3]]
    assert inputs.tables().slot_mapping.flags.c_contiguous
    assert [table[0, 2:4].tolist() for table in inputs.tables().block_tables] == [[2, 4], [5, 3]]


def test_what_a_device_is_told_is_where_the_tables_have_it() -> None:
    rows = both()
    second = plan(
        2, appends=((0, 9, 0),), replacements=((0, 2, 5, 1),), membership_checksum=MEMBERS
    )
    tables = np.zeros((2, BOTH.slots, BOTH.table_width), np.int64)
    first = rows.changes(plan(1, joins=(joined(FULL, SLID),)))
    rows.apply(second)
    for changes in (first, rows.changes(second)):
        tables.reshape(-1)[changes.places] = changes.blocks
    assert tables[0, 0, :5].tolist() == rows.blocks(0)
    assert tables[1, 0, 2:4].tolist() == rows.blocks(0, 1)[2:] == [5, 3]
    assert not tables[:, 1].any()
    assert BOTH.table_width % 4 == 0


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ((FULL,), "block_tables has 1, and the model has 2 layer groups"),
        ((FULL, SLID, SLID), "block_tables has 3, and the model has 2 layer groups"),
        ((BlockTable((0, 1, 2), 1), SLID), "layer group 0: 1 blocks are skipped, and only 0 are"),
        ((FULL, BlockTable((3,), 3)), "layer group 1: 3 blocks are skipped, and only 2 are"),
        ((FULL, BlockTable((7,), 2)), "layer group 1: 15 tokens done do not fit 3 blocks"),
        ((FULL, BlockTable((4, 3), 2)), "slot 0: a block is listed twice"),
    ],
)
def test_tables_that_do_not_fit_the_layer_groups(tables: tuple[BlockTable, ...], said: str) -> None:
    with pytest.raises(InvalidPlan, match=said):
        both(*tables)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"appends": ((0, 8, 2),)}, "layer group 2 is not below 2"),
        ({"replacements": ((0, 0, 8, 2),)}, "layer group 2 is not below 2"),
        ({"appends": ((0, 3, 1),)}, "slot 0 already has block 3"),
        ({"lease_steps": 3}, "up to token 18, but its 4 blocks hold 16"),
        ({"lease_steps": 3, "appends": ((0, 8, 0),)}, "up to token 18, but its 4 blocks hold 16"),
    ],
)
def test_changes_that_do_not_fit_the_layer_groups(changes: dict[str, Any], said: str) -> None:
    rows = both()
    with pytest.raises(InvalidPlan, match=said):
        rows.apply(plan(2, membership_checksum=MEMBERS, **changes))
