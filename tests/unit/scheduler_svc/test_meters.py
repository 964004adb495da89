"""What a scheduler counts of its plans."""

from scheduler_svc.decisions import Decisions
from scheduler_svc.meters import Meters
from service_kit.metrics import NO_METER
from tests.support.cell import Cell, spec


def test_of_the_budget_as_much_is_used_as_the_decision_says() -> None:
    """A row that decodes may have several tokens, and is given them all."""
    cell, meters, decisions = Cell(spec(slots=4, slot_tokens=3), lease=1), Meters(NO_METER), []
    for _ in range(2):
        cell.submit(7, 30)
        plan = cell.must_plan()
        meters.planned(plan, cell.worker().spec)
        decisions.append(Decisions().decided(plan, (), 0, cell.scheduler))
        cell.step()
    assert [said.tokens for said in decisions] == [7, 7 + 3]
    assert meters._counts["budget_tokens_used"] == 7 + 10
    assert meters._counts["budget_tokens"] == sum(said.budget for said in decisions)
