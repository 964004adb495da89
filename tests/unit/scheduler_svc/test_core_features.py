"""A request runs only where all that it needs can be done; and workers may come to do otherwise."""

import dataclasses

import pytest

from scheduler_svc.core.commands import MakePlan, WorkerChanged
from scheduler_svc.core.outcome import PassedOver, Why
from scheduler_svc.core.planner.plan_builder import PASSED_OVER_MAX
from scheduler_svc.core.types import Feature, Reason
from tests.support.cell import Cell, spec

LOGPROBS, PROMPT, LOGITS = Feature.LOGPROBS, Feature.PROMPT_LOGPROBS, Feature.LOGITS_PROCESSORS


def test_a_request_goes_to_the_worker_that_can_do_it() -> None:
    cell = Cell(spec(features=()), spec(features=[LOGPROBS, LOGITS], step_tokens=200))
    needy = [cell.submit(3, 9, needs=[LOGPROBS]) for _ in range(5)]
    plain = cell.submit(3, 9)
    assert cell.must_plan("w1").admitted == (plain,), "who needs nothing is not held up"
    assert cell.must_plan("w2").admitted == tuple(needy)
    cell.finish()


def test_why_a_worker_passes_it_over() -> None:
    cell = Cell(spec(features=()), spec())
    one = cell.submit(3, 9, needs=[LOGPROBS])
    other = cell.submit(3, 9)
    outcome = cell.apply(MakePlan(worker_id="w1"))
    assert outcome.plan is not None
    assert outcome.plan.admitted == (other,)
    assert PassedOver("place", Why.TOO_LARGE, one) in outcome.passed_over


def test_of_a_crowd_that_is_passed_over_some_are_named() -> None:
    cell = Cell(spec(features=()), spec())
    for _ in range(PASSED_OVER_MAX + 9):
        cell.submit(3, 9, needs=[LOGPROBS])
    cell.submit(3, 9)
    assert len(cell.apply(MakePlan(worker_id="w1")).passed_over) == PASSED_OVER_MAX


@pytest.mark.parametrize(
    ("features", "needs", "named"),
    [
        ([], [LOGPROBS], "logprobs"),
        ([LOGPROBS], [PROMPT, LOGPROBS], "logprobs, prompt_logprobs"),
        ([LOGPROBS, PROMPT], [LOGITS], "logits_processors"),
    ],
)
def test_what_no_worker_can_do_is_an_error_that_names_it(
    features: list[Feature], needs: list[Feature], named: str
) -> None:
    cell = Cell(spec(features=features))
    sequence_id = cell.submit(3, 9, needs=needs)
    assert cell.endings[sequence_id].error == (
        f"the request needs {named}, and no worker can do all of it"
    )
    assert cell.reason(sequence_id) is Reason.UNSERVED


def test_the_largest_worker_is_the_largest_that_can_do_it() -> None:
    cell = Cell(spec(features=(), blocks=1000), spec(blocks=2))
    sequence_id = cell.submit(3, 9, needs=[LOGITS])
    assert "the largest worker holds 8" in cell.endings[sequence_id].error


def test_it_waits_for_one_like_the_worker_that_was_lost() -> None:
    cell = Cell(spec(), spec(features=()))
    sequence_id = cell.submit(3, 20, needs=[LOGPROBS])
    cell.turns(3)
    cell.kill("w1")
    cell.turns(3)
    assert cell.waiting() == [sequence_id]
    cell.join("w3", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_and_ends_when_none_comes() -> None:
    cell = Cell(spec(), spec(features=()))
    sequence_id = cell.submit(3, 20, needs=[LOGPROBS])
    cell.turns(3)
    cell.kill("w1")
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    cell.expire()
    assert "needs logprobs, and no worker can do all of it, and none that can" in (
        cell.endings[sequence_id].error
    )
    assert cell.reason(sequence_id) is Reason.UNSERVED


def test_each_choice_of_one_that_no_worker_can_do_says_so() -> None:
    cell = Cell(spec(features=()))
    sequence_id = cell.submit(3, 9, n=3, needs=[PROMPT])
    reasons = [cell.reason(each) for each in range(sequence_id, sequence_id + 3)]
    assert reasons == [Reason.UNSERVED] * 3


# A worker that changes


def change(cell: Cell, worker_id: str = "w1", **changes: object) -> None:
    spec = dataclasses.replace(cell.worker(worker_id).spec, **changes)  # type: ignore[arg-type]
    cell.workers[worker_id].spec = spec
    cell.apply(WorkerChanged(worker_id=worker_id, spec=spec))


def test_a_worker_that_loses_a_feature_gives_those_away_who_need_it() -> None:
    cell = Cell(spec(), spec())
    ids = [cell.submit(3, 30, needs=[LOGPROBS] if index % 2 else ()) for index in range(8)]
    cell.turns(3)
    needy = {one for one in cell.running("w1") if one in ids[1::2]}
    assert needy
    stays = set(cell.running("w1")) - needy
    change(cell, features=frozenset())
    assert set(cell.running("w1")) == stays
    assert set(cell.waiting()) == needy
    cell.turns(2)
    assert needy <= set(cell.running("w2"))
    cell.finish()


def test_what_the_last_worker_cannot_do_any_more_waits_until_it_can_again() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(3, 30, needs=[LOGPROBS])
    cell.turns(3)
    change(cell, features=frozenset())
    cell.turns(3)
    assert cell.waiting() == [sequence_id]
    change(cell, features=frozenset(Feature))
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    change(cell, features=frozenset())
    cell.expire()
    assert cell.waiting() == [sequence_id], "it begins to wait anew"
    change(cell, features=frozenset(Feature))
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_a_smaller_budget_holds_from_the_next_plan_on() -> None:
    """Prompts that were promised more are given less, and none of them nothing."""
    cell = Cell(spec(slots=4, step_tokens=200, mixed_tokens=200), lease=1, in_flight=1)
    cell.submit(3, 60)
    cell.turns(2)
    for _ in range(3):
        cell.submit(120, 5)
    assert len(cell.must_plan().chunks) == 3
    cell.step()
    change(cell, step_tokens_max=20, mixed_tokens_max=9)
    plan = cell.must_plan()
    assert sum(count for _, count in plan.chunks) == 8
    assert all(count > 0 for _, count in plan.chunks)
    cell.finish()


def test_a_larger_budget_lets_more_prompts_in() -> None:
    cell = Cell(spec(slots=4, step_tokens=200, mixed_tokens=20), lease=1, in_flight=1)
    cell.submit(3, 60)
    cell.turns(2)
    for _ in range(2):
        cell.submit(120, 5)
    assert len(cell.must_plan().joins) == 1
    change(cell, mixed_tokens_max=None)
    cell.step()
    assert len(cell.must_plan().joins) == 1
    cell.finish()


def test_slots_and_blocks_do_not_change() -> None:
    cell = Cell(spec())
    with pytest.raises(AssertionError, match="another worker"):
        change(cell, slots_max=3)
