"""What a scheduler counts of its plans."""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter

from kaiten.v1.ledger_pb2 import JournalRecord
from scheduler_svc import worker_meters
from scheduler_svc.core.commands import MakePlan
from scheduler_svc.core.planner.plan_builder import PASSED_OVER_MAX
from scheduler_svc.core.types import FLEX_PRIORITY
from scheduler_svc.decisions import Decisions
from scheduler_svc.meters import Meters
from scheduler_svc.worker_meters import WorkerMeters
from service_kit.metrics import NO_METER
from tests.support.cell import Cell, spec


def test_of_the_budget_as_much_is_used_as_the_decision_says() -> None:
    """A row that decodes may have several tokens, and is given them all."""
    cell, meters, decisions = Cell(spec(slots=4, slot_tokens=3), lease=1), Meters(NO_METER), []
    for _ in range(2):
        cell.submit(7, 30)
        plan = cell.must_plan()
        meters.planned("w:1", plan, (), cell.worker().spec)
        decisions.append(Decisions().decided(plan, (), 0, cell.scheduler))
        cell.step()
    assert [said.tokens for said in decisions] == [7, 7 + 3]
    assert meters._counts["budget_tokens_used"] == 7 + 10
    assert meters._counts["budget_tokens"] == sum(said.budget for said in decisions)


class Told(NoOpMeter):
    """Keeps what each instrument is read by."""

    def __init__(self) -> None:
        super().__init__("kaiten")
        self._reads: dict[str, Any] = {}

    def create_observable_counter(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        (self._reads[name],) = callbacks

    create_observable_gauge = create_observable_counter

    def now(self, name: str) -> Mapping[tuple[str, ...], float]:
        """By the values of its labels."""
        return {tuple((o.attributes or {}).values()): o.value for o in self._reads[name](None)}


def test_only_who_leads_says_of_which_epoch() -> None:
    """A 0 between two leaderships would be a change, and the least of all epochs."""
    told = Told()
    meters = Meters(told)
    for epoch in (7, 900):
        assert told.now("kaiten.leader_epoch") == {}
        session: Any = SimpleNamespace(leader=SimpleNamespace(epoch=epoch), core=Cell().scheduler)
        meters.leads(session)
        assert told.now("kaiten.leader_epoch") == {(): epoch}
        meters.leads(None)
    assert told.now("kaiten.leader_epoch") == {}


def test_tokens_and_ends_count_once_they_are_committed() -> None:
    """Who cannot commit them leaves them to the next leader, who has the request live."""
    cell, told = Cell(spec()), Told()
    meters = Meters(told)
    for _ in range(2):
        meters.took_in(is_new=True)
        cell.submit(3, 2)
    cell.finish()
    for seq, over in enumerate(cell.overs.values(), start=7):
        meters.answered(seq, 3)
        meters.ended(seq, [over], lambda _: "")
    assert (told.now("kaiten.requests_live"), meters._ended.total()) == ({(): 2}, 0)
    meters.committed([JournalRecord(seq=6, token_ids=[5, 5]), JournalRecord(seq=7, token_ids=[5])])
    assert (told.now("kaiten.requests_live"), meters._ended["length"]) == ({(): 1}, 1)
    assert told.now("kaiten.generation_tokens") == {(): 3}
    assert told.now("kaiten.prompt_tokens") == {(): 3}
    meters.leads(None)
    meters.committed([JournalRecord(seq=8)])
    assert told.now("kaiten.requests_handed_over") == {(): 1}
    assert (told.now("kaiten.requests_live"), meters._ended.total()) == ({(): 0}, 1)


def test_who_never_had_a_slot_says_nothing_of_how_long_outputs_are() -> None:
    """In an overload most give up in the queue: the forecast would go to nothing with them."""
    cell, meters = Cell(spec(slots=1)), Meters(NO_METER)
    for _ in range(2):
        cell.submit(3, 20)
    for _ in range(90):
        cell.turn()
        cell.cancel(cell.submit(3, 20))
    cell.finish()
    assert len(cell.overs) == 92
    meters.ended(1, cell.overs.values(), lambda _: "")
    meters.committed([JournalRecord(seq=1)])
    assert meters.output_tokens == 20


def test_workers_that_are_gone_make_room_and_the_others_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_meters, "WORKERS_TOLD_MAX", 2)
    here: Collection[str] = ["a:1", "b:1", "c:1"]
    told = Told()
    meters = WorkerMeters(told, lambda: here)
    for worker in ("a:1", "b:1", "c:1", "a:1"):
        meters.planned(worker, budget_tokens=10, budget_tokens_used=4, prefix_hit_tokens=3)
        meters.passed_over(worker, "admit", "blocks")
    assert told.now("kaiten.worker_budget_tokens") == {("a:1",): 20, ("b:1",): 10}
    assert told.now("kaiten.worker_budget_tokens_used") == {("a:1",): 8, ("b:1",): 4}
    assert told.now("kaiten.worker_prefix_hit_tokens") == {("a:1",): 6, ("b:1",): 3}
    here = ["b:1", "c:1"]
    meters.passed_over("c:1", "place", "no_slot")
    passed_over = told.now("kaiten.worker_passed_over")
    assert passed_over == {("b:1", "admit", "blocks"): 1, ("c:1", "place", "no_slot"): 1}


def test_what_joins_a_worker_with_a_known_prefix_is_counted_there() -> None:
    cell, told = Cell(spec(slots=4)), Told()
    meters = Meters(told)
    for hits in (0, 16):
        cell.submit(tuple(range(20)), 4)
        meters.planned("w:1", cell.must_plan(), (), cell.worker().spec)
        assert told.now("kaiten.worker_prefix_hit_tokens") == {("w:1",): hits}
        cell.step()
        cell.finish()


def test_what_goes_to_host_memory_and_comes_back_is_counted() -> None:
    cell, told = Cell(spec(blocks=8, host_blocks=9)), Told()
    meters = Meters(told)
    for prompt in (range(17), range(100, 132), range(17)):
        cell.submit(tuple(prompt), 1)
        meters.planned("w:1", cell.must_plan(), (), cell.worker().spec)
        cell.finish()
    assert told.now("kaiten.worker_kv_blocks_swapped_out") == {("w:1",): 4 + 5}
    assert told.now("kaiten.worker_kv_blocks_swapped_in") == {("w:1",): 4}


def test_a_preemption_is_for_want_of_blocks_and_who_gives_way_is_none() -> None:
    """However many do at once: more than readers are told of who is passed over."""
    count = PASSED_OVER_MAX + 8
    cell, meters = Cell(spec(slots=count, step_tokens=2000)), Meters(NO_METER)
    for _ in range(count):
        cell.submit(3, 30, priority=FLEX_PRIORITY)
    cell.turns(4)
    for _ in range(count):
        cell.submit(3, 5)
    outcome = cell.apply(MakePlan(worker_id="w1"))
    assert outcome.plan is not None
    assert len(outcome.plan.preempted) == count
    meters.planned("w:1", outcome.plan, outcome.passed_over, cell.worker().spec)
    assert meters._counts["num_preemptions"] == 0

    cell = Cell(spec(slots=2, blocks=5))
    cell.submit(4, 12)
    cell.submit(4, 12)
    while cell.scheduler.live_count:
        outcome = cell.apply(MakePlan(worker_id="w1"))
        if outcome.plan is not None:
            cell.workers["w1"].send(outcome.plan)
            meters.planned("w:1", outcome.plan, outcome.passed_over, cell.worker().spec)
        cell.step()
    told = sum(over.num_preemptions for over in cell.overs.values())
    assert meters._counts["num_preemptions"] == told > 0
