"""Requests that no worker there can hold, or for which none is there: how long they wait."""

import pytest

from scheduler_svc.core.commands import Expire, MakePlan, Submit, WorkerJoined, WorkerLost
from scheduler_svc.core.outcome import Event, Finished
from scheduler_svc.core.scheduler import EXPIRED_MAX, Scheduler
from scheduler_svc.core.types import Reason, Request
from tests.support.cell import Cell, check_all, spec


def left_by_its_worker(*, deadline_ns: int | None = None) -> tuple[Cell, int]:
    """A request that runs on the large worker, which is lost; a small one is left."""
    cell = Cell(spec(block_size=4, blocks=20), spec(block_size=4, blocks=2))
    sequence_id = cell.submit(30, 9, deadline_ns=deadline_ns)
    cell.turn()
    cell.kill("w1")
    return cell, sequence_id


def test_one_that_fits_only_a_lost_worker_waits_so_long_and_ends_saying_why() -> None:
    cell, sequence_id = left_by_its_worker()
    wait_ns = cell.scheduler.config.misfit_wait_ns
    assert cell.scheduler.next_deadline_ns() == cell.now_ns + wait_ns
    cell.join("w3", spec(block_size=4, blocks=2))
    cell.now_ns += wait_ns - 1
    assert cell.expire() == ()
    cell.now_ns += 1
    cell.expire()
    assert cell.endings[sequence_id].error == (
        "prompt and max_tokens need KV for 38 tokens, the largest worker holds 8, "
        "and none that can came in time"
    )
    cell.finish()


def test_one_whose_lost_worker_is_back_goes_on() -> None:
    cell, sequence_id = left_by_its_worker()
    cell.join("w3", spec(block_size=4, blocks=20))
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    assert cell.expire() == ()
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_a_deadline_comes_before_the_end_of_the_wait() -> None:
    cell, sequence_id = left_by_its_worker(deadline_ns=50)
    cell.now_ns = 50
    cell.expire()
    assert cell.reason(sequence_id) is Reason.DEADLINE_EXCEEDED
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    assert cell.expire() == ()


def test_nobody_left_is_no_verdict_on_a_request() -> None:
    cell, sequence_id = left_by_its_worker()
    cell.kill("w2")
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    assert cell.expire() == ()
    cell.join("w3", spec(block_size=4, blocks=20))
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


@pytest.mark.parametrize("is_led_anew", [False, True], ids=["all are lost", "its leader is lost"])
def test_the_small_one_of_unlike_workers_is_back_first(is_led_anew: bool) -> None:
    cell = Cell(spec(block_size=4, blocks=2), spec(block_size=4, blocks=20))
    running, waiting = cell.submit(30, 9), cell.submit(30, 9)
    cell.turns(3)
    assert cell.outputs[running]
    if is_led_anew:
        cell.lead_anew()
    else:
        for worker_id in ["w1", "w2"]:
            cell.kill(worker_id, is_crash=None)
        for worker_id, blocks in [("w1", 2), ("w2", 20)]:
            cell.join(worker_id, spec(block_size=4, blocks=blocks))
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    assert cell.expire() == ()
    cell.finish()
    assert cell.reason(running) is cell.reason(waiting) is Reason.LENGTH


def test_who_comes_while_a_new_leader_knows_the_small_worker_only_waits_for_the_large() -> None:
    cell = Cell(spec(block_size=4, blocks=2), spec(block_size=4, blocks=20))
    del cell.workers["w2"]
    cell.lead_anew()
    served = cell.submit(30, 9)
    cell.now_ns += cell.scheduler.config.misfit_wait_ns - 1
    late = cell.submit(30, 9)
    assert cell.expire() == ()
    cell.join("w3", spec(block_size=4, blocks=20))
    cell.finish()
    assert cell.reason(served) is cell.reason(late) is Reason.LENGTH


def test_a_leader_that_has_led_for_a_while_refuses_at_once_what_no_worker_can_hold() -> None:
    cell = Cell(spec(block_size=4, blocks=2))
    cell.lead_anew()
    waits = cell.submit(30, 9)
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    refused = cell.submit(30, 9)
    assert refused in cell.endings
    cell.expire()
    assert cell.reason(waits) is cell.reason(refused) is Reason.UNSERVED
    assert cell.endings[waits].error.endswith(", and none that can came in time")


def test_while_no_worker_is_there_one_waits_as_long_as_it_may_and_ends_saying_so() -> None:
    cell = Cell()
    patient, bounded = cell.submit(4, 3), cell.submit(4, 3, worker_wait_ns=2_500_000_000)
    assert cell.scheduler.next_deadline_ns() == cell.now_ns + 2_500_000_000
    cell.now_ns += 2_499_999_999
    assert cell.expire() == ()
    cell.now_ns += 1
    cell.expire()
    assert cell.endings[bounded].error == (
        "no worker came within 2.5 s, which is as long as a request waits for one"
    )
    assert cell.reason(bounded) is Reason.UNSERVED
    cell.join("w1", spec())
    cell.finish()
    assert cell.reason(patient) is Reason.LENGTH


