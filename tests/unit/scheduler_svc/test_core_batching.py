"""Continuous batching: who is in the batch, how far everybody gets, how long a plan holds."""

import random

import pytest

from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.types import Config, Reason
from tests.support.cell import Cell, spec


def test_a_finished_seat_is_taken_at_once_the_textbook_example() -> None:
    cell = Cell(spec(slots=4))
    lengths = {cell.submit(3, length): length for length in (10, 20, 50, 100)}
    fifth = cell.submit(3, 5)
    cell.must_plan()
    cell.step()
    assert cell.running() == sorted(lengths)
    while fifth not in cell.running():
        assert cell.waiting() == [fifth]
        cell.turn()
    # The first one's last token is in flight: its seat and blocks went to the fifth before it came.
    assert len(cell.outputs[1]) in (8, 9, 10)
    cell.finish()
    assert [cell.endings[sequence_id].num_output_tokens for sequence_id in (1, 2, 3, 4, 5)] == [
        10,
        20,
        50,
        100,
        5,
    ]


def test_a_predicted_last_token_frees_the_seat_for_the_very_next_plan() -> None:
    cell = Cell(spec(slots=1, blocks=1, block_size=4))
    first, second = cell.submit(3, 2), cell.submit(3, 2)
    cell.must_plan()  # the prompt and the first token
    cell.must_plan()  # the second and last token
    cell.step()
    plan = cell.must_plan()
    assert first not in cell.endings
    assert (plan.leaves, plan.admitted) == ((0,), (second,))
    cell.finish()


def test_a_departed_row_keeps_its_blocks_while_nobody_asks() -> None:
    cell = Cell(spec(block_size=4))
    prompt = tuple(range(1, 10))
    cell.submit(prompt, 1)
    cell.finish()
    again = cell.submit(prompt, 1)
    cell.finish()
    assert cell.overs[again].num_cached_tokens == 8


def test_growth_takes_blocks_of_the_departed_before_it_preempts() -> None:
    # Three blocks: two rows, the second departs with one block just as the first needs its second.
    cell = Cell(spec(block_size=4, blocks=3, slots=2), lease=1)
    long, short = cell.submit(3, 9), cell.submit(5, 1)
    plans = cell.finish()
    assert not any(plan.preempted for plan in plans)
    assert cell.reason(long) is cell.reason(short) is Reason.LENGTH


def test_nothing_to_do_is_no_plan() -> None:
    cell = Cell(spec())
    assert cell.plan() is None
    cell.submit(3, 1)
    assert cell.plan() is not None
    cell.step()
    assert cell.must_plan().leaves == (0,)
    assert cell.plan() is None


def test_a_prompt_and_its_first_token_take_one_step() -> None:
    cell = Cell(spec())
    sequence_id = cell.submit(3, 1)
    plan = cell.must_plan()
    assert (plan.chunks, plan.chunk_tokens, plan.decode_rows) == (((0, 3),), 3, 0)
    assert cell.step().sequence_ids == [sequence_id]
    assert cell.reason(sequence_id) is Reason.LENGTH


# Leases


def decoding(cell: Cell) -> Plan:
    """The plan that carries one row into steady decode."""
    plan = cell.must_plan()
    while plan.lease_steps == 1:
        cell.step()
        plan = cell.must_plan()
    return plan


def test_the_lease_is_long_when_nobody_waits() -> None:
    cell = Cell(spec(), lease=8)
    cell.submit(3, 50)
    assert decoding(cell).lease_steps == 8


def test_the_lease_is_renewed_at_half_and_not_before() -> None:
    cell = Cell(spec(), lease=8)
    cell.submit(3, 50)
    decoding(cell)
    steps = 0
    while cell.plan() is None:
        cell.step()
        steps += 1
    assert steps == 4


def test_the_lease_is_long_while_nobody_who_waits_could_start() -> None:
    cell = Cell(spec(slots=1), lease=8)
    cell.submit(3, 60)
    cell.submit(3, 30)
    plans = cell.turns(40)
    assert max(plan.lease_steps for plan in plans) == 8
    assert len(plans) <= 16
    cell.finish()


