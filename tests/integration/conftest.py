"""Fixtures for tests against real services."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ledger import Ledger, LedgerLimits
from tests.support.gateway_stack import WAIT_S, Stack, running_stack


@pytest.fixture
async def ledger(redis_url: str, cell: str) -> AsyncIterator[Ledger]:
    """A handle on a cell of its own. Who is put aside for long asks again."""
    ledger = await Ledger.connect(
        redis_url, cell=cell, limits=LedgerLimits(retry_s=WAIT_S, operation_timeout_s=WAIT_S)
    )
    yield ledger
    await ledger.close()


@pytest.fixture
def stack_options() -> dict[str, Any]:
    """What `running_stack` is given besides; a module may say otherwise."""
    return {}


@pytest.fixture
async def stack(
    tmp_path: Path, redis_url: str, cell: str, stack_options: dict[str, Any]
) -> AsyncIterator[Stack]:
    """A gateway and its scripted scheduler on a cell of their own."""
    async with running_stack(tmp_path / "model", redis_url, cell, **stack_options) as running:
        yield running


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the stack's HTTP door."""
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as client:
        yield client
