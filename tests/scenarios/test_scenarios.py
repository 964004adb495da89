"""Golden traces of the core: what it decides, in order, with the reasons beside it.

`pytest tests/scenarios --rewrite` writes what happened into the files. Only commit a rewritten
outcome if you understand the difference.
"""

from pathlib import Path

import pytest

from tests.scenarios.script import run_text

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 6


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    outcome = run_text(text)
    if request.config.getoption("--rewrite"):
        path.write_text(outcome)
        return
    assert outcome == text
