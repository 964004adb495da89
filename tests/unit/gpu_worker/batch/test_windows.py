"""Rows of a model whose layers all attend to a sliding window: blocks behind it are not theirs."""

from dataclasses import replace

import pytest

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import InvalidPlan, Join
from gpu_worker.batch.rows import Rows
from tests.support.mini_scheduler import checksum, plan, sampling

LIMITS = RowLimits(
    slots=2, context_tokens=40, step_tokens=8, block_size=4, block_count=10, vocab_size=50, window=6
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
        num_skipped_blocks=skipped,
        blocks=blocks,
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
    assert inputs.slot_mapping.tolist() == [3 * 4 + 3]
    assert inputs.block_tables[0, 2:].tolist() == [7, 3]
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
        rows_with(join(1, 7, 3, 5), replace(LIMITS, window=None))


def test_what_was_given_back_may_be_appended_anew_and_what_is_held_may_not() -> None:
    rows = rows_with(join(0, 1, 2, 7, 3))
    for block in (7, 3):
        with pytest.raises(InvalidPlan, match=f"slot 0 already has block {block}"):
            rows.apply(plan(2, appends=((0, block),), membership_checksum=MEMBERS))
    rows.apply(plan(2, appends=((0, 1), (0, 2)), membership_checksum=MEMBERS))
    assert rows.blocks(0) == [1, 2, 7, 3, 1, 2]


def test_a_table_is_no_longer_than_the_context_with_what_is_skipped() -> None:
    with pytest.raises(InvalidPlan, match="11 blocks are more than the 10 of the context"):
        rows_with(join(2, *range(9)))
