"""Workers come, die, drain and fail rows; choices fork. Nobody else notices."""

import pytest

from scheduler_svc.core.commands import Submit, WorkerLate
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, spec


def test_a_death_in_the_middle_of_decode_loses_no_token_and_repeats_none() -> None:
    cell = Cell(spec(slots=16), spec(slots=16))
    sequence_ids = [cell.submit(3 + index, 30) for index in range(16)]
    cell.turns(12)
    assert all(cell.outputs[sequence_id] for sequence_id in sequence_ids)
    cell.kill("w1")
    cell.finish()
    assert all(cell.reason(sequence_id) is Reason.LENGTH for sequence_id in sequence_ids)
    assert all(cell.overs[sequence_id].num_preemptions == 0 for sequence_id in sequence_ids)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_death_before_during_and_after_the_prompt(turns: int) -> None:
    cell = Cell(spec(step_tokens=12))
    sequence_id = cell.submit(10, 5)
    cell.must_plan()
    cell.turns(turns)
    cell.kill("w1")
    cell.join("w2", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_a_death_with_a_departed_row_whose_last_token_never_came() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(3, 1)
    cell.must_plan()
    cell.plan()
    cell.kill("w1")
    cell.join("w2", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_a_worker_that_says_goodbye_casts_no_suspicion() -> None:
    cell = Cell()
    sequence_ids = (cell.submit(3, 20), cell.submit(3, 20))
    for index in range(10):
        cell.join(f"w{index}", spec())
        assert cell.must_plan(f"w{index}").admitted == sequence_ids
        cell.kill(f"w{index}", is_crash=False)
    cell.join("last", spec())
    cell.finish()
    assert all(cell.reason(sequence_id) is Reason.LENGTH for sequence_id in sequence_ids)


def test_all_workers_gone_means_waiting_not_failing() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(3, 20)
    cell.turns(3)
    cell.kill("w1")
    assert cell.turns(50) == []
    assert cell.waiting() == [sequence_id]
    cell.join("w2", spec())
    cell.finish()


def test_a_row_error_fails_that_row_only() -> None:
    cell = Cell(spec())
    first, bad, third = (cell.submit(3, 9) for _ in range(3))
    cell.bad_sequence_ids.add(bad)
    cell.finish()
    assert cell.reason(bad) is Reason.ERROR
    assert cell.endings[bad].error == "logits are not finite"
    assert cell.reason(first) is cell.reason(third) is Reason.LENGTH


def test_a_row_error_in_the_middle_of_a_prompt() -> None:
    cell = Cell(spec(step_tokens=12))
    other, bad = cell.submit(3, 30), cell.submit(40, 9)
    cell.turns(3)
    cell.bad_sequence_ids.add(bad)
    cell.finish()
    assert cell.endings[bad].num_output_tokens == 0
    assert cell.reason(bad) is Reason.ERROR
    assert cell.reason(other) is Reason.LENGTH


def test_a_row_error_in_the_middle_of_a_lease() -> None:
    cell = Cell(spec())
    other, bad = cell.submit(3, 40), cell.submit(3, 40)
    cell.turns(6)
    cell.bad_sequence_ids.add(bad)
    cell.finish()
    assert cell.reason(bad) is Reason.ERROR
    assert cell.reason(other) is Reason.LENGTH


def test_scaling_up_and_down_under_load() -> None:
    cell = Cell(spec(slots=4))
    for _ in range(40):
        cell.submit(5, 12)
    cell.turns(5)
    for worker_id in ("w2", "w3", "w4"):
        cell.join(worker_id, spec(slots=4))
    cell.turns(5)
    assert all(len(cell.running(worker_id)) == 4 for worker_id in cell.workers)
    for worker_id in ("w2", "w3", "w4"):
        while not cell.drain(worker_id):
            cell.turn()
        cell.kill(worker_id, is_crash=False)
    cell.finish()


# Several choices of one prompt


def test_choices_fork_from_the_first_ones_prompt() -> None:
    cell = Cell(spec(block_size=4))
    sequence_id = cell.submit(10, 6, n=3)
    cell.must_plan()
    assert cell.running() == [sequence_id]
    cell.step()
    plan = cell.must_plan()
    (source,) = cell.sequence(sequence_id).kv.blocks
    assert plan.admitted == (sequence_id + 1, sequence_id + 2)
    for join, (copied, target) in zip(plan.joins, plan.copies, strict=True):
        assert join.num_computed_tokens == 9
        ((_, blocks),) = join.block_tables
        assert blocks[:2] == tuple(source[:2])
        assert (copied, target) == (source[2], blocks[2])
    assert plan.chunks == ()
    cell.finish()
    assert len({tuple(cell.outputs[sequence_id + choice]) for choice in range(3)}) == 3


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 6, 8, 9])
def test_choices_of_prompts_around_block_borders(prompt: int) -> None:
    cell = Cell(spec(block_size=4))
    sequence_id = cell.submit(prompt, 6, n=2)
    cell.finish()
    # With one token in its last block there is nothing to copy.
    over = cell.overs[sequence_id]
    assert [len(output) for output in over.outputs] == [6, 6]


def test_a_whole_number_of_blocks_but_one_token_needs_no_copy() -> None:
    cell = Cell(spec(block_size=4))
    sequence_id = cell.submit(9, 6, n=2)
    plans = cell.finish()
    assert not any(plan.copies for plan in plans)
    (join,) = (join for plan in plans for join in plan.joins if join.sequence_id == sequence_id + 1)
    assert join.num_computed_tokens == 8


