"""The small parts: moves, order, configuration, summaries."""

import itertools

import pytest

from scheduler_svc.core.kv import BlockTable
from scheduler_svc.core.policy.admission import AdmissionView, when_all_are_done, whenever_it_fits
from scheduler_svc.core.policy.presets import policy_of
from scheduler_svc.core.requests import MOVES, LiveRequest, Sequence, State
from scheduler_svc.core.types import Config, Request, Rules
from scheduler_svc.core.waiting import WaitingQueue
from tests.support.cell import Cell, spec


def sequence(sequence_id: int, queue: WaitingQueue | None = None) -> Sequence:
    queue = WaitingQueue(policy_of("fcfs", Rules(), Config()).order) if queue is None else queue
    request = Request(id="r", sequence_id=sequence_id, prompt=(1,), max_tokens=4, arrived_ns=0)
    return Sequence(
        live=LiveRequest(
            request=request, tenant=queue.add_request(request), deaths_max=2, prompt_logprobs_done=1
        ),
        choice=0,
        sequence_id=sequence_id,
        tokens=[1],
        num_prompt_tokens=1,
        tokens_max=5,
        kv=BlockTable(tokens=[1], tenant="", places_max=4),
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
    queue = WaitingQueue(policy_of("fcfs", Rules(), Config()).order)
    first, second, third = (sequence(sequence_id, queue) for sequence_id in (1, 2, 3))
    for one in (third, first, second):
        queue.add(one)
    assert list(queue) == [first, second, third]
    assert queue.remove(second)
    assert not queue.remove(second)
    assert not queue.remove(sequence(3, queue)), "same key, another sequence"
    assert not queue.remove(sequence(9, queue))
    assert (len(queue), list(queue)) == (2, [first, third])


def view(**changes: int) -> AdmissionView:
    values = {
        "running": 2,
        "joining": 1,
        "block_count": 20,
        "blocks_free": 7,
        "blocks_now": 4,
        "blocks_worst": 6,
        "worst_case_need": 1,
        "group_count": 1,
        "was_preempted": False,
        "is_reserved": False,
        "blocks_reserved": 0,
        "priority": 0,
        "steps_to_batch_end": 5,
    } | changes
    steps = values.pop("steps_to_batch_end")
    return AdmissionView(**values, steps_to_batch_end=lambda: steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("candidate", "fits"),
    [
        (view(), True),
        (view(blocks_free=6), False),
        (view(joining=2), False),
        (view(running=3), False),
        (view(blocks_now=5), False),
        (view(blocks_worst=100), True),
        (view(was_preempted=True), False),
        (view(was_preempted=True, blocks_free=10), True),
        (view(was_preempted=True, is_reserved=True, blocks_reserved=20), True),
        (view(was_preempted=True, is_reserved=True, blocks_reserved=21), False),
        (view(was_preempted=True, is_reserved=True, blocks_free=6), False),
    ],
)
def test_continuous_batching_leaves_one_block_per_row(candidate: AdmissionView, fits: bool) -> None:
    assert (whenever_it_fits(candidate) is None) is fits


@pytest.mark.parametrize(
    ("candidate", "fits"),
    [
        (view(), False),
        (view(running=0), True),
        (view(running=0, joining=5), True),
        (view(running=0, worst_case_need=2), False),
        (view(running=0, blocks_free=6), False),
    ],
)
def test_static_batching_joins_an_empty_batch_only(candidate: AdmissionView, fits: bool) -> None:
    assert (when_all_are_done(candidate) is None) is fits


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
        Config(**{name: 0})  # type: ignore[arg-type]


def test_a_request_says_what_is_wrong_with_it() -> None:
    with pytest.raises(AssertionError, match="no next token"):
        Request(id="r", sequence_id=1, prompt=(), max_tokens=1, arrived_ns=0)
    with pytest.raises(AssertionError, match="every choice has ended"):
        Request(id="r", sequence_id=1, prompt=(1,), max_tokens=1, arrived_ns=0, outputs=(None,))


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
    assert over.num_output_tokens == 6


def test_waiting_ends_with_the_first_seat_not_the_last() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(3, 6)
    cell.now_ns = 5
    cell.must_plan()
    cell.now_ns = 50
    cell.kill("w1", is_crash=False)
    cell.join("w2", spec())
    cell.finish()
    assert cell.overs[sequence_id].queue_ns == 5


def test_one_that_never_ran_waited_all_its_time() -> None:
    cell = Cell(spec(slots=1))
    cell.submit(3, 60)
    cell.turn()
    second = cell.submit(3, 6)
    cell.now_ns = 51
    cell.cancel(second)
    over = cell.overs[second]
    assert (over.queue_ns, over.prefill_ns, over.decode_ns) == (50, 0, 0)
