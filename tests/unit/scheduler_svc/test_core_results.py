"""A result that contradicts its plan is rejected whole: the core is as it was."""

import dataclasses
from typing import Any

import pytest

from scheduler_svc.core.types import Reason, ResultRejected, StepResult
from tests.support.cell import Cell, spec


def two_rows() -> tuple[Cell, StepResult]:
    """Two rows in decode, slots 0 and 1, and the honest result of their lease's second step."""
    cell = Cell(spec(vocab_size=1000), lease=4, in_flight=1)
    cell.submit(3, 20)
    cell.submit(3, 20)
    cell.must_plan()
    cell.step()
    result = cell.compute()
    assert (result.slots, result.step) == ((0, 1), 1)
    return cell, result


def rejected(cell: Cell, result: StepResult, match: str) -> None:
    before = cell.snapshot()
    with pytest.raises(ResultRejected, match=match):
        cell.commit(result)
    assert cell.snapshot() == before


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"plan_id": 0}, "out of sequence"),
        ({"plan_id": 99}, "out of sequence"),
        ({"step": 0}, "out of sequence"),
        ({"step": 7}, "out of sequence"),
        ({"slots": (0,), "tokens": (5,)}, "expected"),
        ({"slots": (0, 1, 2), "tokens": (5, 5, 5)}, "expected"),
        ({"slots": (0, 7), "tokens": (5, 5)}, "expected"),
        ({"slots": (0, -1), "tokens": (5, 5)}, "expected"),
        ({"slots": (), "tokens": ()}, "expected"),
        ({"slots": (0, 0), "tokens": (5, 5)}, "repeated"),
        ({"slots": (0, 1), "tokens": (5,)}, "without a token"),
        ({"tokens": (5, 1000)}, "not in \\[0, 1000\\)"),
        ({"tokens": (5, 2**63)}, "not in"),
        ({"tokens": (5, -1)}, "not in"),
        ({"errors": {0: "bad"}}, "both failed and sampled"),
        ({"errors": {5: "bad"}}, "expected"),
        ({"slots": (0,), "tokens": (5,), "errors": {5: "bad"}}, "expected"),
        ({"finished": {3: Reason.STOP}}, "ended unsampled"),
        ({"finished": {0: Reason.LENGTH}}, "has 2 output tokens and was reported length"),
        ({"finished": {0: Reason.CANCELLED}}, "stop or length only"),
        ({"finished": {0: Reason.ERROR}}, "stop or length only"),
    ],
)
def test_malformed(changes: dict[str, Any], match: str) -> None:
    cell, result = two_rows()
    rejected(cell, dataclasses.replace(result, **changes), match)
    cell.commit(result)
    cell.finish()


def test_the_same_result_twice() -> None:
    cell, result = two_rows()
    cell.commit(result)
    rejected(cell, result, "out of sequence")


def test_a_result_of_a_plan_that_a_newer_one_has_replaced() -> None:
    cell = Cell(spec(), lease=8)
    cell.submit(3, 50)
    cell.turns(2)
    while cell.plan() is None:
        old = cell.step()
    assert old.tokens
    results: list[StepResult] = []
    while not results or results[-1].step > 0:
        results.append(cell.compute())
        cell.commit(results[-1])
    stale = dataclasses.replace(results[-1], plan_id=results[-1].plan_id - 1, step=5)
    rejected(cell, stale, "out of sequence")


def test_a_plan_cannot_be_answered_before_the_one_before_it() -> None:
    cell = Cell(spec(), lease=1)
    cell.submit(3, 50)
    cell.must_plan()
    cell.must_plan()
    first, second = cell.compute(), cell.compute()
    rejected(cell, second, "out of sequence")
    cell.commit(first)
    cell.commit(second)


def test_a_row_that_does_not_end_at_its_last_token() -> None:
    cell = Cell(spec())
    cell.submit(3, 1)
    cell.must_plan()
    result = cell.compute()
    rejected(cell, dataclasses.replace(result, finished={}), "has 1 output tokens and was reported")
    cell.commit(result)


