"""Cancelled or too late, wherever it is: seat and blocks are free, others notice nothing."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.types import Reason, RequestOver
from tests.support.cell import Cell, spec


def waiting(cell: Cell) -> int:
    cell.submit(3, 40)
    cell.turn()
    return cell.submit(3, 5)


def unseen_by_any_worker(cell: Cell) -> int:
    cell.kill("w1", is_crash=False)
    serial = cell.submit(3, 5)
    cell.join("w1", spec(slots=1, blocks=12, step_tokens=5))
    return serial


def in_the_middle_of_its_prompt(cell: Cell) -> int:
    serial = cell.submit(20, 5)
    cell.turns(2)
    assert not cell.outputs[serial]
    assert 0 < cell.sequence(serial).done < 20
    return serial


def decoding(cell: Cell) -> int:
    serial = cell.submit(3, 30)
    cell.turns(4)
    assert cell.outputs[serial]
    return serial


def in_flight(cell: Cell) -> int:
    serial = cell.submit(3, 30)
    cell.must_plan()
    return serial


def departed(cell: Cell) -> int:
    serial = cell.submit(3, 1)
    cell.must_plan()
    cell.plan()
    assert serial in cell.worker().departed
    return serial


def preempted(cell: Cell) -> int:
    cell.kill("w1", is_crash=False)
    cell.join("w1", spec(slots=2, block_size=1, blocks=12, step_tokens=30))
    cell.submit(2, 11)
    serial = cell.submit(2, 11)
    while serial in cell.running() or not cell.outputs[serial]:
        cell.turn()
    assert serial in cell.waiting()
    return serial


STATES = [
    waiting,
    unseen_by_any_worker,
    in_the_middle_of_its_prompt,
    decoding,
    in_flight,
    departed,
    preempted,
]


def small_cell() -> Cell:
    return Cell(spec(slots=1, blocks=12, step_tokens=5))


@pytest.mark.parametrize("state", STATES)
def test_cancelled(state: Callable[[Cell], int]) -> None:
    cell = small_cell()
    serial = state(cell)
    ending, over = cell.cancel(serial)
    assert isinstance(over, RequestOver)
    assert over.endings == (ending,)
    assert cell.reason(serial) is Reason.CANCELLED
    assert over.outputs == (tuple(cell.outputs[serial]),)
    assert serial not in cell.running() + cell.waiting()
    other = cell.submit(3, 4)
    cell.finish()
    assert cell.reason(other) is Reason.LENGTH


@pytest.mark.parametrize("state", STATES)
def test_too_late(state: Callable[[Cell], int], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = small_cell()
    submit = cell.submit

    def submit_with_deadline(prompt: int, max_tokens: int) -> int:
        return submit(prompt, max_tokens, deadline_ns=1000 + cell.serial_next)

    monkeypatch.setattr(cell, "submit", submit_with_deadline)
    serial = state(cell)
    cell.now_ns = 1000 + serial
    cell.expire()
    assert cell.reason(serial) is Reason.DEADLINE_EXCEEDED
    assert cell.expire() == []
    cell.now_ns = 0
    other = submit(3, 4)
    cell.finish()
    assert cell.reason(other) is Reason.LENGTH


def test_blocks_are_free_at_once() -> None:
    cell = small_cell()
    serial = decoding(cell)
    assert cell.worker().pool.free_count < 12
    cell.cancel(serial)
    assert cell.worker().pool.free_count == 12
    assert cell.must_plan().leaves == (0,)


def test_twice_unknown_or_ended_is_nothing() -> None:
    cell = small_cell()
    serial = decoding(cell)
    cell.cancel(serial)
    before = cell.snapshot()
    for _ in range(1000):
        assert cell.cancel(serial) == []
        assert cell.cancel(987654) == []
    ended = cell.submit(3, 2)
    cell.finish()
    assert cell.cancel(ended) == []
    assert len(before) > 0


def test_nothing_changes_when_nothing_is_cancelled() -> None:
    cell = small_cell()
    serial = decoding(cell)
    before = cell.snapshot()
    assert cell.cancel(serial, choice=1) == []
    assert cell.cancel(serial + 100) == []
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
    serial = cell.submit(5, 10, n=3)
    cell.turns(5)
    cell.cancel(serial, choice=1)
    cell.finish()
    reasons = [cell.reason(serial + choice) for choice in range(3)]
    assert reasons == [Reason.LENGTH, Reason.CANCELLED, Reason.LENGTH]
    assert len(cell.overs) == 1


def test_a_sibling_that_waits_for_the_first_choice() -> None:
    cell = Cell(spec())
    serial = cell.submit(5, 10, n=3)
    cell.cancel(serial, choice=2)
    cell.finish()
    assert cell.reason(serial + 2) is Reason.CANCELLED
    assert cell.reason(serial + 1) is Reason.LENGTH


def test_siblings_go_on_without_the_first_choice() -> None:
    cell = Cell(spec())
    serial = cell.submit(5, 10, n=3)
    cell.cancel(serial, choice=0)
    assert cell.waiting() == [serial + 1, serial + 2]
    cell.finish()
    assert cell.reason(serial + 1) is cell.reason(serial + 2) is Reason.LENGTH


def test_a_stop_string_cuts_the_output_to_where_it_was_found() -> None:
    cell = Cell(spec())
    serial = cell.submit(5, 30)
    cell.turns(12)
    events = cell.scheduler.cancel(serial, now_ns=0, reason=Reason.STOP, output_tokens=4)
    cell.hear(events)
    assert cell.endings[serial].output_tokens == 4
    assert cell.overs[serial].outputs == (tuple(cell.outputs[serial][:4]),)
    cell.turns(3)


def test_what_was_in_flight_when_it_was_cancelled_is_dropped() -> None:
    cell = Cell(spec())
    kept, gone = cell.submit(3, 9), cell.submit(3, 9)
    cell.must_plan()
    result = cell.compute()
    cell.cancel(gone)
    assert len(result.tokens) == 2
    assert cell.commit(result).serials == [kept]
    cell.finish()


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    cell = Cell(spec())
    for _ in range(300):
        cell.submit(3, 1, deadline_ns=10**12)
        cell.finish()
    assert len(cell.scheduler._deadlines) <= 2


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
        serials = [cell.submit(3, 50) for _ in range(4)]
        cell.turn()
        for serial in serials:
            cell.cancel(serial)
    for _ in range(4):
        cell.submit(3, 5)
    cell.turn()
    cell.finish()
