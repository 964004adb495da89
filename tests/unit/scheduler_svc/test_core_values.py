"""The small parts: moves, order, configuration, summaries."""

import itertools

import pytest

from scheduler_svc.core.policies import POLICIES, Seat, when_all_are_done, whenever_it_fits
from scheduler_svc.core.sequence import MOVES, Life, Sequence, State
from scheduler_svc.core.types import Config, Request
from scheduler_svc.core.waiting import WaitingQueue
from tests.support.cell import Cell, spec


def sequence(serial: int, queue: WaitingQueue | None = None) -> Sequence:
    queue = WaitingQueue(POLICIES["fcfs"]) if queue is None else queue
    request = Request(id="r", serial=serial, prompt=(1,), max_tokens=4, arrived_ns=0)
    return Sequence(
        life=Life(request=request, tenant=queue.welcome(request), deaths_max=2, explained=1),
        choice=0,
        serial=serial,
        tokens=[1],
        prompt_tokens=1,
        places_max=4,
    )


@pytest.mark.parametrize(("start", "end"), list(itertools.product(State, State)))
def test_a_sequence_moves_only_as_the_table_says(start: State, end: State) -> None:
    one = sequence(7)
    one.state = start
    if end in MOVES[start]:
        one.move(end)
        assert one.state is end
    else:
        with pytest.raises(AssertionError, match=f"7: {start} may not become {end}"):
            one.move(end)


def test_the_table_of_moves() -> None:
    table = {
        State.WAITING: {State.RUNNING, State.FINISHED},
        State.RUNNING: {State.PREEMPTED, State.FINISHED},
        State.PREEMPTED: {State.RUNNING, State.FINISHED},
        State.FINISHED: set(),
    }
    assert table == MOVES


def test_the_queue_keeps_its_order_and_removes_exactly_the_one() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    first, second, third = (sequence(serial, queue) for serial in (1, 2, 3))
    for one in (third, first, second):
        queue.add(one)
    assert list(queue) == [first, second, third]
    assert queue.remove(second)
    assert not queue.remove(second)
    assert not queue.remove(sequence(3, queue)), "same key, another sequence"
    assert not queue.remove(sequence(9, queue))
    assert (len(queue), list(queue)) == (2, [first, third])


def seat(**changes: int) -> Seat:
    values = {
        "running": 2,
        "joining": 1,
        "blocks_free": 7,
        "blocks_now": 4,
        "blocks_worst": 6,
        "blocks_owed": 1,
        "is_reserved": False,
    }
    return Seat(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidate", "fits"),
    [
        (seat(), True),
        (seat(blocks_free=6), False),
        (seat(joining=2), False),
        (seat(running=3), False),
        (seat(blocks_now=5), False),
        (seat(blocks_worst=100), True),
        (seat(is_reserved=True), True),
        (seat(is_reserved=True, blocks_owed=2), False),
        (seat(is_reserved=True, blocks_worst=7), False),
    ],
)
def test_continuous_batching_leaves_one_block_per_row(candidate: Seat, fits: bool) -> None:
    assert whenever_it_fits(candidate) is fits


@pytest.mark.parametrize(
    ("candidate", "fits"),
    [
        (seat(), False),
        (seat(running=0), True),
        (seat(running=0, joining=5), True),
        (seat(running=0, blocks_owed=2), False),
        (seat(running=0, blocks_free=6), False),
    ],
)
def test_static_batching_joins_an_empty_batch_only(candidate: Seat, fits: bool) -> None:
    assert when_all_are_done(candidate) is fits


@pytest.mark.parametrize(
    "name",
    [
        "lease_steps_max",
        "plans_in_flight_max",
        "prefill_tokens_min",
        "preemptions_max",
        "deaths_max",
    ],
)
def test_a_setting_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Config(**{name: 0})


def test_a_request_says_what_is_wrong_with_it() -> None:
    with pytest.raises(AssertionError, match="no next token"):
        Request(id="r", serial=1, prompt=(), max_tokens=1, arrived_ns=0)
    with pytest.raises(AssertionError, match="every choice has ended"):
        Request(id="r", serial=1, prompt=(1,), max_tokens=1, arrived_ns=0, outputs=(None,))


def test_summaries_fit_one_line() -> None:
    cell = Cell(spec(blocks=10, block_size=4))
    cell.submit(5, 9)
    waiting = next(iter(cell.scheduler.waiting))
    assert repr(waiting) == "<1 waiting 0/5>"
    assert repr(cell.scheduler.waiting) == "<WaitingQueue 1>"
    cell.must_plan()
    cell.step()
    assert repr(cell.scheduler) == "<Scheduler 0 waiting, 1 running, 1 live>"
    assert repr(cell.worker()) == (
        "<Worker w1 1 running, 1 in flight, <BlockPool 7/10 free, 1 cached>>"
    )


def test_times_of_a_request_add_up() -> None:
    cell = Cell(spec(slots=1))
    cell.submit(3, 6)
    second = cell.submit(3, 6)
    cell.finish()
    over = cell.overs[second]
    assert over.queue_ns > 0
    assert over.decode_ns > 0
    assert over.prefill_ns >= 0
    assert over.output_tokens == 6


def test_waiting_ends_with_the_first_seat_not_the_last() -> None:
    cell = Cell(spec())
    serial = cell.submit(3, 6)
    cell.now_ns = 5
    cell.must_plan()
    cell.now_ns = 50
    cell.kill("w1", is_crash=False)
    cell.join("w2", spec())
    cell.finish()
    assert cell.overs[serial].queue_ns == 5


def test_one_that_never_ran_waited_all_its_time() -> None:
    cell = Cell(spec(slots=1))
    cell.submit(3, 60)
    cell.turn()
    second = cell.submit(3, 6)
    cell.now_ns = 51
    cell.cancel(second)
    over = cell.overs[second]
    assert (over.queue_ns, over.prefill_ns, over.decode_ns) == (50, 0, 0)
