"""Prompts whose own log-probabilities are wanted: every position once, whatever happens."""

import dataclasses

import pytest

from scheduler_svc.core.types import Reason, ResultRejected
from tests.support.cell import Cell, spec


def positions(cell: Cell, sequence_id: int) -> list[int]:
    return cell.prompt_logprobs.get(sequence_id, [])


def test_every_position_but_the_first_is_explained_once() -> None:
    cell = Cell(spec(step_tokens=13, slots=4))
    sequence_id = cell.submit(30, 3, prompt_logprobs_from=1)
    cell.finish()
    assert positions(cell, sequence_id) == list(range(1, 30))


def test_a_prompt_of_one_token_has_nothing_to_explain() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(1, 3, prompt_logprobs_from=1)
    cell.finish()
    assert positions(cell, sequence_id) == []
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_nobody_else_explains_anything() -> None:
    cell = Cell(spec())
    cell.submit(30, 3)
    assert all(join.prompt_logprobs_from == 30 for join in cell.must_plan().joins)
    cell.finish()
    assert cell.prompt_logprobs == {}


def test_a_cached_prefix_is_computed_again_and_can_be_found_by_others() -> None:
    cell = Cell(spec(block_size=4))
    prompt = tuple(range(1, 18))
    first = cell.submit(prompt, 3)
    cell.finish()
    second = cell.submit(prompt, 3, prompt_logprobs_from=1)
    assert [join.num_computed_tokens for join in cell.must_plan().joins] == [0]
    cell.finish()
    third = cell.submit(prompt, 3)
    assert [join.num_computed_tokens for join in cell.must_plan().joins] == [16]
    cell.finish()
    assert [cell.overs[s].num_cached_tokens for s in (first, second, third)] == [0, 0, 16]
    assert positions(cell, second) == list(range(1, 17))


def test_a_resumed_prompt_goes_on_where_it_was_explained_to() -> None:
    """What is out may come from the cache again; what is not may not."""
    cell = Cell(spec(block_size=4, slots=2, step_tokens=12), in_flight=1)
    prompt = tuple(range(1, 31))
    sequence_id = cell.submit(prompt, 3, prompt_logprobs_from=1)
    cell.must_plan()
    cell.step()
    assert positions(cell, sequence_id) == list(range(1, 13))
    cell.kill("w1")
    cell.join("w2", spec(block_size=4, slots=2, step_tokens=40))
    (join,) = cell.must_plan("w2").joins
    assert (join.num_computed_tokens, join.prompt_logprobs_from) == (0, 13)
    cell.commit(cell.compute("w2"))
    assert positions(cell, sequence_id) == list(range(1, 30))
    cell.finish()


def test_a_resumed_prompt_finds_its_explained_blocks() -> None:
    """With 12 positions out, tokens [0, 12) need no logits any more: three blocks."""
    cell = Cell(spec(block_size=4, slots=2, step_tokens=66))
    prompt = tuple(range(1, 31))
    cell.submit(prompt, 1)
    cell.finish()
    sequence_id = cell.submit(prompt, 3, prompt_logprobs_from=13)
    assert [join.num_computed_tokens for join in cell.must_plan().joins] == [12]
    cell.finish()
    assert positions(cell, sequence_id) == list(range(13, 30))


def test_the_other_choices_fork_when_the_prompt_is_done() -> None:
    cell = Cell(spec(block_size=4, slots=4, step_tokens=12), in_flight=1)
    sequence_id = cell.submit(30, 3, n=3, prompt_logprobs_from=1)
    cell.turns(2)
    assert cell.running() == [sequence_id]
    cell.finish()
    assert positions(cell, sequence_id) == list(range(1, 30))
    assert cell.prompt_logprobs.keys() == {sequence_id}


def test_a_preempted_prompt_is_explained_once() -> None:
    cell = Cell(spec(block_size=1, blocks=40, slots=2, step_tokens=3), prefill_tokens=1)
    old = cell.submit(4, 30)
    cell.turns(5)
    sequence_id = cell.submit(24, 4, prompt_logprobs_from=1)
    cell.finish()
    assert cell.overs[sequence_id].num_preemptions > 0, "the pool is small enough"
    assert positions(cell, sequence_id) == list(range(1, 24))
    assert cell.reason(old) is Reason.LENGTH


def test_without_its_explanation_no_choice_goes_on() -> None:
    cell = Cell(spec(slots=4, step_tokens=12), in_flight=1)
    sequence_id = cell.submit(30, 3, n=3, prompt_logprobs_from=1)
    cell.bad_sequence_ids.add(sequence_id)
    cell.finish()
    assert [cell.reason(sequence_id + choice) for choice in range(3)] == [Reason.ERROR] * 3
    assert {cell.endings[sequence_id + choice].error for choice in range(3)} == {
        "logits are not finite"
    }


def test_a_choice_that_is_cancelled_while_the_prompt_is_computed_takes_the_others_along() -> None:
    cell = Cell(spec(slots=4, step_tokens=12), in_flight=1)
    sequence_id = cell.submit(30, 3, n=2, prompt_logprobs_from=1)
    cell.turn()
    cell.cancel(sequence_id, 0)
    assert [cell.reason(sequence_id + choice) for choice in range(2)] == [Reason.CANCELLED] * 2
    cell.finish()


def test_a_request_that_fits_nowhere_ends_once_per_choice() -> None:
    cell = Cell(spec(blocks=2, block_size=4))
    sequence_id = cell.submit(30, 3, n=2, prompt_logprobs_from=1)
    assert [cell.reason(sequence_id + choice) for choice in range(2)] == [Reason.UNSERVED] * 2


@pytest.mark.parametrize(
    "prompt_logprobs",
    [
        {},
        {0: range(1, 12)},
        {0: range(2, 13)},
        {0: range(1, 14)},
        {0: range(1, 13), 1: range(1, 2)},
    ],
)
def test_a_result_that_explains_more_or_less_is_rejected(prompt_logprobs: dict[int, range]) -> None:
    cell = Cell(spec(slots=2, step_tokens=12), in_flight=1)
    cell.submit(30, 3, prompt_logprobs_from=1)
    cell.must_plan()
    honest = cell.compute()
    assert honest.prompt_logprobs == {0: range(1, 13)}
    before = cell.snapshot()
    with pytest.raises(ResultRejected, match="prompt positions"):
        cell.commit(dataclasses.replace(honest, prompt_logprobs=prompt_logprobs))
    assert cell.snapshot() == before
    cell.commit(honest)
    cell.finish()


def test_a_later_step_explains_nothing() -> None:
    cell = Cell(spec(), in_flight=1)
    cell.submit(3, 20, prompt_logprobs_from=1)
    cell.must_plan()
    cell.step()
    late = cell.compute()
    with pytest.raises(ResultRejected, match="prompt positions"):
        cell.commit(dataclasses.replace(late, prompt_logprobs={0: range(1, 2)}))


def test_what_a_residency_that_is_over_explained_never_happened() -> None:
    cell = Cell(spec(slots=2, step_tokens=12), in_flight=2)
    sequence_id = cell.submit(30, 3, prompt_logprobs_from=1)
    cell.must_plan()
    cell.cancel(sequence_id)
    committed = cell.step()
    assert not committed.prompt_logprobs
    cell.finish()
