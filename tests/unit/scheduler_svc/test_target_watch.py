"""A target for gaps that a worker cannot meet is said, once, with what would do; and so is a gap
that leaves batches no room.
"""

from scheduler_svc.core.types import FLEX_PRIORITY
from scheduler_svc.target_watch import TargetWatch
from tests.support.cell import Cell, spec

PROMPT = 64


def deciding(target_us: int, *, token_us: int = 100, rows: int = 1) -> Cell:
    """So many rows decode on a worker of which both costs are known."""
    cell = Cell(spec(blocks=400), lease=1, in_flight=1, itl_target_us=target_us)
    cell.workers["w1"].token_us = token_us
    for _ in range(rows):
        cell.submit(PROMPT, 100)
    cell.turns(20)
    assert len(cell.running()) == rows
    return cell


def look(watch: TargetWatch, cell: Cell) -> list[tuple[str, str]]:
    return list(watch.look(cell.scheduler.config, cell.scheduler.workers.values()))


def test_decodes_alone_take_longer() -> None:
    ((worker_id, why),) = look(TargetWatch(), deciding(1000, token_us=1500, rows=2))
    assert worker_id == "w1"
    assert why.startswith("--itl-target-ms 1 cannot be met: a step of 2 rows takes 3.0 ms without")


def test_the_least_chunk_takes_longer() -> None:
    ((_, why),) = look(TargetWatch(), deciding(1000, token_us=100))
    assert "with the 16 prompt tokens that a prefill gets at least" in why
    assert "lower --prefill-tokens-min" in why


def test_it_is_said_once_until_it_was_met() -> None:
    watch, cell = TargetWatch(), deciding(1000)
    assert len(look(watch, cell)) == 1
    assert look(watch, cell) == []
    # Nobody decodes any more.
    cell.finish()
    assert look(watch, cell) == []
    cell.submit(PROMPT, 50)
    cell.turns(4)
    assert len(look(watch, cell)) == 1


def test_a_target_that_is_met_or_not_given_says_nothing() -> None:
    assert look(TargetWatch(), deciding(50_000)) == []
    cell = Cell(spec())
    cell.submit(PROMPT, 5)
    cell.turns(3)
    assert look(TargetWatch(), cell) == []


def look_at_gap(watch: TargetWatch, cell: Cell) -> list[str]:
    config, workers = cell.scheduler.config, cell.scheduler.workers.values()
    flex_waits = cell.scheduler.waiting.num_admissible > 0
    return [why for _, why in watch.look_at_gap(config, workers, flex_waits=flex_waits)]


def test_live_rows_take_the_gap_of_batches_by_themselves() -> None:
    """It is said when somebody waits for it, and again after there was room."""
    watch = TargetWatch()
    cell = Cell(spec(blocks=400), lease=1, in_flight=1, batch_gap_us=2000)
    cell.workers["w1"].token_us = 1500
    for _ in range(2):
        cell.submit(PROMPT, 100)
    cell.turns(20)
    assert look_at_gap(watch, cell) == []
    line = cell.submit(3, 200, priority=FLEX_PRIORITY)
    cell.turns(4)
    assert cell.waiting() == [line]
    (why,) = look_at_gap(watch, cell)
    assert why.startswith(
        "--batch-gap-ms 2 leaves batches no room: a step of 2 live rows takes 3.0"
    )
    assert look_at_gap(watch, cell) == []
    cell.turns(100)
    assert cell.running() == [line]
    assert look_at_gap(watch, cell) == []
    for _ in range(2):
        cell.submit(PROMPT, 100)
    cell.turns(20)
    assert len(look_at_gap(watch, cell)) == 1
    cell.finish()
