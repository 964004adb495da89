"""What pages are looked at with."""

import pytest

from tests.support.node_sdk import installed


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, as tests/node pins it."""
    return (installed(tmp_path_factory) / "node_modules/axe-core/axe.min.js").read_text()
