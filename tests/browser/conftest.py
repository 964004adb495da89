"""What pages are looked at with."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.node_sdk import installed
from tests.support.tab import Browser, browsing


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core, as tests/node pins it."""
    return (installed(tmp_path_factory) / "node_modules/axe-core/axe.min.js").read_text()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One for all tests, which therefore share a loop: to start it is dearer than most of them."""
    async with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
