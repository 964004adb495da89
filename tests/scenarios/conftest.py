"""`pytest tests/scenarios --rewrite` writes what happened into the files. Read the diff."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="replace the outcomes in the scenarios")
