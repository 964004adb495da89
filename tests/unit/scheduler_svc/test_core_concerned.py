"""Whom an outcome names: a worker that nothing concerns is not even asked."""

from scheduler_svc.core.commands import StepDone
from tests.support.cell import Cell, spec


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
