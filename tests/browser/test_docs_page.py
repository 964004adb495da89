"""/docs in a real browser, which holds the page to its content security policy."""

from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM
from tests.support.gateway_stack import running_stack
from tests.support.tab import Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]
ALL_OF_IT = """(async () => {
  while (!document.getElementById("schema-ChatBody")) await new Promise(requestAnimationFrame);
  return document.documentElement.outerHTML;
})()"""


async def test_it_shows_every_route_and_schema(
    browser: Browser, tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with (
        running_stack(tmp_path / "model", redis_url, cell) as stack,
        browser.tab(f"{stack.gateway.http_url}/docs") as page,
    ):
        dom = await page.look(ALL_OF_IT)
        # What the policy holds back it tells the console.
        assert not page.troubles, page.troubles
    for shown in (
        'id="chat"',
        'id="cancelResponse"',
        'id="schema-ChatBody"',
        "curl -X POST",
        "-F purpose=batch",
    ):
        assert shown in dom, shown
