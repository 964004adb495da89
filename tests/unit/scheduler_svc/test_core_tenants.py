"""Tenants: a bound on what each has running, and turns by what each has been served."""

import random

import pytest

from scheduler_svc.core.commands import MakePlan
from scheduler_svc.core.outcome import PassedOver, Plan, Why
from scheduler_svc.core.policy.presets import policy_of
from scheduler_svc.core.types import Config, Feature, Request, Rules
from scheduler_svc.core.waiting import IDLE_TENANTS_MAX, WaitingQueue
from tests.support.cell import Cell, spec


def test_a_bound_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="tenant_tokens_max must be at least 1"):
        Config(tenant_tokens_max=0)


# The bound


def test_what_would_exceed_the_bound_waits_until_a_row_leaves() -> None:
    cell = Cell(spec(), tenant_tokens=16)
    first, second, third = (cell.submit(3, 5, tenant="acme") for _ in range(3))
    cell.turn()
    assert (cell.running(), cell.waiting()) == ([first, second], [third])
    assert cell.scheduler.waiting.tenants["acme"].tokens_running == 16
    cell.finish()
    assert cell.overs[third].queue_ns > 0


def test_one_alone_may_always_run() -> None:
    cell = Cell(spec(), tenant_tokens=1)
    first, second = cell.submit(3, 5, tenant="acme"), cell.submit(3, 5, tenant="acme")
    while first not in cell.endings:
        cell.turn()
        assert len(cell.running()) <= 1
    cell.finish()
    assert cell.reason(second) is cell.reason(first)


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_nobody_waits_behind_a_full_tenant(policy: str) -> None:
    cell = Cell(spec(), policy=policy, tenant_tokens=8)
    flood = [cell.submit(3, 5, tenant="acme") for _ in range(20)]
    other = cell.submit(3, 5, tenant="small")
    assert cell.must_plan().admitted == (flood[0], other)
    assert cell.scheduler.waiting.num_admissible == 0
    cell.finish()


def test_a_small_request_does_not_overtake_a_large_one_of_its_tenant() -> None:
    cell = Cell(spec(), tenant_tokens=20)
    first, large, small = (cell.submit(3, size, tenant="acme") for size in (5, 15, 1))
    cell.turn()
    assert (cell.running(), cell.waiting()) == ([first], [large, small])
    cell.finish()


def test_who_stands_behind_one_for_another_worker_keeps_to_the_bound_too() -> None:
    cell = Cell(spec(features=()), spec(), tenant_tokens=40)
    first = cell.submit(3, 9, tenant="acme")
    assert cell.must_plan("w1").admitted == (first,)
    # 12 tokens run. The next one's 8 could run too, but not here; the one behind has 33.
    cell.submit(3, 5, tenant="acme", needs=[Feature.LOGPROBS])
    large = cell.submit(3, 30, tenant="acme")
    outcome = cell.apply(MakePlan(worker_id="w1"))
    assert outcome.plan is None or not outcome.plan.joins
    assert PassedOver("place", Why.TENANT, large) in outcome.passed_over
    cell.finish()


def test_every_choice_counts() -> None:
    cell = Cell(spec(), tenant_tokens=16)
    sequence_id = cell.submit(3, 5, n=3, tenant="acme")
    cell.turns(3)
    assert cell.running() == [sequence_id, sequence_id + 1]
    cell.finish()


def test_the_newest_request_says_what_its_tenant_may_have() -> None:
    cell = Cell(spec(), tenant_tokens=8)
    first, second = cell.submit(3, 9, tenant="acme"), cell.submit(3, 9, tenant="acme")
    assert cell.must_plan().admitted == (first,)
    third = cell.submit(3, 9, tenant="acme", tenant_tokens=36)
    assert cell.must_plan().admitted == (second, third)
    cell.submit(3, 9, tenant="acme", tenant_tokens=12)
    cell.turn()
    assert cell.running() == [first, second, third], "nobody is thrown out"
    cell.finish()


def test_a_seat_given_up_in_advance_is_the_tenants_again() -> None:
    cell = Cell(spec(), tenant_tokens=8)
    first, second = cell.submit(3, 5, tenant="acme"), cell.submit(3, 5, tenant="acme")
    steps = 0
    while second not in cell.running():
        cell.turn()
        steps += 1
    assert first not in cell.endings or steps == 5, "its successor starts at the very next step"
    cell.finish()


