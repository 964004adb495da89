"""What a web page can do to a gateway on its visitor's machine, by a real browser.

A site of the test's own serves the page, which tries and tells the site what came of it. All names
in `.example` lead to 127.0.0.1, as an attacker's would after DNS rebinding.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import CHROMIUM, Site, chromium
from tests.support.gateway_stack import MODEL, Stack, running_stack

# A browser takes seconds to start, and many on a machine that does other things.
WAIT_S = 120.0

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]

PAGE = """<!doctype html><title>page</title><script>
const gateway = GATEWAY, found = {};
const ask = {method: "POST", body: JSON.stringify({prompt: "x", max_tokens: 4})};
const json = {...ask, headers: {"content-type": "application/json"}};
async function attempt(name, work) {
  try { found[name] = await work(); } catch (error) { found[name] = error.name; }
}
function send_form() {
  document.body.innerHTML = `<iframe name="f"></iframe><form method="post" enctype="text/plain"
    target="f" action="${gateway}/v1/completions"><input name='{"prompt":"x","user":"' value='"}'>`;
  return new Promise((done) => {
    document.querySelector("iframe").onload = () => done("sent");
    document.querySelector("form").submit();
  });
}
addEventListener("load", async () => {
  SCRIPT;
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
});
</script><body>"""
# Simple requests, which a browser sends without asking; then what it asks leave for.
ATTACK = """
  await attempt("text", async () => (await fetch(gateway + "/v1/completions",
    {...ask, mode: "no-cors"})).type);
  await attempt("blob", async () => (await fetch(gateway + "/v1/completions",
    {...ask, mode: "no-cors", body: new Blob([ask.body])})).type);
  await attempt("form", send_form);
  await attempt("json", async () => (await fetch(gateway + "/v1/completions", json)).status);
  await attempt("read", async () => (await fetch(gateway + "/v1/models")).status);
"""
# As OpenAI's SDK asks from a page, and reads what it decides by.
SDK = """
  const headers = {"authorization": "Bearer any", "content-type": "application/json",
    "x-stainless-arch": "unknown", "x-stainless-lang": "js", "x-stainless-os": "Unknown",
    "x-stainless-package-version": "6.0.0", "x-stainless-retry-count": "0",
    "x-stainless-runtime": "browser:chrome", "x-stainless-runtime-version": "1",
    "x-stainless-timeout": "600", "idempotency-key": "page"};
  const body = JSON.stringify({prompt: "x", stream: true});
  await attempt("stream", async () => {
    const reply = await fetch(gateway + "/v1/completions", {method: "POST", headers, body});
    found.id = reply.headers.get("x-request-id");
    return await reply.text();
  });
  await attempt("refusal", async () => {
    const reply = await fetch(gateway + "/v1/completions", {method: "POST", headers, body: "{"});
    return [reply.status, reply.headers.get("x-should-retry"), (await reply.json()).error.type];
  });
"""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


async def visit(site: Site, stack: Stack, folder: Path, script: str) -> dict[str, Any]:
    """What the site's page found out, run in a browser on the gateway's machine."""
    gateway = json.dumps(f"http://localhost:{stack.gateway.service.http_port}")
    site.page = PAGE.replace("GATEWAY", gateway).replace("SCRIPT;", script)
    async with chromium(folder, site.origin):
        return await asyncio.to_thread(site.reports.get, timeout=WAIT_S)


async def shown(url: str, folder: Path) -> str:
    """What a browser has of a URL after it followed the name in it."""
    async with chromium(folder, "--dump-dom", url) as process, asyncio.timeout(WAIT_S):
        dom, _ = await process.communicate()
    return dom.decode()


@asynccontextmanager
async def serving(
    tmp_path: Path, redis_url: str, cell: str, **changes: Any
) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "model", redis_url, cell, **changes) as stack:
        stack.says("four words are said")
        yield stack


async def test_a_page_of_another_site_does_not_make_the_model_speak(
    site: Site, tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with serving(tmp_path, redis_url, cell) as stack:
        found = await visit(site, stack, tmp_path / "profile", ATTACK)
        # The browser did send the first three; of the others it was not given leave.
        assert found == {
            "text": "opaque",
            "blob": "opaque",
            "form": "sent",
            "json": "TypeError",
            "read": "TypeError",
        }
        assert stack.scheduler.submits == []
        # A program beside the browser is served.
        async with httpx.AsyncClient(base_url=stack.gateway.http_url) as http:
            reply = await http.post("/v1/completions", json={"prompt": "x"})
        assert (reply.status_code, len(stack.scheduler.submits)) == (200, 1)


@pytest.mark.parametrize(("allowed", "is_read"), [((), False), (("evil.example",), True)])
async def test_a_name_led_to_this_machine_gets_no_answer(
    tmp_path: Path, redis_url: str, cell: str, allowed: tuple[str, ...], is_read: bool
) -> None:
    """To the browser this is the site's own origin: its scripts may read whatever comes."""
    async with serving(tmp_path, redis_url, cell, allowed_hosts=allowed) as stack:
        url = f"http://evil.example:{stack.gateway.service.http_port}/openapi.json"
        dom = await shown(url, tmp_path / "profile")
    assert (f'"{MODEL}"' in dom) is is_read, dom[:1000]
    assert ("one of --allowed-hosts" in dom) is not is_read, dom[:1000]


async def test_a_page_that_is_allowed_may_do_what_the_sdk_does(
    site: Site, tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with serving(tmp_path, redis_url, cell, cors_origins=(site.origin,)) as stack:
        found = await visit(site, stack, tmp_path / "profile", SDK)
        assert "data: [DONE]" in found["stream"]
        assert len(found["id"]) == 24
        assert found["refusal"] == [400, "false", "invalid_request_error"]
        assert len(stack.scheduler.submits) == 1
