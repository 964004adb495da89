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

from tests.support.browser import CHROMIUM, Site
from tests.support.gateway_stack import MODEL, Stack, running_stack
from tests.support.node_sdk import installed
from tests.support.tab import Browser

# Many on a machine that does other things.
WAIT_S = 120.0

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
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
# The official SDK in the page. What answers when is for it to decide, by headers it must see.
SDK = """
  const { default: OpenAI } = await import("/openai/index.mjs");
  let tries = 0;
  const client = new OpenAI({baseURL: gateway + "/v1", apiKey: "any", dangerouslyAllowBrowser: true,
    fetch: (...asked) => { tries += 1; return fetch(...asked); }});
  const messages = [{role: "user", content: "x"}];
  async function named(prompt) {
    const body = {model: MODEL, prompt, max_tokens: 4};
    return client.completions.create(body, {headers: {"idempotency-key": "page"}});
  }
  await attempt("chat", async () => {
    const answer = await client.chat.completions.create({model: MODEL, messages});
    found.id = answer._request_id;
    return answer.choices[0].message.content;
  });
  await attempt("stream", async () => {
    const asked = client.chat.completions.create({model: MODEL, messages, stream: true});
    const {data, request_id} = await asked.withResponse();
    found.stream_id = request_id;
    let text = "";
    for await (const chunk of data) text += chunk.choices[0]?.delta?.content ?? "";
    return text;
  });
  await attempt("models", async () => (await client.models.list()).data[0].id);
  tries = 0;
  await attempt("refusal", () => client.completions.create({model: MODEL, prompt: "x", n: 0}).catch(
    (error) => [error.constructor.name, error.status, error.param, error.requestID?.length]));
  await attempt("conflict", async () => {
    await named("x");
    return named("y").catch((error) => [error.constructor.name, error.status]);
  });
  found.tries = tries;
""".replace("MODEL", json.dumps(MODEL))


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


@pytest.fixture
def sdk_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(installed(tmp_path_factory) / "node_modules") as site:
        yield site


async def visit(browser: Browser, site: Site, stack: Stack, script: str) -> dict[str, Any]:
    """What the site's page found out, run in a browser on the gateway's machine."""
    gateway = json.dumps(f"http://localhost:{stack.gateway.service.http_port}")
    site.page = PAGE.replace("GATEWAY", gateway).replace("SCRIPT;", script)
    async with browser.tab(f"{site.origin}/"):
        return await asyncio.to_thread(site.reports.get, timeout=WAIT_S)


async def shown(browser: Browser, url: str) -> str:
    """What a browser has of a URL after it followed the name in it."""
    async with browser.tab(url) as page:
        return str(await page.look("document.documentElement.outerHTML"))


@asynccontextmanager
async def serving(
    tmp_path: Path, redis_url: str, cell: str, **changes: Any
) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "model", redis_url, cell, **changes) as stack:
        stack.says("four words are said")
        yield stack


async def test_a_page_of_another_site_does_not_make_the_model_speak(
    browser: Browser, site: Site, tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with serving(tmp_path, redis_url, cell) as stack:
        found = await visit(browser, site, stack, ATTACK)
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
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http:
            reply = await http.post("/v1/completions", json={"prompt": "x"})
        assert (reply.status_code, len(stack.scheduler.submits)) == (200, 1)


@pytest.mark.parametrize(("allowed", "is_read"), [((), False), (("evil.example",), True)])
async def test_a_name_led_to_this_machine_gets_no_answer(
    browser: Browser,
    tmp_path: Path,
    redis_url: str,
    cell: str,
    allowed: tuple[str, ...],
    is_read: bool,
) -> None:
    """To the browser this is the site's own origin: its scripts may read whatever comes."""
    async with serving(tmp_path, redis_url, cell, allowed_hosts=allowed) as stack:
        url = f"http://evil.example:{stack.gateway.service.http_port}/openapi.json"
        dom = await shown(browser, url)
    assert (f'"{MODEL}"' in dom) is is_read, dom[:1000]
    assert ("one of --allowed-hosts" in dom) is not is_read, dom[:1000]


async def test_a_page_that_is_allowed_may_use_the_official_sdk(
    browser: Browser, sdk_site: Site, tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with serving(tmp_path, redis_url, cell, cors_origins=(sdk_site.origin,)) as stack:
        found = await visit(browser, sdk_site, stack, SDK)
        assert (len(found.pop("id")), len(found.pop("stream_id"))) == (24, 24)
        assert found == {
            "chat": "four words are said",
            "stream": "four words are said",
            "models": MODEL,
            "refusal": ["BadRequestError", 400, "n", 24],
            "conflict": ["ConflictError", 409],
            # It saw that neither can ever succeed.
            "tries": 3,
        }
        assert len(stack.scheduler.submits) == 3


async def test_another_page_may_not_use_it(
    browser: Browser, sdk_site: Site, tmp_path: Path, redis_url: str, cell: str
) -> None:
    allowed = ("http://other.example", sdk_site.origin.replace("page.", "other."))
    async with serving(tmp_path, redis_url, cell, cors_origins=allowed) as stack:
        script = SDK.replace("dangerously", "maxRetries: 0, dangerously")
        found = await visit(browser, sdk_site, stack, script)
        tries = {name: found[name] for name in ("chat", "stream", "models", "conflict")}
        assert set(tries.values()) == {"Error"}, found
        assert found["refusal"][0] == "APIConnectionError"
        assert stack.scheduler.submits == []