@pytest.mark.parametrize("end", ["cancel", "kill"])
def test_the_bound_is_given_back_however_a_row_ends(end: str) -> None:
    cell = Cell(spec(), spec(), tenant_tokens=8)
    first, second = cell.submit(3, 50, tenant="acme"), cell.submit(3, 5, tenant="acme")
    cell.turns(2)
    if end == "cancel":
        cell.cancel(first)
    else:
        cell.kill("w1" if cell.running("w1") else "w2")
    cell.turns(2)
    running = [s for worker in cell.workers for s in cell.running(worker)]
    assert running == [second if end == "cancel" else first]
    cell.finish()


def test_those_who_may_not_run_do_not_unbalance_the_workers() -> None:
    cell = Cell(spec(), spec())
    for _ in range(20):
        cell.submit(3, 5, tenant="flood", tenant_tokens=8)
    others = [cell.submit(3, 5, tenant="small") for _ in range(5)]
    cell.turn()
    assert sorted(cell.running("w1") + cell.running("w2")) == [1, *others]
    assert len(cell.running("w1")) == len(cell.running("w2")) == 3
    cell.finish()


# Turns


def one_seat() -> Cell:
    """Nothing in flight when a seat is given: everything served is known."""
    return Cell(spec(slots=1), policy="fair", lease=1, in_flight=1)


def seats(cell: Cell) -> list[int]:
    """Sequence ids in the order in which they were seated."""
    return [sequence_id for plan in cell.finish() for sequence_id in plan.admitted]


def test_a_quiet_tenant_goes_before_the_flood_it_finds() -> None:
    cell = one_seat()
    flood = [cell.submit(9, 9, tenant="flood") for _ in range(6)]
    cell.turn()
    quiet = cell.submit(9, 9, tenant="quiet")
    assert cell.waiting()[:2] == [quiet, flood[1]]
    assert seats(cell) == [quiet, *flood[1:]]


def test_tenants_that_ask_for_the_same_take_turns() -> None:
    cell = one_seat()
    first, second = (
        [cell.submit(9, 9, tenant=name) for _ in range(4)] for name in ("first", "second")
    )
    turns = [sequence_id for pair in zip(first, second, strict=True) for sequence_id in pair]
    assert cell.waiting() == turns
    assert seats(cell) == turns


def test_turns_are_of_tokens_not_of_requests() -> None:
    cell = one_seat()
    large = [cell.submit(30, 10, tenant="large") for _ in range(2)]
    small = [cell.submit(5, 5, tenant="small") for _ in range(8)]
    assert seats(cell) == [large[0], *small[:4], large[1], *small[4:]]


def test_being_away_earns_nothing() -> None:
    cell = one_seat()
    flood = [cell.submit(9, 9, tenant="flood") for _ in range(9)]
    while flood[3] not in cell.endings:
        cell.turn()
    late = [cell.submit(9, 9, tenant="late") for _ in range(4)]
    assert seats(cell)[:6] == [late[0], flood[4], late[1], flood[5], late[2], flood[6]]


def test_what_is_owed_is_not_forgotten_between_two_requests() -> None:
    cell = one_seat()
    small = [cell.submit(5, 5, tenant="small") for _ in range(16)]
    large = cell.submit(50, 50, tenant="large")
    while large not in cell.endings:
        cell.turn()
    again = cell.submit(50, 50, tenant="large")
    order = seats(cell)
    assert order.index(again) >= 8, "a hundred tokens are ten small requests"
    assert order[-1] == small[-1]


def test_debts_are_remembered_of_so_many() -> None:
    queue = WaitingQueue(policy_of("fair", Rules(), Config()).order)
    for number in range(IDLE_TENANTS_MAX + 5):
        request = Request(
            id="r", sequence_id=number, prompt=(1,), max_tokens=1, arrived_ns=0, tenant=str(number)
        )
        tenant = queue.add_request(request)
        tenant.served += 7
        queue.remove_request(tenant, 0)
    assert len(queue._idle_tenants) == IDLE_TENANTS_MAX
    assert queue.tenants == {}
    assert "0" not in queue._idle_tenants


@pytest.mark.parametrize("weight", [1, 3])
def test_those_who_never_came_before_do_not_starve_who_was_served(weight: int) -> None:
    cell = Cell(spec(slots=1), policy="fair", tenant_weights=(("served", weight),))
    cell.submit(30, 170, tenant="served")
    cell.finish()
    again = cell.submit(5, 5, tenant="served")
    others, ahead = 0, 200 / 10 / weight
    while again not in cell.endings:
        # Up to four that wait, one that runs and one who may come share what the others are served.
        assert others < 6 * ahead + 5
        while len(cell.waiting()) < 3:
            others += 1
            cell.submit(5, 5, tenant=f"other {others}")
        cell.turn()
    assert others > ahead
    cell.finish()


