"""A step may give a row several tokens: one is certain, places are kept for the most."""

import dataclasses
from typing import Any

import pytest

from scheduler_svc.core.commands import Configured
from scheduler_svc.core.types import Config, Reason, ResultRejected, StepResult
from tests.support.cell import Cell, spec

MOST = 4


def decoding(max_tokens: int = 20, **settings: Any) -> Cell:
    """One row, sequence 1, whose prompt of three is computed and whose first token is there."""
    cell = Cell(spec(slot_tokens=MOST, block_size=1), **{"lease": 1, "in_flight": 1, **settings})
    cell.submit(3, max_tokens)
    cell.must_plan()
    assert len(cell.step().tokens) == 1, "a chunk samples one token"
    return cell


def given(cell: Cell, tokens: tuple[int, ...], **changes: Any) -> StepResult:
    """The next step's result, as if it had brought these to slot 0."""
    said = {"tokens": tokens, "token_counts": (len(tokens),), "finished": {}, **changes}
    return dataclasses.replace(cell.compute(), **said)


def test_a_step_that_brings_three_moves_the_counts_by_three() -> None:
    cell = decoding()
    cell.must_plan()
    one = cell.sequence(1)
    assert (one.num_computed_tokens, one.num_scheduled_tokens, one.num_tokens) == (3, 4, 5)
    step = cell.commit(given(cell, (5, 6, 7)))
    assert step.slots == (0, 0, 0)
    assert step.sequence_ids == [1, 1, 1]
    assert step.positions == [1, 2, 3]
    assert step.tokens == (5, 6, 7)
    assert (one.num_computed_tokens, one.num_scheduled_tokens, one.num_tokens) == (6, 6, 7)
    assert one.num_output_tokens == 4


def test_places_are_kept_for_the_most_of_every_step_that_may_happen() -> None:
    """Four tokens are known. A lease of four may bring 16; the last one's KV is not written."""
    cell = decoding(max_tokens=50)
    cell.apply(Configured(config=Config(lease_steps_max=4), policy="fcfs"))
    assert cell.must_plan().lease_steps == 4
    assert cell.sequence(1).kv.capacity == 4 + 3 * MOST + MOST - 1


def test_no_more_places_are_kept_than_it_will_ever_need() -> None:
    cell = decoding(max_tokens=6)
    cell.apply(Configured(config=Config(lease_steps_max=8), policy="fcfs"))
    cell.must_plan()
    assert cell.sequence(1).kv.capacity == 3 + 6 - 1


def test_a_row_that_decodes_from_its_first_step_has_places_for_the_most() -> None:
    """A choice that forks from the first has nothing left of the prompt but its last token."""
    cell = Cell(spec(slot_tokens=MOST, block_size=4), lease=1, in_flight=1)
    cell.submit(7, 9, n=2)
    cell.must_plan()
    cell.step()
    (join,) = cell.must_plan().joins
    assert (join.num_computed_tokens, len(join.tokens)) == (6, 7)
    assert len(join.block_tables[0][1]) * 4 >= 7 + MOST - 1
    cell.finish()


def test_a_mixed_step_counts_a_row_that_decodes_as_the_most() -> None:
    cell = Cell(
        spec(slot_tokens=MOST, slots=2, step_tokens=20, mixed_tokens=12), lease=1, in_flight=1
    )
    cell.submit(3, 30)
    cell.turn()
    cell.submit(40, 5)
    assert cell.must_plan().chunks == ((1, 12 - MOST),)
    cell.step()
    cell.finish()


def test_another_prompt_is_let_in_where_the_rows_that_decode_leave_it_its_minimum() -> None:
    """Of twelve tokens beside a row that decodes nine are left: too few for two times six."""
    cell = Cell(
        spec(slot_tokens=MOST, slots=3, step_tokens=20, mixed_tokens=13),
        lease=1,
        in_flight=1,
        prefill_tokens=6,
    )
    cell.submit(3, 30)
    cell.turn()
    cell.submit(60, 5)
    cell.turn()
    cell.submit(60, 5)
    assert cell.must_plan().joins == ()
    cell.step()
    cell.finish()


def test_who_fills_the_pool_at_its_longest_is_let_in() -> None:
    """Its first step could write beyond, if it had that many tokens to go."""
    cell = Cell(spec(slot_tokens=MOST, block_size=4, blocks=2))
    cell.submit(7, 2)
    assert cell.must_plan().joins
    cell.step()
    cell.finish()