def test_a_worker_that_comes_in_time_ends_the_wait_and_the_loss_of_all_begins_another() -> None:
    cell = Cell()
    sequence_id = cell.submit(4, 9, worker_wait_ns=100)
    cell.now_ns += 99
    cell.join("w1", spec())
    cell.join("w2", spec())
    cell.now_ns += 100
    assert cell.expire() == ()
    cell.turn()
    cell.kill("w1")
    cell.now_ns += 100
    assert cell.expire() == (), "one is left"
    cell.kill("w2", is_crash=None)
    lost_ns = cell.now_ns
    cell.now_ns += 50
    # The verdict on a death comes later, and begins nothing anew.
    cell.apply(WorkerLost(worker_id="w2", is_crash=True, reason="killed"))
    cell.now_ns = lost_ns + 99
    assert cell.expire() == ()
    cell.now_ns += 1
    cell.expire()
    assert cell.reason(sequence_id) is Reason.UNSERVED


def test_workers_that_come_and_go_leave_no_deadlines_behind() -> None:
    """Each wait is long, and each of a thousand waits would have its own."""
    cell = Cell()
    wait_ns = 1_000_000
    both = cell.submit(4, 9, worker_wait_ns=wait_ns, deadline_ns=cell.now_ns + wait_ns)
    waiting = [cell.submit(4, 9, worker_wait_ns=wait_ns) for _ in range(20)]
    for _ in range(50):
        cell.join("w1", spec())
        cell.kill("w1", is_crash=False)
    assert len(cell.scheduler._deadlines._heap) == 1 + len(waiting) + 1
    cell.join("w1", spec())
    assert len(cell.scheduler._deadlines._heap) == 1
    cell.now_ns += wait_ns
    cell.expire()
    assert cell.reason(both) is Reason.DEADLINE_EXCEEDED
    cell.finish()
    assert {cell.reason(each) for each in waiting} == {Reason.LENGTH}


def test_a_worker_that_only_some_fit_comes_and_goes_and_leaves_none_either() -> None:
    """A wait each time for each of them, of which the heap never holds more than one."""
    cell = Cell(spec(block_size=4, blocks=2), spec(block_size=4, blocks=20))
    waiting = [cell.submit(30, 9, deadline_ns=10**15) for _ in range(20)]
    deadlines = cell.scheduler._deadlines
    for number in range(20):
        cell.kill(f"w{2 + number}", is_crash=False)
        assert len(deadlines._heap) == 2 * len(waiting)
        cell.join(f"w{3 + number}", spec(block_size=4, blocks=20))
        assert len(deadlines._heap) == len(waiting)
    cell.finish()
    assert {cell.reason(each) for each in waiting} == {Reason.LENGTH}


def test_a_scheduler_that_stood_still_ends_all_whose_time_is_over_in_turns_and_once() -> None:
    """A minute, with a thousand deadlines of ten seconds in it; a hundred others go on. Who runs
    has plans in between.
    """
    scheduler = Scheduler()
    scheduler.apply(WorkerJoined(worker_id="w1", spec=spec(slots=1)), 0)
    for number in range(1, 1101):
        late = number <= 1000
        one = Request(
            id=f"r{number}",
            sequence_id=number,
            prompt=(1,) * 9,
            max_tokens=9,
            arrived_ns=0,
            deadline_ns=10_000_000_000 if late else None,
        )
        scheduler.apply(Submit(request=one), 0)
    assert scheduler.apply(MakePlan(worker_id="w1"), 0).plan is not None
    events: list[Event] = []
    while (scheduler.next_deadline_ns() or 10**18) <= 60_000_000_000:
        some = scheduler.apply(Expire(), 60_000_000_000).events
        assert 0 < len(some) <= 2 * EXPIRED_MAX
        events += some
    ended = [each for each in events if isinstance(each, Finished)]
    assert [each.sequence_id for each in ended] == [*range(1, 1001)]
    assert {each.reason for each in ended} == {Reason.DEADLINE_EXCEEDED}
    assert len(events) == 2 * len(ended)
    assert scheduler.apply(Expire(), 60_000_000_000).events == ()
    assert (scheduler.next_deadline_ns(), scheduler.live_count) == (None, 100)
    check_all(scheduler)
    plan = scheduler.apply(MakePlan(worker_id="w1"), 60_000_000_000).plan
    assert plan is not None
    assert [join.sequence_id for join in plan.joins] == [1001]
