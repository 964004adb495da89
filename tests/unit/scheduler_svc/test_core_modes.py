"""What the modes do to a batch: who shares a step, when somebody joins, and who goes first."""

from typing import Any

import pytest

from scheduler_svc.core.commands import Cancel, Configured, MakePlan
from scheduler_svc.core.outcome import Plan, Why
from scheduler_svc.core.types import Config, Reason, Rules
from tests.support.cell import Cell, spec


def why(cell: Cell) -> set[Why]:
    """Why nobody joins with the next plan, which is sent."""
    outcome = cell.apply(MakePlan(worker_id="w1"))
    if outcome.plan is not None:
        assert not outcome.plan.admitted
        cell.workers["w1"].send(outcome.plan)
    return {item.why for item in outcome.passed_over}


def one_by_one(**knobs: Any) -> Cell:
    """A cell that runs one sequence at a time, and is busy with the first."""
    cell = Cell(spec(slots=1), lease=1, in_flight=1, **knobs)
    cell.submit(3, 4)
    cell.turn()
    return cell


def order_of(cell: Cell) -> list[int]:
    """In which order they join from now on."""
    return [sequence_id for plan in cell.finish() for sequence_id in plan.admitted]


# Mixes


def with_a_decode(prompt: int, **knobs: Any) -> tuple[Cell, Plan]:
    """Slot 0 decodes, and a prompt joins: 16 tokens a step, 8 while somebody decodes."""
    cell = Cell(
        spec(slots=3, step_tokens=16, mixed_tokens=8),
        lease=4,
        in_flight=1,
        prefill_tokens=1,
        **knobs,
    )
    cell.submit(2, 20)
    cell.turns(2)
    cell.submit(prompt, 20)
    return cell, cell.must_plan()


def test_chunks_go_beside_decodes() -> None:
    cell, plan = with_a_decode(12)
    assert (plan.chunks, plan.decode_rows) == (((1, 7),), 1)
    cell.finish()


def test_while_prompts_are_there_prefill_first_lets_decodes_sit_out() -> None:
    cell, plan = with_a_decode(20, mix="prefill_first")
    assert dict(plan.chunks) == {1: 16, 0: 0}
    assert (plan.decode_rows, plan.lease_steps, plan.chunk_tokens) == (0, 1, 16)
    assert cell.step().slots == ()
    plan = cell.must_plan()
    assert dict(plan.chunks) == {1: 4, 0: 0}
    assert cell.step().slots == (1,)
    assert cell.must_plan().chunks == ()
    assert sorted(cell.step().slots) == [0, 1]
    cell.finish()


@pytest.mark.parametrize(
    ("prompt", "chunks"), [(7, {1: 7}), (12, {1: 12, 0: 0}), (17, {1: 7})], ids=str
)
def test_a_whole_prompt_has_a_step_beside_decodes_or_for_itself(
    prompt: int, chunks: dict[int, int]
) -> None:
    cell, plan = with_a_decode(prompt, mix="merged_prefill")
    assert dict(plan.chunks) == chunks
    cell.finish()


def test_short_prompts_pass_by_as_many_long_ones_as_may_be() -> None:
    knobs: dict[str, Any] = {"long_prefill_tokens": 10, "long_prefills_max": 1}
    cell = Cell(spec(slots=4, step_tokens=12), lease=1, in_flight=1, prefill_tokens=1, **knobs)
    first, second, short = cell.submit(30, 4), cell.submit(30, 4), cell.submit(3, 4)
    assert cell.must_plan().admitted == (first, short)
    cell.step()
    assert Why.LONG_PREFILL in why(cell)
    assert order_of(cell) == [second]


# Cadences


def test_at_an_interval_somebody_joins_and_whoever_ends_leaves_at_once() -> None:
    cell = Cell(
        spec(), lease=2, in_flight=1, cadence="interval", schedule_interval_steps=5
    )  # fmt: skip
    first, second = cell.submit(3, 30), cell.submit(3, 3)
    cell.turns(3)
    assert second in cell.endings, "after three steps"
    late = cell.submit(3, 4)
    leaving = cell.submit(3, 4, deadline_ns=cell.now_ns + 1)
    assert Why.CADENCE in why(cell)
    assert cell.running() == [first], "an end is not delayed"
    cell.now_ns += 1
    cell.expire()
    assert cell.reason(leaving) is Reason.DEADLINE_EXCEEDED
    while late not in cell.running():
        cell.turn()
    assert cell.workers["w1"].steps_total == 6, "it joined after five"
    cell.cancel(first)
    assert cell.running() == [late]
    cell.finish()