def test_the_last_plans_before_an_end_are_of_one_step_while_somebody_waits() -> None:
    cell = Cell(spec(slots=1), lease=8, in_flight=2)
    first, second = cell.submit(3, 30), cell.submit(3, 30)
    plans: list[Plan] = []
    while not plans or plans[-1].admitted != (second,):
        if (plan := cell.plan()) is not None:
            plans.append(plan)
        else:
            cell.step()
    assert [plan.lease_steps for plan in plans[-3:-1]] == [1, 1]
    assert first not in cell.endings, "its last token is in flight"
    cell.finish()


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_slots_are_refilled_as_soon_under_long_leases_as_under_single_steps(
    seed: int, in_flight: int
) -> None:
    steps, plans = {}, {}
    for lease in (1, 8):
        rng = random.Random(seed)
        cell = Cell(spec(slots=4), lease=lease, in_flight=in_flight)
        for _ in range(30):
            cell.submit(3, rng.randint(2, 60))
        plans[lease] = len(cell.finish())
        steps[lease] = cell.workers["w1"].steps_total
    assert steps[8] == steps[1]
    assert plans[8] < 0.75 * plans[1]


def test_one_that_could_start_ends_a_long_lease_at_the_next_step() -> None:
    """A slot is free, and only blocks were missing: a cancel brings them."""
    cell = Cell(spec(slots=4, blocks=24), lease=8)
    first, second = cell.submit(40, 20), cell.submit(30, 20)
    cell.turns(2)
    third = cell.submit(40, 3)
    cell.turns(3)
    assert (cell.running(), cell.waiting()) == ([first, second], [third])
    cell.cancel(first)
    assert cell.must_plan().admitted == (third,)
    cell.finish()


def test_the_lease_is_one_while_a_prompt_is_in_chunks() -> None:
    cell = Cell(spec(slots=2, step_tokens=6), lease=8, in_flight=1)
    cell.submit(20, 30)
    while not cell.outputs[1]:
        assert cell.must_plan().lease_steps == (1 if cell.sequence(1).gap > 1 else 8)
        cell.step()
    cell.finish()


def test_the_lease_is_as_long_as_the_pool_can_carry() -> None:
    cell = Cell(spec(block_size=1, blocks=8, slots=2), lease=8)
    cell.submit(2, 4)
    cell.submit(2, 4)
    assert cell.must_plan().lease_steps == 2
    assert cell.worker().kv.free_count == 2
    cell.finish()


def test_a_newcomer_ends_a_long_lease_at_the_next_step() -> None:
    cell = Cell(spec(), lease=8)
    cell.submit(3, 50)
    decoding(cell)
    cell.step()
    newcomer = cell.submit(3, 5)
    assert cell.must_plan().admitted == (newcomer,)
    cell.finish()


def test_a_lease_has_blocks_for_every_step_of_it() -> None:
    cell = Cell(spec(block_size=1), lease=8)
    cell.submit(3, 50)
    plan = decoding(cell)
    # Places for the prompt are in the join; eight steps write up to eight more.
    assert len(plan.appends) == 7 + (len(plan.joins) == 0)
    cell.finish()


def test_no_block_is_granted_beyond_the_longest_a_sequence_can_become() -> None:
    cell = Cell(spec(block_size=1, blocks=7), lease=8)
    cell.submit(3, 5)  # seven places: the last token's KV is never needed
    cell.turn()
    assert cell.worker().kv.free_count == 0
    cell.finish()


def test_at_most_so_many_plans_wait_for_their_first_answer() -> None:
    for limit in (1, 2, 3):
        cell = Cell(spec(step_tokens=9), in_flight=limit)
        cell.submit(100)
        plans = 0
        while cell.plan() is not None:
            plans += 1
        assert plans == limit


# Chunks and budget


def test_no_step_computes_more_than_its_budget() -> None:
    cell = Cell(spec(slots=4, step_tokens=7), prefill_tokens=1)
    for length in (20, 9, 3, 30):
        cell.submit(length)
    for plan in cell.finish():
        assert plan.chunk_tokens + plan.decode_rows <= 7


def test_prompts_take_less_of_a_step_in_which_somebody_decodes() -> None:
    cell = Cell(spec(slots=4, step_tokens=40, mixed_tokens=12), prefill_tokens=2, in_flight=1)
    cell.submit(70, 3)
    assert cell.must_plan().chunk_tokens == 40
    decoding = cell.submit(2, 60)
    cell.turns(3)
    assert cell.outputs[decoding]
    cell.submit(90, 2)
    mixed = [plan for plan in cell.finish() if plan.decode_rows and plan.chunks]
    assert mixed
    assert all(plan.chunk_tokens + plan.decode_rows <= 12 for plan in mixed)
    assert max(plan.chunk_tokens + plan.decode_rows for plan in mixed) == 12