@pytest.mark.parametrize(
    ("tokens", "finished"),
    [
        ((5, 6), Reason.STOP),
        ((5, 6, 7), Reason.LENGTH),
        ((5, 6, 7), Reason.STOP),
    ],
)
def test_an_end_within_a_step(tokens: tuple[int, ...], finished: Reason) -> None:
    """Four tokens are allowed and one is there."""
    cell = decoding(max_tokens=4)
    cell.must_plan()
    cell.commit(given(cell, tokens, finished={0: finished}))
    assert cell.reason(1) is finished
    assert cell.endings[1].num_output_tokens == 1 + len(tokens)
    assert cell.worker().kv.free_count == cell.worker().kv.block_count


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokens": (5, 6, 7)}, "has 4 output tokens and was reported running"),
        ({"tokens": (5, 6, 7, 8)}, "has 5 output tokens and was reported running"),
        ({"tokens": (5, 6, 7, 8), "finished": {0: Reason.STOP}}, "has 5 output tokens"),
        ({"tokens": (5, 6, 7, 8), "finished": {0: Reason.LENGTH}}, "has 5 output tokens"),
        (
            {"tokens": (5, 6), "finished": {0: Reason.LENGTH}},
            "has 3 output tokens and was reported",
        ),
        ({"tokens": (5,) * 5}, "given 5 tokens, not 1 to 4"),
        ({"tokens": (), "token_counts": (0,)}, "given 0 tokens, not 1 to 4"),
        ({"tokens": (5,), "token_counts": (2,)}, "without a token"),
        ({"tokens": (5, 6), "token_counts": (1,)}, "without a token"),
        ({"tokens": (5, 6), "token_counts": ()}, "without a token"),
        ({"tokens": (5, 6), "token_counts": (1, 1)}, "2 token counts"),
        ({"tokens": (5, 1000)}, "not in"),
    ],
)
def test_a_wrong_count_is_rejected_and_changes_nothing(changes: dict[str, Any], match: str) -> None:
    cell = decoding(max_tokens=4)
    cell.must_plan()
    result = given(cell, **changes)
    before = cell.snapshot()
    with pytest.raises(ResultRejected, match=match):
        cell.commit(result)
    assert cell.snapshot() == before


def test_a_chunk_samples_one_token() -> None:
    cell = Cell(spec(slot_tokens=MOST))
    cell.submit(3, 20)
    cell.must_plan()
    with pytest.raises(ResultRejected, match="given 2 tokens, not 1 to 1"):
        cell.commit(given(cell, (5, 6)))


def test_what_came_early_is_certain_for_the_plan_behind_it() -> None:
    """Two plans of a step each; the first brings all but one of what is left."""
    cell = decoding(max_tokens=6, in_flight=2)
    cell.must_plan()
    cell.must_plan()
    assert not cell.scheduler.workers["w1"].finishing
    cell.commit(given(cell, (5, 6, 7, 8)))
    assert cell.scheduler.workers["w1"].finishing
    assert cell.must_plan().leaves == (0,), "its slot goes to the next, its last token is in flight"
    cell.commit(given(cell, (9,), finished={0: Reason.LENGTH}))
    assert cell.outputs[1][1:] == [5, 6, 7, 8, 9]


def test_who_retired_may_end_before_its_last_plan() -> None:
    """Certain to finish with three plans in flight, it finishes with the first."""
    cell = decoding(max_tokens=4, in_flight=3)
    for _ in range(3):
        cell.must_plan()
    cell.commit(given(cell, (5, 6, 7), finished={0: Reason.LENGTH}))
    for _ in range(2):
        cell.commit(
            dataclasses.replace(cell.compute(), slots=(), tokens=(), token_counts=(), finished={})
        )
    assert cell.reason(1) is Reason.LENGTH


@pytest.mark.parametrize("lease", [1, 8])
def test_outputs_are_those_of_one_token_a_step_and_steps_are_fewer(lease: int) -> None:
    steps = []
    for most in (1, MOST):
        cell = Cell(spec(slot_tokens=most), lease=lease)
        for length in (1, 2, 9, 40):
            cell.submit(5, length)
        cell.finish()
        steps.append(cell.workers["w1"].steps_total)
    assert steps[1] < steps[0] * 2 / 3


def test_few_blocks_many_tokens_per_step() -> None:
    """Preempted again and again; what was drafted is forgotten with the rest."""
    cell = Cell(spec(slot_tokens=MOST, blocks=24, block_size=2, slots=4), lease=4)
    ids = [cell.submit(5, 20) for _ in range(6)]
    cell.finish()
    assert sum(cell.overs[one].num_preemptions for one in ids) > 0


def test_a_cancel_in_the_middle_leaves_nothing_behind() -> None:
    cell = Cell(spec(slot_tokens=MOST), lease=4)
    first, second = cell.submit(5, 40), cell.submit(5, 40)
    cell.turns(3)
    late = cell.compute()
    cell.cancel(first)
    assert set(cell.commit(late).sequence_ids) == {second}
    cell.finish()


def test_the_worker_dies_and_another_goes_on() -> None:
    cell = Cell(spec(slot_tokens=MOST), lease=4)
    cell.submit(5, 40)
    cell.turns(3)
    cell.kill("w1")
    cell.join("w2", spec(slot_tokens=1))
    cell.finish()