def test_siblings_on_another_worker_compute_the_prompt_themselves() -> None:
    cell = Cell(spec(slots=1), spec(slots=1))
    sequence_id = cell.submit(10, 20, n=2)
    plans = cell.finish()
    (join,) = (join for plan in plans for join in plan.joins if join.sequence_id == sequence_id + 1)
    assert join.num_computed_tokens == 0
    assert not any(plan.copies for plan in plans)


def test_a_sibling_finds_the_prompt_though_the_twin_that_computed_it_first_is_gone() -> None:
    cell = Cell(spec(block_size=4, blocks=16, slots=2))
    prompt = tuple(range(1, 11))
    cell.next_sequence_id = 10
    twin, first = cell.submit(prompt, 30), cell.submit(prompt, 20, n=2)
    cell.turn()  # both compute the prompt, and the blocks found from now on are the twin's
    cell.next_sequence_id = 1
    large = cell.submit(40, 1)
    cell.cancel(twin)
    plans = cell.turns(4)  # the sibling gets the twin's seat, and the first holds its blocks
    assert large in cell.endings
    plans += cell.finish()
    (join,) = (join for plan in plans for join in plan.joins if join.sequence_id == first + 1)
    assert join.num_computed_tokens == 9
    assert [len(plan.copies) for plan in plans if plan.copies] == [1]


def test_a_sibling_copies_nothing_from_a_first_choice_that_starts_over() -> None:
    cell = Cell(spec(block_size=4, slots=1))
    sequence_id = cell.submit(3, 9, n=2)
    cell.turns(2)
    assert cell.waiting() == [sequence_id + 1]
    cell.kill("w1", is_crash=False)
    cell.join("w2", spec(block_size=4))
    plan = cell.must_plan("w2")
    assert plan.admitted == (sequence_id, sequence_id + 1)
    assert plan.copies == ()
    cell.finish()


def test_siblings_start_when_the_first_choice_fails() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(10, 6, n=2)
    cell.bad_sequence_ids.add(sequence_id)
    cell.finish()
    assert cell.reason(sequence_id) is Reason.ERROR
    assert cell.reason(sequence_id + 1) is Reason.LENGTH


# A new leader: requests come with what was committed


def test_a_recovered_request_goes_on_where_its_output_ended() -> None:
    whole = Cell(spec())
    sequence_id = whole.submit(5, 12)
    whole.finish()
    output = tuple(whole.outputs[sequence_id])
    cell = Cell(spec())
    cell.submit(5, 12, outputs=(output[:7],))
    cell.finish()
    assert tuple(cell.outputs[sequence_id]) == output


def test_a_recovered_request_remembers_which_choices_have_ended() -> None:
    whole = Cell(spec())
    sequence_id = whole.submit(5, 12, n=3)
    whole.finish()
    outputs = [tuple(whole.outputs[sequence_id + choice]) for choice in range(3)]
    cell = Cell(spec())
    cell.submit(5, 12, n=3, outputs=(None, outputs[1][:3], ()))
    cell.finish()
    assert [cell.outputs[sequence_id + choice] for choice in (1, 2)] == list(map(list, outputs[1:]))
    assert [ending.sequence_id for ending in cell.overs[sequence_id].endings] == [
        sequence_id + 1,
        sequence_id + 2,
    ]


def test_a_recovered_choice_with_output_does_not_fork_from_the_prompt() -> None:
    whole = Cell(spec())
    whole.submit(3, 4)
    sequence_id = whole.submit(10, 20, n=2)
    whole.finish()
    cell = Cell(spec(block_size=4, slots=2))
    cell.submit(3, 4)
    cell.submit(10, 20, n=2, outputs=((), tuple(whole.outputs[sequence_id + 1][:1])))
    plans = cell.finish()
    (join,) = (join for plan in plans for join in plan.joins if join.sequence_id == sequence_id + 1)
    assert (len(join.tokens), join.num_computed_tokens) == (11, 8)


def test_the_same_request_again_changes_nothing() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(5, 12)
    cell.turns(3)
    before = cell.snapshot()
    assert cell.apply(Submit(request=cell.requests[sequence_id])) == Outcome()
    assert cell.snapshot() == before
    cell.finish()


# A worker whose step is overdue


def test_the_other_takes_all_that_wait_while_one_hangs() -> None:
    cell = Cell(spec(slots=16), spec(slots=16))

    def turn_without_w1() -> None:
        while cell.plan("w2") is not None:
            pass
        cell.step("w2")

    for _ in range(10):
        cell.submit(3, 60)
    cell.turns(2)
    for _ in range(10):
        cell.submit(3, 60)
    for _ in range(4):
        turn_without_w1()
    assert len(cell.waiting()) == 5, "left for w1, which could take them"
    cell.apply(WorkerLate(worker_id="w1"))
    assert "w2" in cell.concerned
    for _ in range(4):
        turn_without_w1()
    assert cell.waiting() == []
    assert len(cell.running("w2")) == 15
    last = [cell.submit(3, 60) for _ in range(3)]
    assert cell.plan("w1") is None
    cell.step("w1")  # an answer: it is not late any more
    assert cell.must_plan("w1").admitted == tuple(last)
    cell.finish()


def test_a_worker_that_owes_nothing_is_not_late() -> None:
    cell = Cell(spec())
    cell.apply(WorkerLate(worker_id="w1"))
    sequence_id = cell.submit(3, 5)
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH
