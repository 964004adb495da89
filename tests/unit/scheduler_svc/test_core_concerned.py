"""Whom an outcome names: a worker that nothing concerns is not even asked."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.commands import (
    Configured,
    MakePlan,
    StepDone,
    Submit,
    WorkerJoined,
    WorkerLost,
)
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.planner import admit, place
from scheduler_svc.core.planner.plan_builder import LOOK_EFFORT
from scheduler_svc.core.policy.admission import AdmissionView, whenever_it_fits
from scheduler_svc.core.policy.order import LOOK_AHEAD
from scheduler_svc.core.requests import LiveRequest, Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import FLEX_PRIORITY, Config, Request, Rules, SequenceId, SlotIndex
from scheduler_svc.core.waiting import WaitingQueue
from tests.support.cell import Cell, spec
from tests.support.cpu_cost import costs_at_most


def named(cell: Cell, worker_id: str = "w1") -> tuple[str, ...]:
    """By a step of that worker."""
    command = StepDone(result=cell.compute(worker_id))
    outcome = cell.scheduler.apply(command, cell.now_ns)
    cell.see(command, outcome)
    return outcome.workers


def two_busy_workers() -> Cell:
    cell = Cell(spec(slots=2), spec(slots=2), policy="fcfs")
    for _ in range(4):
        cell.submit(3, 40)
    cell.turns(4)
    assert len(cell.running("w1")) == len(cell.running("w2")) == 2
    return cell


def test_a_step_concerns_its_own_worker_only() -> None:
    cell = two_busy_workers()
    assert named(cell) == ("w1",)
    cell.submit(3, 5)  # nobody has a slot for it
    cell.plan("w1")
    assert named(cell) == ("w1",)


def test_one_that_waits_concerns_every_worker_that_has_a_slot() -> None:
    cell = Cell(spec(slots=1), spec(slots=2), spec(slots=2))
    cell.submit(3, 40)
    cell.turns(2)
    cell.concerned.clear()
    cell.submit(3, 5)
    assert cell.concerned == {"w2", "w3"}
    cell.finish()


def test_a_cancel_concerns_the_worker_that_is_to_be_told() -> None:
    cell = two_busy_workers()
    cell.concerned.clear()
    cell.cancel(cell.running("w2")[0])
    assert cell.concerned == {"w2"}
    assert cell.must_plan("w2").leaves


def test_a_tenant_below_its_bound_again_concerns_whoever_has_a_slot() -> None:
    cell = Cell(spec(slots=2), spec(slots=2), tenant_tokens=8)
    first, second = cell.submit(3, 5, tenant="acme"), cell.submit(3, 5, tenant="acme")
    cell.turns(2)
    cell.concerned.clear()
    cell.cancel(first)
    assert cell.concerned == {"w1", "w2"}
    cell.turn()
    assert second in cell.running("w1") + cell.running("w2")
    cell.finish()


def counting(cell: Cell) -> list[AdmissionView]:
    """What the rule of admission looks at, as it is asked."""
    asked: list[AdmissionView] = []

    def counted(view: AdmissionView) -> Why | None:
        asked.append(view)
        return whenever_it_fits(view)

    core = cell.scheduler._cell
    core.policy = replace(core.policy, admission=counted)
    return asked


def test_of_requests_that_are_alike_other_workers_are_asked_once_in_a_plan() -> None:
    """Each that is admitted needs to know how many could have it; of the others nothing changes."""
    cell = Cell(*[spec(slots=8)] * 4, prefill_tokens=1)
    asked = counting(cell)
    for _ in range(4 * 8):
        cell.submit(3, 5)
    asked.clear()
    assert len(cell.must_plan().joins) == 8
    # Its own worker for each that joins, and first whether anybody can; the others once for all.
    assert len(asked) == 8 + 1 + 3
    cell.finish()


def test_for_one_that_does_not_fit_here_no_other_worker_is_asked() -> None:
    """While blocks are short everywhere, each of many workers is asked after every step."""
    cell = Cell(*[spec(slots=8, blocks=8)] * 4)
    asked = counting(cell)
    for _ in range(8):
        cell.submit(20, 12)
    cell.turns(6)
    assert len(cell.scheduler.waiting) == 4
    cell.step()
    asked.clear()
    cell.plan()
    assert len(asked) == 1
    cell.finish()


def test_a_worker_that_nobody_fits_costs_nothing_for_each_that_waits() -> None:
    """It has slots, so it is asked after every step of the large one."""

    def ask_small(scheduler: Scheduler) -> None:
        for _ in range(20):
            scheduler.apply(MakePlan(worker_id="small"), 0)

    many, few = waited_for(2000), waited_for(2)
    for scheduler in (many, few):
        scheduler.apply(WorkerJoined(worker_id="small", spec=spec(blocks=2)), 0)
    costs_at_most(8, lambda: ask_small(many), lambda: ask_small(few))


def test_of_many_that_may_give_way_a_few_counts_are_tried() -> None:
    cell = Cell(spec(slots=70, blocks=128, step_tokens=300), prefill_tokens=1)
    asked = counting(cell)
    for _ in range(64):
        cell.submit(2, 2, priority=FLEX_PRIORITY)
    cell.must_plan()
    assert len(cell.running()) == 64
    cell.submit(4 * 110, 2)
    asked.clear()
    assert 20 < len(cell.must_plan().preempted) < 60
    assert len(asked) < 20
    cell.finish()


def waited_for(count: int, config: Config | None = None, rules: Rules | None = None) -> Scheduler:
    """So many wait, each of a tenant of its own, and a worker that holds them is there."""
    scheduler = Scheduler()
    configured = Configured(config=config or Config(), policy="fair", rules=rules or Rules())
    scheduler.apply(configured, 0)
    scheduler.apply(WorkerJoined(worker_id="w0", spec=spec(blocks=8)), 0)
    for number in range(1, count + 1):
        one = Request(
            id=f"r{number}",
            sequence_id=number,
            tenant=f"t{number}",
            prompt=(1,) * 9,
            max_tokens=9,
            arrived_ns=0,
        )
        scheduler.apply(Submit(request=one), 0)
    return scheduler


def test_a_worker_that_joins_costs_nothing_for_each_that_waits() -> None:
    def join_eight(scheduler: Scheduler) -> None:
        for _ in range(8):
            worker_id = f"w{len(scheduler.workers)}"
            scheduler.apply(WorkerJoined(worker_id=worker_id, spec=spec(blocks=8)), 0)

    many, few = waited_for(2000), waited_for(2)
    costs_at_most(8, lambda: join_eight(many), lambda: join_eight(few))


@pytest.mark.parametrize("is_crash", [None, True, False])
def test_a_lost_worker_like_another_costs_nothing_for_each_that_waits(
    is_crash: bool | None,
) -> None:
    class Lives(dict[SequenceId, LiveRequest]):
        def values(self) -> Any:
            raise AssertionError("a look at all who live")

    scheduler = waited_for(20)
    scheduler.apply(WorkerJoined(worker_id="w1", spec=spec(blocks=9)), 0)
    scheduler.apply(MakePlan(worker_id="w0"), 0)
    sequence = scheduler.workers["w0"].running[0]
    scheduler._cell.live = Lives(scheduler._cell.live)
    scheduler.apply(WorkerLost(worker_id="w0", is_crash=is_crash, reason=""), 0)
    assert sequence.deaths == (is_crash is True)
    assert bool(sequence.unjudged) == (is_crash is None)
    scheduler.apply(WorkerLost(worker_id="w0", is_crash=True, reason=""), 0)
    assert sequence.deaths == (is_crash is not False)


def test_small_ones_behind_many_that_fit_another_worker_only_join_in_several_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each that joins needs a look past all of those: a plan of many would hold up all workers."""
    monkeypatch.setattr(admit, "EFFORT_MAX", 4 * 100 * LOOK_EFFORT)
    cell = Cell(spec(slots=8), spec(context=8, slots=64), prefill_tokens=1)
    for _ in range(8 + 100):
        cell.submit(9, 40)
    cell.must_plan("w1")
    small = [cell.submit(3, 4) for _ in range(32)]
    joined: list[int] = []
    while len(joined) < len(small):
        plan = cell.must_plan("w2")
        assert 0 < len(plan.admitted) <= 5
        joined += plan.admitted
        cell.step("w2")
    assert joined == small


