"""tests/support/once.py: one maker whatever the number of askers, and no half-made folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.once import made_once


def test_one_makes_and_all_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    # pytest makes its own folder for whoever asks first, and threads may ask at once.
    tmp_path_factory.getbasetemp()
    makers: list[Path] = []

    def make(folder: Path) -> None:
        makers.append(folder)
        (folder / "answer").write_text("42")

    with ThreadPoolExecutor(4) as askers:
        asked = [askers.submit(made_once, tmp_path_factory, "one", make) for _ in range(8)]
        said = [(each.result() / "answer").read_text() for each in asked]
    assert said == ["42"] * 8
    assert len(makers) == 1


def test_a_failure_leaves_nothing_and_the_next_tries_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        made_once(tmp_path_factory, "failing", fail)
    folder = made_once(tmp_path_factory, "failing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