def test_a_row_that_does_not_end_at_its_last_token_of_a_lease() -> None:
    cell = Cell(spec(), lease=4, in_flight=1)
    cell.submit(3, 4)
    cell.submit(3, 20)
    assert cell.must_plan().lease_steps == 4
    for _ in range(3):
        cell.step()
    result = cell.compute()
    assert result.step == 3
    rejected(cell, dataclasses.replace(result, finished={}), "has 4 output tokens and was reported")
    cell.commit(result)


def test_the_last_token_may_be_a_stop_token() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(3, 1)
    cell.must_plan()
    cell.commit(dataclasses.replace(cell.compute(), finished={0: Reason.STOP}))
    assert cell.reason(sequence_id) is Reason.STOP


def test_a_row_that_ended_does_not_answer_again() -> None:
    cell, result = two_rows()
    cell.commit(dataclasses.replace(result, finished={1: Reason.STOP}))
    again = cell.compute()
    assert 1 in again.slots
    rejected(cell, again, "expected")


def test_a_row_that_ended_answers_no_plan_in_flight_either() -> None:
    cell = Cell(spec(), lease=1, in_flight=2)
    first, second = cell.submit(3, 20), cell.submit(3, 20)
    cell.must_plan()
    cell.must_plan()
    cell.commit(dataclasses.replace(cell.compute(), finished={1: Reason.STOP}))
    honest = cell.compute()
    rejected(cell, honest, "expected")
    committed = cell.commit(
        dataclasses.replace(honest, slots=honest.slots[:1], tokens=honest.tokens[:1])
    )
    assert committed.sequence_ids == [first]
    assert cell.reason(second) is Reason.STOP


def test_an_error_of_a_prompt_row_after_its_chunk() -> None:
    cell = Cell(spec(), lease=4, in_flight=1)
    cell.submit(3, 20)
    cell.submit(3, 20)
    cell.must_plan()
    first = cell.compute()
    assert first.step == 0
    assert set(dict(cell.worker().flights[0].chunks)) == {0, 1}
    cell.commit(dataclasses.replace(first, finished={1: Reason.STOP}))
    late = cell.compute()
    rejected(
        cell,
        dataclasses.replace(
            late, slots=(0,), tokens=late.tokens[:1], errors={1: (Reason.ERROR, "late")}
        ),
        "expected",
    )


def test_the_rows_of_a_plan_are_those_that_are_still_there() -> None:
    cell, result = two_rows()
    assert cell.worker().sequences_of(result.plan_id) == {0: 1, 1: 2}
    assert cell.worker().sequences_of(result.plan_id + 1) == {}
    cell.cancel(1)
    assert cell.worker().sequences_of(result.plan_id) == {1: 2}


def test_an_early_last_step_ends_the_lease() -> None:
    cell, result = two_rows()
    cell.commit(dataclasses.replace(result, is_last=True))
    assert not cell.worker().flights
    assert cell.plan() is not None


def test_an_error_may_come_with_the_tokens_of_the_others() -> None:
    cell, result = two_rows()
    committed = cell.commit(
        dataclasses.replace(
            result, slots=(1,), tokens=result.tokens[1:], errors={0: (Reason.ERROR, "bad")}
        )
    )
    assert committed.sequence_ids == [2]
    assert (cell.endings[1].reason, cell.endings[1].error) == (Reason.ERROR, "bad")


def test_what_was_computed_for_wishes_that_end_a_row_is_right_and_found_again() -> None:
    prompt = tuple(range(9))
    for reason, found in ((Reason.UNSATISFIABLE, 8), (Reason.ERROR, 0)):
        cell = Cell(spec(), lease=1, in_flight=1)
        cell.submit(prompt, 20)
        cell.turn()
        cell.must_plan()
        result = cell.compute()
        failed = dataclasses.replace(result, slots=(), tokens=(), errors={0: (reason, "no token")})
        cell.commit(failed)
        assert (cell.reason(1), cell.endings[1].error) == (reason, "no token")
        cell.submit(prompt, 20)
        (join,) = cell.must_plan().joins
        assert join.num_computed_tokens == found