def test_a_look_at_the_first_few_of_many_tenants_asks_about_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as are looked at for their cached tokens, for each that joins."""
    asked: list[Sequence] = []
    rank = WaitingQueue._rank

    def counted(queue: WaitingQueue, sequence: Sequence, served: int) -> tuple[bool, int]:
        asked.append(sequence)
        return rank(queue, sequence, served)

    scheduler = waited_for(500, Config(token_worth_ns=1), Rules(order="fair:prefix"))
    monkeypatch.setattr(WaitingQueue, "_rank", counted)
    plan = scheduler.apply(MakePlan(worker_id="w0"), 0).plan
    assert plan is not None
    # Whose turn it is by then, too, and of those who join what becomes of their tenants.
    assert LOOK_AHEAD < len(asked) < 2 * LOOK_AHEAD * (len(plan.joins) + 1)


def test_of_those_whose_prompts_are_computed_the_first_long_ones_are_looked_at() -> None:
    """By each long one that waits."""
    looks: list[Sequence] = []

    class Prefills(dict[SlotIndex, Sequence]):
        def values(self) -> Any:
            return map(seen, super().values())

    def seen(sequence: Sequence) -> Sequence:
        looks.append(sequence)
        return sequence

    cell = Cell(spec(slots=64), prefill_tokens=1, long_prefill_tokens=20, long_prefills_max=2)
    for length in [21, 21, *[3] * 30, 21, 21]:
        cell.submit(length, 5)
    plan, worker = cell.must_plan(), cell.worker("w1")
    assert len(plan.joins) == 32
    worker.prefills = Prefills(worker.running)
    core = cell.scheduler._cell
    assert all(place._is_one_long_too_many(core, worker, one) for one in core.waiting)
    assert len(looks) == 2 * 2