def test_an_empty_batch_does_not_wait_for_its_interval() -> None:
    cell = Cell(spec(), cadence="interval", schedule_interval_steps=50)
    for _ in range(3):
        cell.submit(3, 2)
        assert cell.must_plan().admitted
        cell.finish()


def test_a_long_queue_ends_an_interval() -> None:
    cell = Cell(spec(), lease=1, in_flight=1, cadence="interval", waiting_served_permille=1000)
    cell.submit(3, 30), cell.submit(3, 30)
    cell.turn()
    cell.submit(3, 4), cell.submit(3, 4)
    assert Why.CADENCE in why(cell)
    cell.step()
    cell.submit(3, 4)
    assert len(cell.must_plan().admitted) == 3
    cell.finish()


def test_every_step_is_decided_anew() -> None:
    cell = Cell(spec(), lease=8, cadence="every_step")
    cell.submit(3, 9)
    assert {plan.lease_steps for plan in cell.finish()} == {1}


# Admissions


def test_nobody_is_preempted_where_the_worst_case_is_reserved() -> None:
    for rule, happens in (("max_utilization", True), ("guaranteed_no_evict", False)):
        cell = Cell(spec(block_size=1, blocks=24, slots=4), admission=rule)
        for _ in range(4):
            cell.submit(2, 12)
        preempted = [plan.preempted for plan in cell.finish() if plan.preempted]
        assert bool(preempted) is happens


def test_a_batch_that_is_about_to_end_is_waited_for_unless_it_is_urgent() -> None:
    cell = Cell(spec(), lease=1, in_flight=1, admission="wait_for_batch_end:3")
    cell.submit(3, 6)
    cell.turns(3)
    late = cell.submit(3, 4)
    assert Why.BATCH in why(cell)
    cell.step()
    urgent = cell.submit(3, 4, priority=1)
    cell.apply(
        Configured(
            config=Config(lease_steps_max=1, plans_in_flight_max=1),
            policy="priority",
            rules=Rules(admission="wait_for_batch_end:3"),
        )
    )
    assert cell.must_plan().admitted == (urgent, late), "the batch does not end soon any more"
    cell.finish()


# Orders


def test_the_shortest_goes_first_and_ages() -> None:
    cell = one_by_one(order="shortest", token_worth_ns=10)
    long, short = cell.submit(3, 20), cell.submit(3, 4)
    cell.now_ns += 200
    late = cell.submit(3, 4)
    assert cell.waiting() == [short, long, late]
    assert order_of(cell) == [short, long, late]


def test_the_earliest_deadline_goes_first() -> None:
    cell = one_by_one(order="deadline")
    never, late, soon = (
        cell.submit(3, 4, deadline_ns=ns) for ns in (None, 60_000_000_001, 50_000_000_000)
    )
    assert cell.waiting() == [soon, never, late]
    cell.finish()


def test_a_stop_string_takes_out_of_the_queue_whoever_waits_by_length() -> None:
    """Its tokens are cut before it leaves: its place in the queue is the one it was given."""
    cell = Cell(spec(block_size=1, blocks=20, slots=2), order="shortest", lease=1)
    cell.submit(2, 16), cell.submit(2, 16)
    cell.turn()
    while not (waiting := cell.waiting()):
        cell.turn()
    (preempted,) = waiting
    cell.apply(Cancel(sequence_id=preempted, reason=Reason.STOP, num_output_tokens=1))
    assert cell.waiting() == []
    cell.turns(30)
    assert cell.scheduler.live_count == 0


