"""/docs in a real browser, which holds the page to its content security policy."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.support.gateway_stack import running_stack

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]


async def test_it_shows_every_route_and_schema(tmp_path: Path, redis_url: str, cell: str) -> None:
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}")
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *flags,
            "--enable-logging=stderr",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"{stack.gateway.http_url}/docs",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        page, log = (each.decode() for each in await browser.communicate())
    assert "CONSOLE" not in log, log
    for shown in ('id="chat"', 'id="cancelRequest"', 'id="schema-ChatBody"', "curl -X POST"):
        assert shown in page, shown
