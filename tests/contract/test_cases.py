"""docs/cases.md names tests; they exist, and every row says one or why there is none."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[str]:
    lines = (ROOT / "docs" / "cases.md").read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| case |")]


def test_every_case_names_its_test_or_the_reason() -> None:
    assert len(rows()) > 40
    for row in rows():
        answer = row.split("|")[2]
        assert NAMED.search(answer) or "not covered" in answer or "python -m" in answer, row


def test_every_named_test_exists() -> None:
    for path, name in (found for row in rows() for found in NAMED.findall(row)):
        file = ROOT / "tests" / path
        assert file.exists(), path
        assert not name or re.search(rf"def {name}\(", file.read_text()), f"{path}::{name}"
