"""Blocks run short: who waits, who is preempted, who is refused; and nothing ever stands still."""

import random

import pytest

from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.planner import admit
from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, spec


def test_seven_blocks_for_four_plus_one_and_three_plus_one() -> None:
    cell = Cell(spec(block_size=4, blocks=7))
    first, second = cell.submit(16, 5), cell.submit(12, 5)
    cell.finish()
    assert cell.reason(first) is cell.reason(second) is Reason.LENGTH


def test_two_that_grow_past_the_pool_together_both_complete() -> None:
    cell = Cell(spec(block_size=4, blocks=8))
    first, second = cell.submit(4, 24), cell.submit(4, 24)
    plans = cell.finish()
    preempted = [sequence_id for plan in plans for sequence_id in plan.preempted]
    assert set(preempted) == {second}, "newest first"
    assert len(preempted) <= 3
    assert cell.overs[first].num_preemptions == 0
    assert cell.overs[second].num_preemptions == len(preempted)


def test_a_preempted_sequence_keeps_its_committed_tokens() -> None:
    cell = Cell(spec(block_size=4, blocks=8), lease=1)
    cell.submit(4, 24)
    second = cell.submit(4, 24)
    while second in cell.running() or not cell.outputs[second]:
        cell.turn()
    kept = len(cell.outputs[second])
    assert kept > 0
    while second not in cell.running():
        cell.turn()
    assert len(cell.sequence(second).tokens) >= 4 + kept
    cell.finish()


def test_nobody_joins_in_the_plan_that_preempts() -> None:
    cell = Cell(spec(block_size=1, blocks=12), lease=1, in_flight=1)
    cell.next_sequence_id = 10
    older, newer = cell.submit(2, 9), cell.submit(8, 4)
    cell.turn()
    cell.next_sequence_id = 1
    first = cell.submit(1, 2)
    next(iter(cell.scheduler.waiting)).num_preemptions = 3  # waits for its worst case
    plan = cell.must_plan()
    while not plan.preempted:
        assert cell.waiting() == [first]
        cell.step()
        plan = cell.must_plan()
    assert (plan.preempted, plan.joins) == ((newer,), ())
    assert cell.running() == [older]
    cell.step()
    assert cell.must_plan().admitted == (first,)
    cell.finish()


def test_preemptions_are_bounded_and_then_the_worst_case_is_reserved() -> None:
    cell = Cell(spec(block_size=1, blocks=40, slots=8), lease=1)
    for _ in range(12):
        cell.submit(2, 30)
    plans = cell.finish()
    assert any(plan.preempted for plan in plans)
    assert max(over.num_preemptions for over in cell.overs.values()) <= 3


def test_someone_preempted_too_often_is_not_the_next_victim() -> None:
    cell = Cell(spec(block_size=1, blocks=20), lease=1)
    first, second = cell.submit(3, 17), cell.submit(3, 17)
    cell.turns(3)
    assert cell.running() == [first, second]
    cell.sequence(second).num_preemptions = 3
    while len(cell.running()) == 2:
        cell.turn()
    assert cell.running() == [second]
    cell.finish()


def reserve(cell: Cell, *sequence_ids: int) -> None:
    """As if they had been preempted as often as may be."""
    for sequence in cell.scheduler.waiting:
        if sequence.sequence_id in sequence_ids:
            sequence.num_preemptions = 3


def test_one_preempted_too_often_does_not_wait_for_the_worst_case_of_the_others() -> None:
    """Twenty blocks, twelve for each at its longest: the other can be preempted for it."""
    cell = Cell(spec(block_size=1, blocks=20), lease=1)
    first, second = cell.submit(3, 10), cell.submit(3, 10)
    reserve(cell, second)
    cell.turns(2)
    assert cell.running() == [first, second]
    plans = cell.finish()
    assert [s for plan in plans for s in plan.preempted] == [first]
    assert cell.overs[second].num_preemptions == 3


def test_those_preempted_too_often_fit_together_at_their_longest() -> None:
    cell = Cell(spec(block_size=1, blocks=20), lease=1)
    first, second, third = (cell.submit(3, 10) for _ in range(3))
    reserve(cell, first, second)
    cell.turns(2)
    assert (cell.running(), cell.waiting()) == ([first, third], [second]), "and are passed over"
    assert {s for plan in cell.finish() for s in plan.preempted} <= {third}