def test_whoever_has_most_cached_goes_first_for_as_long_as_that_is_worth() -> None:
    shared = tuple(range(1, 41))
    for worth_ns, first in ((1000, 1), (1, 0)):
        cell = Cell(spec(slots=1), lease=1, order="prefix", token_worth_ns=worth_ns)
        cell.submit(shared, 4)
        cell.turn()
        other = cell.submit(40, 4)
        cell.now_ns += 1000
        cached = cell.submit((*shared, 77), 4)
        assert order_of(cell) == ([cached, other] if first else [other, cached])


def test_a_fair_order_by_prefix_stays_with_the_tenant_whose_turn_it_is() -> None:
    shared = tuple(range(1, 41))
    cell = Cell(spec(slots=1), lease=1, order="fair:prefix", policy="fair")
    cell.submit(shared, 4, tenant="a")
    cell.turn()
    cached = cell.submit((*shared, 77), 4, tenant="a")
    other = cell.submit(3, 4, tenant="b")
    assert order_of(cell) == [other, cached]


def test_tenants_are_served_by_their_weights() -> None:
    weights = (("a", 3), ("b", 1))
    cell = Cell(spec(slots=4), lease=1, policy="fair", tenant_weights=weights)
    for _ in range(200):
        cell.submit(3, 8, tenant="a")
        cell.submit(3, 8, tenant="b")
    cell.turns(250)
    served = {name: line.served for name, line in cell.scheduler.waiting.tenants.items()}
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.1)
    cell.apply(Configured(config=Config(), policy="fair"))
    cell.finish()


WEIGHTS = (("a", 3),)


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [("fair", (), WEIGHTS), ("fair", WEIGHTS, ()), ("fcfs", (), WEIGHTS), ("fcfs", (), ())],
)
def test_shares_that_change_hold_from_then_on(policy: str, before: Any, after: Any) -> None:
    """What tenants were served by other shares, or by none, is not paid back: somebody would stand
    still for it.
    """
    cell = Cell(spec(slots=4), lease=1, policy=policy, tenant_weights=before)
    for _ in range(100):
        for tenant in "aab":
            cell.submit(3, 8, tenant=tenant)
    cell.turns(120)
    cell.apply(Configured(config=Config(tenant_weights=after), policy="fair"))
    tenants = cell.scheduler.waiting.tenants
    began = {name: tenant.served for name, tenant in tenants.items()}
    cell.turns(80)
    a, b = (tenants[name].served - began[name] for name in "ab")
    assert a / b == pytest.approx(3 if after else 1, rel=0.2)


@pytest.mark.parametrize(("policy", "times"), [("fair", 3), ("fcfs", 0)])
def test_who_is_away_stays_as_far_ahead_when_its_weight_changes(policy: str, times: int) -> None:
    cell = Cell(spec(slots=1), policy=policy)
    cell.submit(30, 170, tenant="a")
    cell.finish()
    ahead = dict(cell.scheduler.waiting.ahead())["a"]
    cell.apply(Configured(config=Config(tenant_weights=WEIGHTS), policy="fair"))
    now = dict(cell.scheduler.waiting.ahead()).get("a", 0)
    assert now == pytest.approx(times * ahead, abs=3)


@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest", "fair:shortest"])
def test_who_has_waited_longer_than_is_promised_goes_first(order: str) -> None:
    """A stream of short and urgent ones passes a long one by, until its time is up."""
    for promised in (None, 100):
        cell = one_by_one(order=order, wait_ns_max=promised)
        poor = cell.submit(3, 40, tenant="poor", priority=-1)
        for _ in range(30):
            cell.submit(3, 2, priority=9, tenant="rich")
            cell.now_ns += 10
            cell.turns(3)
        waited_ns = cell.now_ns if poor in cell.waiting() else None
        if promised is not None:
            assert waited_ns is None
        cell.finish()


def test_a_full_tenant_is_not_hurried_by_a_promise() -> None:
    cell = Cell(spec(), policy="fair", tenant_tokens=8, wait_ns_max=5)
    first, second = cell.submit(3, 5, tenant="a"), cell.submit(3, 5, tenant="a")
    cell.turn()
    cell.now_ns += 50
    assert (cell.running(), cell.waiting()) == ([first], [second])
    cell.turn()
    assert cell.waiting() == [second]
    cell.finish()
