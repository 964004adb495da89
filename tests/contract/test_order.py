"""tests/support/order.py: what takes long is in front of what each process gets."""

from pathlib import Path

import pytest

from tests.support.order import FIRST, TESTS, begun_at, dealt


def test_the_files_that_go_first_are_there() -> None:
    assert not [name for name in FIRST if not (TESTS / name).is_file()]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 40, 401])
def test_every_run_begins_with_its_share_and_nothing_is_lost(processes: int, count: int) -> None:
    items = [(f"unit/test_{at}.py", 0) for at in range(count)]
    items[1:1] = [(name, at) for name in FIRST[:7] for at in range(3)]
    ordered = dealt(items, lambda item: item[0], processes)
    assert sorted(ordered) == sorted(items)
    at = 0
    for left in range(processes, 0, -1):
        length = (len(items) - at) // left
        if length > 3 * 4:
            assert ordered[at][0] in FIRST
        at += length
    # A file stays whole and in its order: its tests share what they start.
    for name in FIRST[:7]:
        begin = ordered.index((name, 0))
        assert ordered[begin : begin + 3] == [(name, 0), (name, 1), (name, 2)]


@pytest.mark.parametrize("processes", [1, 2, 4, 7])
def test_every_process_collects_every_file_from_another_folder_on(processes: int) -> None:
    begun = [begun_at(own, processes) for own in range(processes)]
    assert len({each[0] for each in begun}) == processes
    everything = sorted(TESTS.rglob("test_*.py"))
    for folders in begun:
        assert (
            sorted(path for each in folders for path in Path(each).rglob("test_*.py")) == everything
        )