def test_a_promise_to_a_prefill_holds_when_another_begins_to_decode() -> None:
    cell = Cell(spec(slots=8, step_tokens=80, mixed_tokens=24), prefill_tokens=8)
    for length in (1, 50, 50, 50, 50):
        cell.submit(length, 30)
    for plan in cell.finish():
        assert len(plan.chunks) <= 3


def test_shorts_are_not_serialised_behind_three_long_prompts() -> None:
    cell = Cell(spec(slots=8, step_tokens=72, blocks=4000), prefill_tokens=4)
    for _ in range(3):
        cell.submit(1000, 2)
    shorts = [cell.submit(4, 2) for _ in range(3)]
    cell.turns(4)
    assert all(short in cell.endings for short in shorts)
    assert not {1, 2, 3} & cell.endings.keys()
    cell.finish()


def test_the_two_sided_guarantee() -> None:
    """Beside a long prompt every decode advances every step, and the prompt gets its minimum."""
    cell = Cell(spec(slots=8, step_tokens=20), prefill_tokens=12, lease=1)
    decodes = [cell.submit(2, 60) for _ in range(6)]
    cell.turns(10)
    long = cell.submit(200, 2)
    before = {sequence_id: len(cell.outputs[sequence_id]) for sequence_id in decodes}
    plans = [plan for plan in cell.turns(12) if plan.chunks]
    prefilling = [plan for plan in plans if long in cell.running()]
    assert len(prefilling) >= 10
    assert all(plan.chunk_tokens >= 12 and plan.decode_rows == 6 for plan in prefilling)
    assert all(
        len(cell.outputs[sequence_id]) - before[sequence_id] >= 11 for sequence_id in decodes
    )
    cell.finish()


def test_every_prefill_gets_its_minimum_of_every_step() -> None:
    cell = Cell(spec(slots=8, step_tokens=40), prefill_tokens=8)
    for _ in range(8):
        cell.submit(100, 2)
    left: dict[int, int] = {}
    for plan in cell.finish():
        left |= {join.slot: 100 for join in plan.joins}
        assert {slot for slot, tokens in left.items() if tokens} == set(dict(plan.chunks))
        for slot, count in plan.chunks:
            assert count >= min(8, left[slot])
            left[slot] -= count
        assert len(plan.chunks) <= 5


def test_a_prefill_that_cannot_be_promised_its_minimum_waits() -> None:
    cell = Cell(spec(slots=8, step_tokens=20), prefill_tokens=10)
    first, second, third = (cell.submit(100, 2) for _ in range(3))
    cell.must_plan()
    assert cell.running() == [first, second]
    assert cell.waiting() == [third]
    cell.finish()


def test_a_minimum_beyond_the_budget_means_one_prefill_at_a_time() -> None:
    cell = Cell(spec(slots=2, step_tokens=5), prefill_tokens=1000)
    first, second = cell.submit(30, 2), cell.submit(30, 2)
    cell.must_plan()
    assert (cell.running(), cell.waiting()) == ([first], [second])
    cell.finish()


def test_a_long_prompt_takes_half_and_the_next_half_of_the_rest() -> None:
    cell = Cell(spec(slots=3, step_tokens=64), prefill_tokens=4)
    for _ in range(3):
        cell.submit(100, 2)
    assert [count for _, count in cell.must_plan().chunks] == [32, 16, 16]
    cell.finish()


def test_the_last_prefill_takes_all_that_is_left() -> None:
    cell = Cell(spec(slots=2, step_tokens=64), prefill_tokens=4)
    cell.submit(100, 2)
    assert cell.must_plan().chunks == ((0, 64),)
    cell.finish()


def test_a_budget_as_small_as_it_may_be_still_moves_everybody() -> None:
    cell = Cell(spec(slots=4, step_tokens=5), prefill_tokens=16)
    for _ in range(9):
        cell.submit(7, 6)
    cell.finish()


def test_a_worker_without_room_for_a_prefill_beside_its_decodes_is_refused() -> None:
    with pytest.raises(AssertionError, match="leave room for a prefill"):
        spec(slots=4, step_tokens=4)
    with pytest.raises(AssertionError, match="leave room for a prefill"):
        spec(slots=4, step_tokens=9, mixed_tokens=4)
    with pytest.raises(AssertionError, match="leave room for a prefill"):
        spec(slots=4, step_tokens=9, mixed_tokens=10)


# Several workers


