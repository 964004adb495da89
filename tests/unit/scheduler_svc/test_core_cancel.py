"""Cancelled or too late, wherever it is: seat and blocks are free, others notice nothing."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.commands import Cancel
from scheduler_svc.core.outcome import RequestOver
from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, spec


def waiting(cell: Cell) -> int:
    cell.submit(3, 40)
    cell.turn()
    return cell.submit(3, 5)


def unseen_by_any_worker(cell: Cell) -> int:
    cell.kill("w1", is_crash=False)
    sequence_id = cell.submit(3, 5)
    cell.join("w1", spec(slots=1, blocks=12, step_tokens=5))
    return sequence_id


def in_the_middle_of_its_prompt(cell: Cell) -> int:
    sequence_id = cell.submit(20, 5)
    cell.turns(2)
    assert not cell.outputs[sequence_id]
    assert 0 < cell.sequence(sequence_id).num_computed_tokens < 20
    return sequence_id


def decoding(cell: Cell) -> int:
    sequence_id = cell.submit(3, 30)
    cell.turns(4)
    assert cell.outputs[sequence_id]
    return sequence_id


def in_flight(cell: Cell) -> int:
    sequence_id = cell.submit(3, 30)
    cell.must_plan()
    return sequence_id


def retiring(cell: Cell) -> int:
    sequence_id = cell.submit(3, 1)
    cell.must_plan()
    cell.plan()
    assert sequence_id in cell.worker().retiring
    return sequence_id


def preempted(cell: Cell) -> int:
    cell.kill("w1", is_crash=False)
    cell.join("w1", spec(slots=2, block_size=1, blocks=12, step_tokens=40))
    cell.submit(2, 11)
    sequence_id = cell.submit(2, 11)
    while sequence_id in cell.running() or not cell.outputs[sequence_id]:
        cell.turn()
    assert sequence_id in cell.waiting()
    return sequence_id


STATES = [
    waiting,
    unseen_by_any_worker,
    in_the_middle_of_its_prompt,
    decoding,
    in_flight,
    retiring,
    preempted,
]


def small_cell() -> Cell:
    return Cell(spec(slots=1, blocks=12, step_tokens=5))


@pytest.mark.parametrize("state", STATES)
def test_cancelled(state: Callable[[Cell], int]) -> None:
    cell = small_cell()
    sequence_id = state(cell)
    ending, over = cell.cancel(sequence_id)
    assert isinstance(over, RequestOver)
    assert over.endings == (ending,)
    assert cell.reason(sequence_id) is Reason.CANCELLED
    assert over.outputs == (tuple(cell.outputs[sequence_id]),)
    assert sequence_id not in cell.running() + cell.waiting()
    other = cell.submit(3, 4)
    cell.finish()
    assert cell.reason(other) is Reason.LENGTH


@pytest.mark.parametrize("state", STATES)
def test_too_late(state: Callable[[Cell], int], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = small_cell()
    submit = cell.submit

    def submit_with_deadline(prompt: int, max_tokens: int) -> int:
        return submit(prompt, max_tokens, deadline_ns=1000 + cell.next_sequence_id)

    monkeypatch.setattr(cell, "submit", submit_with_deadline)
    sequence_id = state(cell)
    cell.now_ns = 1000 + sequence_id
    cell.expire()
    assert cell.reason(sequence_id) is Reason.DEADLINE_EXCEEDED
    assert cell.expire() == ()
    cell.now_ns = 0
    other = submit(3, 4)
    cell.finish()
    assert cell.reason(other) is Reason.LENGTH


def test_blocks_are_free_at_once() -> None:
    cell = small_cell()
    sequence_id = decoding(cell)
    assert cell.worker().kv.free_count < 12
    cell.cancel(sequence_id)
    assert cell.worker().kv.free_count == 12
    assert cell.must_plan().leaves == (0,)


def test_twice_unknown_or_ended_is_nothing() -> None:
    cell = small_cell()
    sequence_id = decoding(cell)
    cell.cancel(sequence_id)
    before = cell.snapshot()
    for _ in range(1000):
        assert cell.cancel(sequence_id) == ()
        assert cell.cancel(987654) == ()
    ended = cell.submit(3, 2)
    cell.finish()
    assert cell.cancel(ended) == ()
    assert len(before) > 0


def test_nothing_changes_when_nothing_is_cancelled() -> None:
    cell = small_cell()
    sequence_id = decoding(cell)
    before = cell.snapshot()
    assert cell.cancel(sequence_id, choice=1) == ()
    assert cell.cancel(sequence_id + 100) == ()
    assert cell.snapshot() == before


def test_a_waiting_one_does_not_take_the_running_one_along() -> None:
    cell = small_cell()
    running = cell.submit(3, 10)
    cell.turn()
    queued = cell.submit(3, 10)
    cell.cancel(queued)
    cell.finish()
    assert cell.reason(running) is Reason.LENGTH


def test_one_choice_of_several() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(5, 10, n=3)
    cell.turns(5)
    cell.cancel(sequence_id, choice=1)
    cell.finish()
    reasons = [cell.reason(sequence_id + choice) for choice in range(3)]
    assert reasons == [Reason.LENGTH, Reason.CANCELLED, Reason.LENGTH]
    assert len(cell.overs) == 1


def test_a_sibling_that_waits_for_the_first_choice() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(5, 10, n=3)
    cell.cancel(sequence_id, choice=2)
    cell.finish()
    assert cell.reason(sequence_id + 2) is Reason.CANCELLED
    assert cell.reason(sequence_id + 1) is Reason.LENGTH


def test_siblings_go_on_without_the_first_choice() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(5, 10, n=3)
    cell.cancel(sequence_id, choice=0)
    assert cell.waiting() == [sequence_id + 1, sequence_id + 2]
    cell.finish()
    assert cell.reason(sequence_id + 1) is cell.reason(sequence_id + 2) is Reason.LENGTH


def test_a_stop_string_cuts_the_output_to_where_it_was_found() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(5, 30)
    cell.turns(12)
    cell.apply(Cancel(sequence_id=sequence_id, reason=Reason.STOP, num_output_tokens=4))
    assert cell.endings[sequence_id].num_output_tokens == 4
    assert cell.overs[sequence_id].outputs == (tuple(cell.outputs[sequence_id][:4]),)
    cell.turns(3)


def test_what_was_in_flight_when_it_was_cancelled_is_dropped() -> None:
    cell = Cell(spec())
    kept, gone = cell.submit(3, 9), cell.submit(3, 9)
    cell.must_plan()
    result = cell.compute()
    cell.cancel(gone)
    assert len(result.tokens) == 2
    assert cell.commit(result).sequence_ids == [kept]
    cell.finish()


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    cell = Cell(spec())
    for _ in range(300):
        cell.submit(3, 1, deadline_ns=10**12)
        cell.finish()
    assert len(cell.scheduler._deadlines._heap) <= 4


def test_the_next_deadline_is_the_earliest() -> None:
    cell = Cell(spec())
    assert cell.scheduler.next_deadline_ns() is None
    late = cell.submit(3, 50, deadline_ns=500)
    early = cell.submit(3, 50, deadline_ns=100)
    assert cell.scheduler.next_deadline_ns() == 100
    cell.now_ns = 100
    cell.expire()
    assert (early in cell.endings, late in cell.endings) == (True, False)
    assert cell.scheduler.next_deadline_ns() == 500


def test_a_thousand_connect_and_leave_and_all_seats_are_there() -> None:
    cell = Cell(spec(slots=4))
    for _ in range(250):
        sequence_ids = [cell.submit(3, 50) for _ in range(4)]
        cell.turn()
        for sequence_id in sequence_ids:
            cell.cancel(sequence_id)
    for _ in range(4):
        cell.submit(3, 5)
    cell.turn()
    cell.finish()
