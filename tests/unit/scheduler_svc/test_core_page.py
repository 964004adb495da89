"""docs/core.md draws how the counts of a sequence move; here they move so."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.cell import Cell, spec

PAGE = (Path(__file__).parents[3] / "docs" / "core.md").read_text()


def drawn(name: str) -> list[str]:
    """The rows of one table of the page."""
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", PAGE, re.DOTALL)
    assert found is not None
    return found[1].splitlines()[2:]


def rows(cell: Cell, commands: Iterable[str]) -> Iterator[str]:
    """What the counts are after each command, as the page writes it. The worker is always late."""
    for command in commands:
        if command == "plan":
            plan = cell.plan()
            steps = "" if plan is None else "1 step" if plan.lease_steps == 1 else "4 steps"
            said = "MakePlan: none" if plan is None else f"MakePlan: #{plan.plan_id}, {steps}"
        else:
            result = cell.workers["w1"].step(sees_newer_plan=False)
            assert result is not None
            cell.commit(result)
            said = f"StepDone: {result.plan_id}.{result.step}"
        one = cell.sequence(1)
        counts = (
            len(one.tokens),
            one.num_computed_tokens,
            one.num_scheduled_tokens,
            one.num_tokens,
            cell.worker().optional_steps,
            one.kv.capacity,
        )
        yield f"| {said} | {' | '.join(map(str, counts))} |"


def test_two_plans_of_one_step() -> None:
    cell = Cell(spec(block_size=1, slots=2, step_tokens=4), lease=1, prefill_tokens=1)
    cell.submit(6, 50)
    commands = ("plan", "plan", "plan", "step", "plan", "step", "plan", "step")
    assert list(rows(cell, commands)) == drawn("plans")


def test_two_plans_of_several_steps() -> None:
    cell = Cell(spec(block_size=1, slots=2), lease=4)
    cell.submit(3, 50)
    commands = ("plan", "plan", "step", "step", "plan", "step", "step", "step")
    assert list(rows(cell, commands)) == drawn("leases")
