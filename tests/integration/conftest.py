"""Fixtures for tests against real services."""

from collections.abc import AsyncIterator

import pytest

from ledger import Ledger


@pytest.fixture
async def ledger(redis_url: str, cell: str) -> AsyncIterator[Ledger]:
    """A handle on a cell of its own."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    yield ledger
    await ledger.close()