def test_what_was_cancelled_before_it_ran_is_no_service() -> None:
    cell = one_seat()
    flood = [cell.submit(9, 9, tenant="flood") for _ in range(4)]
    cell.turn()
    for _ in range(50):
        cell.cancel(cell.submit(99, 9, tenant="flood"))
    quiet = cell.submit(9, 9, tenant="quiet")
    assert cell.waiting()[:2] == [quiet, flood[1]]
    assert seats(cell) == [quiet, *flood[1:]]


def test_to_be_preempted_costs_nothing_and_hits_the_largest_tenant() -> None:
    cell = Cell(spec(blocks=12), policy="fair", lease=1)
    flood = [cell.submit(4, 20, tenant="flood") for _ in range(2)]
    quiet = cell.submit(4, 20, tenant="quiet")
    preempted = [sequence_id for plan in cell.finish() for sequence_id in plan.preempted]
    assert preempted
    assert preempted[0] == flood[1], "not the newest: the newest of whoever has most"
    assert cell.overs[quiet].num_preemptions <= cell.overs[flood[1]].num_preemptions


def test_the_charge_is_what_was_computed_once() -> None:
    cell = Cell(spec(blocks=8), policy="fair", lease=1)
    cell.submit(4, 24, tenant="acme")
    cell.submit(4, 24, tenant="acme")
    cell.submit(4, 1, tenant="acme", n=1)
    tenant = cell.scheduler.waiting.tenants["acme"]
    plans = cell.finish()
    assert any(plan.preempted for plan in plans)
    assert tenant.served == 3 * 4 + 24 + 24 + 1


def test_a_prefix_hit_is_not_charged() -> None:
    cell = one_seat()
    prompt = tuple(range(1, 18))
    cell.submit(prompt, 1, tenant="acme")
    cell.submit(prompt, 1, tenant="acme")
    tenant = cell.scheduler.waiting.tenants["acme"]
    cell.finish()
    assert tenant.served == 17 + 1 + 1 + 1


def test_whoever_was_served_least_gets_the_first_chunk() -> None:
    cell = Cell(spec(slots=4, step_tokens=40), policy="fair", prefill_tokens=4)
    for _ in range(2):
        cell.submit(100, 1, tenant="flood")
    quiet = cell.submit(30, 1, tenant="quiet")
    plan = cell.must_plan()
    slot = next(join.slot for join in plan.joins if join.sequence_id == quiet)
    assert plan.chunks[0][0] == slot
    cell.finish()


@pytest.mark.parametrize("seed", range(6))
def test_one_tenant_alone_is_served_as_ever(seed: int) -> None:
    plans: dict[str, list[Plan]] = {}
    for policy in ("fair", "fcfs"):
        rng = random.Random(seed)
        cell = Cell(spec(blocks=30, slots=4), spec(blocks=20, slots=3), policy=policy)
        plans[policy] = []
        for _ in range(60):
            for _ in range(rng.choice((0, 0, 1, 2))):
                cell.submit(rng.randint(1, 30), rng.randint(1, 30), n=rng.choice((1, 1, 2)))
            if rng.random() < 0.1:
                cell.cancel(rng.randrange(1, cell.next_sequence_id + 1))
            plans[policy] += cell.turn()
        plans[policy] += cell.finish()
    assert plans["fair"] == plans["fcfs"]


@pytest.mark.parametrize("seed", range(8))
def test_the_gap_between_two_that_always_wait_is_bounded(seed: int) -> None:
    """By what one request and the rows that run can add before the other's turn comes."""
    rng = random.Random(seed)
    slots, prompt_max, output_max = rng.randint(1, 4), 40, 20
    cell = Cell(spec(slots=slots), policy="fair")
    lines = cell.scheduler.waiting.tenants
    bound = 2 * slots * (prompt_max + output_max)
    for turn in range(120):
        for name, low in (("a", 1), ("b", 30)):
            while name not in lines or len(lines[name].queue) < 3:
                cell.submit(rng.randint(low, prompt_max), rng.randint(1, output_max), tenant=name)
        cell.turn()
        assert abs(lines["a"].served - lines["b"].served) <= bound, turn
    cell.finish()


def test_turns_that_are_over_do_not_pile_up() -> None:
    cell = Cell(spec(slots=1), policy="fcfs")
    cell.submit(3, 9, tenant="a")
    waiting = cell.submit(3, 5, tenant="a")
    cell.turn()
    for _ in range(50):
        # Behind the one that waits, so that nobody comes past it.
        cell.cancel(cell.submit(3, 5, tenant="b"))
    assert len(cell.scheduler.waiting._heap) <= 12
    assert cell.waiting() == [waiting]
    cell.finish()
