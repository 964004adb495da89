"""One door: whatever changes the core is a command, and a question changes nothing."""

import ast
import dataclasses
import gc
import inspect
import pickle
from pathlib import Path

import pytest

from scheduler_svc.core import commands
from scheduler_svc.core.commands import Command, Configured
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config
from tests.support.cell import Cell, spec

CORE = Path(inspect.getfile(commands)).parent
# With an argument for those that take one.
QUESTIONS: dict[str, tuple[object, ...]] = {
    "check": ("w1",),
    "next_deadline_ns": (),
    "handover": (),
}


def public(of: type) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


def test_the_core_has_one_public_method_besides_questions() -> None:
    properties = {name for name in public(Scheduler) if isinstance(vars(Scheduler)[name], property)}
    assert public(Scheduler) - properties == {"apply", *QUESTIONS}


def test_questions_change_nothing() -> None:
    cell = Cell(spec(slots=1))
    cell.submit(3, 20, deadline_ns=9)
    cell.submit(3, 20)
    cell.turns(3)
    before = cell.snapshot()
    for name in public(Scheduler) - {"apply"}:
        found = getattr(cell.scheduler, name)
        if name in QUESTIONS:
            found(*QUESTIONS[name])
    list(cell.scheduler.waiting)
    repr(cell.scheduler)
    assert cell.snapshot() == before


@pytest.mark.parametrize("command", Command.__args__, ids=lambda command: command.__name__)
def test_a_command_is_a_frozen_value_with_a_handler(command: type) -> None:
    assert dataclasses.is_dataclass(command)
    assert command.__dataclass_params__.frozen  # type: ignore[attr-defined]
    source = ast.parse((CORE / "scheduler.py").read_text())
    (table,) = (
        node.value
        for node in ast.walk(source)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_HANDLERS"
    )
    assert isinstance(table, ast.Dict)
    assert command.__name__ in [ast.unparse(key) for key in table.keys if key is not None]


def test_outside_the_core_nothing_but_apply_is_called_on_it() -> None:
    """What the shell is given to look at (`waiting`, `workers`) it only looks at."""
    changing = {"add", "remove", "admit", "has_left", "settle", "configure", "vacate", "schedule"}
    for path in CORE.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = ast.unparse(node.func.value)
                assert not (node.func.attr in changing and "core." in of), f"{path}: {of}"


def test_another_policy_at_run_time_sorts_those_who_wait() -> None:
    cell = Cell(spec(slots=1), policy="fcfs")
    cell.submit(3, 9)
    cell.turns(2)
    plain, urgent = cell.submit(3, 9), cell.submit(3, 9, priority=1)
    assert cell.waiting() == [plain, urgent]
    cell.apply(Configured(config=Config(lease_steps_max=1), policy="priority"))
    assert cell.waiting() == [urgent, plain]
    assert cell.scheduler.config.lease_steps_max == 1
    cell.finish()


def test_a_bound_at_run_time_counts_for_tenants_that_named_none() -> None:
    cell = Cell(spec(), tenant_tokens=8)
    first, second = cell.submit(3, 5, tenant="a"), cell.submit(3, 5, tenant="a")
    cell.turn()
    assert (cell.running(), cell.waiting()) == ([first], [second])
    cell.apply(Configured(config=Config(), policy="fcfs"))
    assert cell.must_plan().admitted == (second,)
    cell.finish()


def test_an_unknown_policy_is_refused_by_name_and_changes_nothing() -> None:
    cell = Cell(spec())
    before = cell.snapshot()
    with pytest.raises(ValueError, match="--policy shortest: choose one of fair, fcfs"):
        cell.scheduler.apply(Configured(config=Config(lease_steps_max=3), policy="shortest"), 0)
    assert pickle.dumps(cell.scheduler) == before


def test_what_is_over_is_no_garbage() -> None:
    """A collector has nothing to find: a leader would stand still for it."""
    cell = Cell(spec(slots=4))
    for number in range(40):
        cell.submit(3, 6, n=1 + number % 3)
        cell.turn()

    def sequences() -> int:
        """Of this cell's requests."""
        requests = {id(request) for request in cell.requests.values()}
        found = [one for one in gc.get_objects() if isinstance(one, Sequence)]
        return sum(id(one.live.request) in requests for one in found)

    gc.collect()
    assert sequences() > 10
    gc.disable()
    try:
        cell.finish()
        assert sequences() == 0
    finally:
        gc.enable()