def test_the_pool_is_used_while_one_preempted_too_often_waits() -> None:
    """Nobody says how long an answer may be, as when `max_tokens` is unset everywhere."""
    rng = random.Random(5)
    cell = Cell(spec(block_size=4, blocks=400, slots=16), lease=1)
    reserved = [cell.submit(30, 1500) for _ in range(2)]
    reserve(cell, *reserved)
    lengths = {cell.submit(30, 1500): rng.randint(60, 300) for _ in range(60)}
    used = []
    for _ in range(500):
        cell.turn()
        for sequence_id, length in lengths.items():
            if sequence_id not in cell.endings and len(cell.outputs[sequence_id]) >= length:
                cell.cancel(sequence_id)
        if reserved[1] in cell.waiting() and len(cell.scheduler.waiting) > 1:
            used.append(1 - cell.worker().kv.free_count / 400)
    assert len(used) > 100
    assert sum(used) / len(used) >= 0.9, sum(used) / len(used)


def test_the_preempted_come_back_before_those_who_came_later() -> None:
    cell = Cell(spec(block_size=4, blocks=8, slots=2), lease=1)
    cell.submit(4, 24)
    second = cell.submit(4, 24)
    third = cell.submit(4, 24)
    while second not in cell.waiting() or not cell.outputs[second]:
        cell.turn()
    assert cell.waiting() == [second, third]
    cell.finish()


def test_preempted_in_the_middle_of_its_prompt_and_resumed() -> None:
    cell = Cell(spec(block_size=1, blocks=28, step_tokens=5, slots=4), lease=1)
    first = cell.submit(2, 26)
    cell.turns(4)
    second = cell.submit(20, 5)
    preempted_at = None
    while second not in cell.endings:
        done = cell.sequence(second).num_computed_tokens if second in cell.running() else None
        if any(second in plan.preempted for plan in cell.turn()) and done is not None:
            preempted_at = preempted_at or done
    assert preempted_at is not None
    assert 0 < preempted_at < 20
    cell.finish()
    assert cell.reason(first) is Reason.LENGTH


def test_what_was_in_flight_for_a_preempted_sequence_never_happened() -> None:
    cell = Cell(spec(block_size=1, blocks=8), lease=1)
    first, second = cell.submit(2, 6), cell.submit(2, 6)
    cell.must_plan()
    plans: list[Plan] = []
    while not plans or not plans[-1].preempted:
        plans.append(cell.must_plan())
        result = cell.compute()
        if plans[-1].preempted:
            assert plans[-1].preempted == (second,)
            assert len(result.tokens) == 2
            committed = cell.commit(result)  # the plan before: both rows answered
            assert committed.sequence_ids == [first]
        else:
            cell.commit(result)
    cell.finish()


def test_a_spare_block_per_row_is_left_so_that_a_newcomer_does_not_preempt_at_once() -> None:
    cell = Cell(spec(block_size=4, blocks=4), lease=1)
    first = cell.submit(8, 8)
    cell.turn()
    second = cell.submit(8, 2)  # two blocks are free, one of them the first one's next
    cell.turn()
    assert (cell.running(), cell.waiting()) == ([first], [second])
    assert not any(plan.preempted for plan in cell.finish())


def test_a_request_that_can_never_fit_is_refused_naming_both_numbers() -> None:
    cell = Cell(spec(block_size=4, blocks=7), spec(block_size=4, blocks=5))
    fits, never = cell.submit(20, 9), cell.submit(20, 10)
    assert fits not in cell.endings
    assert cell.reason(never) is Reason.UNSERVED
    assert cell.endings[never].error == (
        "prompt and max_tokens need KV for 29 tokens, the largest worker holds 28"
    )
    cell.finish()


def test_a_context_limit_counts_like_a_small_pool() -> None:
    cell = Cell(spec(block_size=4, blocks=100, context=30))
    fits, never = cell.submit(20, 10), cell.submit(20, 11)
    assert "need KV for 30 tokens, the largest worker holds 29" in cell.endings[never].error
    cell.finish()
    assert cell.overs[fits].num_output_tokens == 10


