"""/docs in a real browser, which holds the page to its content security policy."""

import asyncio
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, chromium
from tests.support.gateway_stack import running_stack

# A browser takes seconds to start, and many on a machine that does other things.
WAIT_S = 120.0

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]


async def test_it_shows_every_route_and_schema(tmp_path: Path, redis_url: str, cell: str) -> None:
    log = tmp_path / "log"
    flags = ("--enable-logging", f"--log-file={log}", "--virtual-time-budget=20000", "--dump-dom")
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        url = f"{stack.gateway.http_url}/docs"
        async with (
            chromium(tmp_path / "profile", *flags, url) as browser,
            asyncio.timeout(WAIT_S),
        ):
            page = (await browser.communicate())[0].decode()
    # What the policy holds back it tells the console.
    assert "CONSOLE" not in log.read_text(), log.read_text()
    for shown in (
        'id="chat"',
        'id="cancelResponse"',
        'id="schema-ChatBody"',
        "curl -X POST",
        "-F purpose=batch",
    ):
        assert shown in page, shown