def test_those_who_wait_are_shared_evenly() -> None:
    cell = Cell(spec(slots=8), spec(slots=8))
    for _ in range(6):
        cell.submit(3, 20)
    cell.must_plan("w1")
    assert len(cell.running("w1")) == 3
    cell.must_plan("w2")
    assert len(cell.running("w2")) == 3
    cell.finish()


def test_an_idle_worker_gets_the_next_one() -> None:
    cell = Cell(spec(), spec())
    cell.submit(3, 100)
    cell.turns(2)
    assert cell.running("w1") == [1]
    second = cell.submit(3, 100)
    assert cell.plan("w1") is None
    assert cell.must_plan("w2").admitted == (second,)
    cell.finish()


def test_nobody_waits_for_another_worker_that_is_full() -> None:
    cell = Cell(spec(slots=1), spec(slots=8))
    for _ in range(9):
        cell.submit(3, 100)
    cell.turns(4)
    assert len(cell.running("w2")) == 8
    cell.finish()


def test_nobody_waits_for_another_worker_that_is_too_small() -> None:
    cell = Cell(spec(blocks=2, block_size=4), spec(slots=8, block_size=4))
    for _ in range(8):
        cell.submit(20, 20)
    cell.turns(2)
    assert len(cell.running("w2")) == 8
    cell.finish()


def test_nobody_waits_for_another_worker_that_is_out_of_blocks() -> None:
    cell = Cell(spec(slots=8, blocks=10), spec(slots=8))
    cell.submit(30, 8)
    cell.turn()
    for _ in range(6):
        cell.submit(9, 4)
    cell.turns(2)
    assert cell.running("w2") == [2, 3, 4, 5, 6, 7]
    cell.finish()


def test_a_draining_worker_gets_nothing_new() -> None:
    cell = Cell(spec())
    first = cell.submit(3, 5)
    cell.turn()
    assert cell.drain("w1") is False
    second = cell.submit(3, 5)
    while first not in cell.endings:
        cell.turn()
    assert cell.drain("w1") is True
    assert cell.waiting() == [second]
    cell.join("w2", spec())
    cell.finish()


# Priority


def test_the_priority_policy_seats_the_more_urgent_first() -> None:
    cell = Cell(spec(slots=1), policy="priority")
    running = cell.submit(3, 9)
    cell.turns(2)
    plain, urgent = cell.submit(3, 9), cell.submit(3, 9, priority=1)
    assert cell.running() == [running]
    assert cell.waiting() == [urgent, plain]
    cell.finish()


def test_a_steady_stream_of_urgent_requests_starves_nobody() -> None:
    cell = Cell(spec(slots=1), policy="priority")
    cell.submit(3, 5)
    patient = cell.submit(3, 5)
    for _ in range(40):
        cell.submit(3, 5, priority=1)
        cell.now_ns += Config().priority_worth_ns // 10
        cell.turns(6)
        if patient in cell.endings:
            break
    assert patient in cell.endings
    cell.finish()


def test_without_priorities_the_priority_policy_is_first_come_first_served() -> None:
    plans = {}
    for policy in ("fcfs", "priority"):
        cell = Cell(spec(slots=3, blocks=12), policy=policy)
        for length in (9, 2, 30, 4) * 4:
            cell.submit(length, 6)
        plans[policy] = [plan.admitted for plan in cell.finish()]
    assert plans["fcfs"] == plans["priority"]


# Static batching, for comparison


def test_the_static_policy_fills_a_batch_and_runs_it_out() -> None:
    cell = Cell(spec(slots=2), policy="static")
    short, long, third = cell.submit(3, 2), cell.submit(3, 20), cell.submit(3, 2)
    cell.turns(8)
    assert short in cell.endings
    assert (cell.running(), cell.waiting()) == ([long], [third])
    cell.finish()


def test_the_static_policy_reserves_the_worst_case() -> None:
    cell = Cell(spec(block_size=1, blocks=10), policy="static")
    first, second = cell.submit(2, 5), cell.submit(2, 5)
    plans = cell.finish()
    assert not any(plan.preempted for plan in plans)
    assert [plan.admitted for plan in plans if plan.joins] == [(first,), (second,)]


def test_the_static_policy_needs_many_more_steps_on_uneven_lengths() -> None:
    steps = {}
    for policy in ("fcfs", "static"):
        cell = Cell(spec(slots=4), policy=policy, lease=1)
        for length in (2, 2, 2, 40) * 4:
            cell.submit(3, length)
        cell.finish()
        steps[policy] = cell.workers["w1"].steps_total
    assert steps["fcfs"] < 0.6 * steps["static"]