def test_all_choices_that_can_never_fit_are_refused_at_once() -> None:
    cell = Cell(spec(block_size=4, blocks=2))
    sequence_id = cell.submit(20, 10, n=3)
    assert len(cell.overs[sequence_id].endings) == 3
    cell.finish()


def test_one_accepted_before_any_worker_waits_so_long_for_one_that_is_large_enough() -> None:
    cell = Cell()
    sequence_id, fits = cell.submit(20, 10, n=3), cell.submit(3, 2)
    cell.join("w1", spec(block_size=4, blocks=2))
    cell.turns(5)
    assert (cell.reason(fits), cell.waiting()[0]) == (Reason.LENGTH, sequence_id)
    cell.now_ns += cell.scheduler.config.misfit_wait_ns
    cell.expire()
    assert cell.endings[sequence_id + 2].error == (
        "prompt and max_tokens need KV for 29 tokens, the largest worker holds 8, "
        "and none that can came in time"
    )
    cell.finish()


def test_one_that_fits_another_worker_only_is_passed_by() -> None:
    cell = Cell(spec(block_size=4, blocks=2), spec(block_size=4, blocks=20, slots=1))
    first, large, small = cell.submit(30, 9), cell.submit(30, 9), cell.submit(3, 2)
    cell.must_plan("w2")
    cell.must_plan("w1")
    assert cell.running("w2") == [first]
    assert cell.running("w1") == [small]
    assert cell.waiting() == [large]
    cell.finish()


def test_a_full_queue_of_waiters_lets_a_freed_seat_go_to_the_first() -> None:
    cell = Cell(spec(slots=2))
    sequence_ids = [cell.submit(3, 4) for _ in range(12)]
    joined = [sequence_id for plan in cell.finish() for sequence_id in plan.admitted]
    assert joined == sequence_ids


def test_a_burst_with_a_long_cached_prefix_does_not_join_in_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each brings all its tokens with the plan, however few of them are to be computed."""
    monkeypatch.setattr(admit, "EFFORT_MAX", 250)
    cell = Cell(spec(slots=32), prefill_tokens=1)
    head = tuple(range(1, 101))
    cell.submit(head, 40)
    cell.turns(4)
    burst = [cell.submit((*head, one), 3) for one in range(1, 9)]
    joins = [len(plan.joins) for plan in cell.finish()]
    assert sum(joins) == len(burst)
    assert max(joins) == 3


def test_idle_then_a_burst() -> None:
    cell = Cell(spec())
    assert cell.turns(100) == []
    for _ in range(20):
        cell.submit(3, 4)
    assert cell.turn()
    assert len(cell.running()) == 8
    cell.finish()


def test_after_an_hour_of_nothing_a_burst_is_planned_as_the_first_was() -> None:
    cell = Cell(spec())

    def burst() -> tuple[object, int]:
        for _ in range(20):
            cell.submit(3, 4)
        plan = cell.must_plan()
        joins = [(join.slot, join.num_computed_tokens) for join in plan.joins]
        planned = (joins, plan.chunks, plan.lease_steps, plan.decode_rows, plan.blocks_free)
        cell.finish()
        return planned, cell.now_ns

    first, after_ns = burst()
    for _ in range(60):
        cell.now_ns += 60_000_000_000
        assert cell.expire() == ()
        assert cell.turn() == []
    idle_ns = cell.now_ns
    again, now_ns = burst()
    assert (again, now_ns) == (first, idle_ns + after_ns)


@pytest.mark.parametrize("blocks", [6, 7, 8, 11])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_tight_pools_never_stand_still(blocks: int, block_size: int) -> None:
    places = blocks * block_size
    cell = Cell(spec(block_size=block_size, blocks=blocks, slots=4))
    for index in range(12):
        prompt = 1 + index % (places // 2)
        cell.submit(prompt, min(1 + index * 5 % 7, places - prompt + 1))
    cell.finish()


def test_every_sequence_needs_a_block_and_none_is_free() -> None:
    cell = Cell(spec(block_size=1, blocks=4, slots=4), lease=1)
    for _ in range(4):
        cell.submit(1, 4)
    cell.finish()
