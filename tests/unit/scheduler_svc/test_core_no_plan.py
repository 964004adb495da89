"""A plan that is not made leaves no trace: the journal records only those that were made."""

import random

import pytest

from tests.support.cell import Cell, spec


@pytest.mark.parametrize("seed", range(20))
def test_none_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cell = Cell(spec(blocks=14, slots=4), in_flight=rng.choice((1, 2, 3)), lease=rng.choice((1, 8)))
    for _ in range(30):
        cell.submit(rng.randint(1, 14), rng.randint(1, 12))
    while cell.scheduler.live_count:
        before = cell.snapshot()
        if cell.plan() is None:
            assert cell.snapshot() == before
            cell.step()
    cell.finish()


def test_blocks_of_the_departed_stay_theirs_when_they_would_not_be_enough() -> None:
    """Six blocks: one row holds three, one departs with two, and who waits needs four."""
    cell = Cell(spec(blocks=6))
    cell.submit(8, 6)
    cell.submit(3, 2)
    cell.submit(13, 3)
    cell.must_plan()
    cell.step()
    while not cell.worker().retiring:
        cell.must_plan()
    free = cell.worker().kv.free_count
    (retiring,) = cell.worker().retiring.values()
    held = retiring.kv.parts
    assert held
    assert cell.plan() is None
    assert (retiring.kv.parts, cell.worker().kv.free_count) == (held, free)
    cell.finish()
