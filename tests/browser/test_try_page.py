"""`/` in a real browser: a person who chats, stops, sets, reloads, and has only a keyboard."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kaiten.cli.keygen import mint
from kaiten.client import Client
from tests.support.answers import until
from tests.support.browser import CHROMIUM
from tests.support.tab import Browser, Tab
from tests.support.whole_stack import WORKER_FLAGS, Door, WholeStack

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]
IDLE = "!document.getElementById('send').hidden"
LAST = "document.querySelector('#log article:last-child')"
NOTE = f"{LAST}.querySelector('small').textContent"
PROBLEM = "document.getElementById('problem').textContent"
WAITS = r"/^place \d+ in the queue: ./"
BUSY = """(() => {
  const log = document.getElementById("log");
  window.heard = [];
  new MutationObserver(() => {
    if (document.getElementById("send").hidden && log.querySelector(".assistant p")?.textContent)
      heard.push(log.ariaBusy);
  }).observe(log, {subtree: true, childList: true});
})()"""
TURNS = "JSON.parse(sessionStorage.kaiten).turns"


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, whole_stack: WholeStack) -> AsyncIterator[Tab]:
    async with browser.tab(f"{whole_stack.door.http}/") as page:
        await page.size(1280, 800)
        await page.until("document.getElementById('state').textContent === 'ready'")
        yield page
        # Behind a worker that is frozen for long a gateway says that it is not ready.
        troubles = [each for each in page.troubles if not each.endswith("/ready")]
        assert not troubles, troubles


async def said(page: Tab, text: str) -> str:
    """The answer, whole."""
    await page.type(text)
    await page.press("Enter")
    await ended(page)
    return str(await page.look(f"{LAST}.querySelector('p').textContent"))


async def ended(page: Tab) -> None:
    await page.until(f"{IDLE} && /tokens/.test({LAST}?.querySelector('small').textContent)")


async def before(page: Tab) -> list[str]:
    """What the last answer is an answer to, as the gateway has it."""
    items = await page.look(
        f"fetch(`/v1/responses/${{{TURNS}.at(-1).id}}/input_items?order=asc`)"
        ".then((reply) => reply.json())"
    )
    return [each["content"][0]["text"] for each in items["data"]]


async def set_to(page: Tab, **values: str) -> None:
    for name, value in values.items():
        await page.look(
            f"(() => {{ const field = document.getElementById('{name}'); field.value = '{value}';"
            " field.dispatchEvent(new Event('input')); })()"
        )


async def test_a_conversation_by_keyboard(page: Tab) -> None:
    assert await page.look("document.activeElement.id") == "prompt"
    await tab_to(page, "SUMMARY")
    await page.press("Enter")
    for name, value in (("temperature", "0"), ("max_output_tokens", "12")):
        await tab_to(page, name)
        await page.type(value)
    await tab_to(page, "prompt", shift=True)
    await page.look(BUSY)
    first = await said(page, "Hello!")
    assert first
    # Each piece of an answer came while a reader is not to tell of it.
    assert await page.look("[...new Set(heard)].join()") == "true"
    assert await page.look("document.getElementById('log').ariaBusy") == "false"
    assert await page.look("document.getElementById('prompt').value") == ""
    assert await page.look("document.activeElement.id") == "prompt"
    second = await said(page, "And now?")
    assert await page.look("document.querySelectorAll('#log article').length") == 4
    # The conversation is one: alone the question has another answer, or another length of prompt.
    assert await before(page) == ["Hello!", first, "And now?"]
    assert second
    await page.go(await page.look("location.href"))
    await page.until("document.querySelectorAll('#log article').length === 4")
    assert await page.look(f"{LAST}.querySelector('p').textContent") == second
    # What is copied asks the same, conversation and all.
    for button, program in (("python", sys.executable), ("curl", "bash")):
        await page.look(f"document.getElementById('{button}').click()")
        await page.until(f"document.getElementById('{button}').dataset.copied")
        copied = await page.look(f"document.getElementById('{button}').dataset.copied")
        assert second in await output(program, copied)
        await set_to(page, key="any")


async def test_what_is_typed_at_once_is_not_lost(page: Tab) -> None:
    """The box is there and hears keys as soon as the page's scripts have run."""
    url = await page.look("location.href")
    for _ in range(20):
        await page.go(url)
        assert await page.look("document.activeElement.id") == "prompt"


async def tab_to(page: Tab, name: str, *, shift: bool = False) -> None:
    """From one control to the next, as far as the one with this id, or this tag."""
    for _ in range(20):
        if name in await page.look("[document.activeElement.id, document.activeElement.tagName]"):
            return
        await page.press("Tab", shift=shift)
    raise AssertionError(f"no way leads to {name}")


async def output(program: str, text: str) -> str:
    """What a program prints that is given this text."""
    process = await asyncio.create_subprocess_exec(
        *(program, "-c", text),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KAITEN_API_KEY": "any"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def asked(page: Tab) -> None:
    await page.type("Tell me about soup.")
    await page.press("Enter")
    await page.until(f"!document.getElementById('stop').hidden && {TURNS}.at(-1)?.id")


async def assert_whole(page: Tab, http: str) -> None:
    """The last answer has come, and as the gateway has it."""
    await ended(page)
    turn = await page.look(f"{TURNS}.at(-1)")
    async with httpx.AsyncClient(base_url=http, timeout=60) as client:
        whole = (await client.get(f"/v1/responses/{turn['id']}")).json()
    assert turn["text"] == whole["output"][0]["content"][0]["text"] != ""


async def test_an_answer_goes_on_after_a_reload(page: Tab, whole_stack: WholeStack) -> None:
    with whole_stack.held():
        await asked(page)
        await page.until(f"{TURNS}.at(-1).seen > 0")
        await page.reload()
        await page.until("document.querySelectorAll('#log article').length === 2")
        assert await page.look(f"{LAST}.querySelector('p').textContent") == ""
    await assert_whole(page, whole_stack.door.http)


@pytest.fixture
def own_door(whole_stack: WholeStack) -> Iterator[Door]:
    """A gateway that may be ended."""
    door = whole_stack.add_gateway(drain_s=0.2)
    try:
        door.process.start()
        door.wait_ready()
        yield door
    finally:
        whole_stack.retire(door)


async def test_an_answer_outlives_its_gateway(
    browser: Browser, own_door: Door, whole_stack: WholeStack
) -> None:
    async with browser.tab(f"{own_door.http}/") as page:
        # Ended in order it says so to who listens: that is no end of the answer.
        with whole_stack.held():
            await asked(page)
            await page.until(f"{TURNS}.at(-1).seen > 0")
            own_door.process.send(signal.SIGTERM)
            await page.until(f"{NOTE} === 'reconnecting'")
            assert await asyncio.to_thread(own_door.process.join) == 0
            own_door.process.start()
        await asyncio.to_thread(own_door.wait_ready)
        await assert_whole(page, own_door.http)
        # Whether a question arrives nobody knows: it is asked again, and is the same.
        await page.offline(is_off=True)
        await asked(page)
        await page.until(f"{NOTE} === 'reconnecting'")
        await page.offline(is_off=False)
        await assert_whole(page, own_door.http)
        own_door.process.send(signal.SIGSTOP)
        await asked(page)
        left = asyncio.create_task(page.reload())
        own_door.process.send(signal.SIGCONT)
        await left
        await assert_whole(page, own_door.http)
        # A stop is one as soon as it is asked for; what arrives all the same is ended.
        with whole_stack.held():
            own_door.process.send(signal.SIGSTOP)
            await asked(page)
            await stopped(page)
            assert await page.look(NOTE) == "stopped"
            id = await page.look(f"{TURNS}.at(-1).id")
            own_door.process.send(signal.SIGCONT)
            async with httpx.AsyncClient(base_url=own_door.http, timeout=60) as client:

                async def is_cancelled() -> bool:
                    reply = (await client.get(f"/v1/responses/{id}")).json()
                    return bool(reply.get("status") == "cancelled")

                await until(is_cancelled, "what was stopped has ended")
        assert await said(page, "Hello!")


async def stopped(page: Tab) -> None:
    """By keyboard."""
    await page.look("document.getElementById('stop').focus()")
    await page.press("Enter")
    await page.until(IDLE)


@contextmanager
def full(stack: WholeStack) -> Iterator[None]:
    """Every slot is taken until the end of the block."""
    with Client(stack.door.grpc) as client:
        slots = range(int(str(WORKER_FLAGS["slots"])))
        ids = [client.submit("The chef", max_tokens=256, ignore_eos=True) for _ in slots]
        try:
            yield
        finally:
            for id in ids:
                client.cancel(id)


async def test_an_answer_that_waits_says_so_and_is_stopped(
    page: Tab, whole_stack: WholeStack
) -> None:
    with whole_stack.held(), full(whole_stack):
        await asked(page)
        await page.until(f"{WAITS}.test({NOTE})")
        await page.reload()
        await page.look(f"{LAST}.querySelector('small').textContent = ''")
        await page.until(f"{WAITS}.test({NOTE})")
        await stopped(page)
    assert await page.look(NOTE) == "0 tokens · stopped"


async def test_a_new_conversation_begins_at_once_and_ends_the_answer_of_the_one_before(
    page: Tab, whole_stack: WholeStack
) -> None:
    with whole_stack.held():
        await asked(page)
        await page.until(f"{TURNS}.at(-1).seen > 0")
        id = await page.look(f"{TURNS}.at(-1).id")
        await page.look("void (window.isLeft = true)")
        await page.look("document.getElementById('fresh').click()")
        await page.until("!window.isLeft && document.getElementById('state').textContent")
        assert await page.look("document.querySelectorAll('#log article').length") == 0
        async with httpx.AsyncClient(base_url=whole_stack.door.http, timeout=60) as client:

            async def is_cancelled() -> bool:
                reply = (await client.get(f"/v1/responses/{id}")).json()
                return bool(reply.get("status") == "cancelled")

            await until(is_cancelled, "what nobody reads any more has ended")
    await set_to(page, max_output_tokens="4")
    assert await said(page, "Hello!")


async def test_what_is_wrong_is_said_and_the_next_one_is_fine(
    page: Tab, whole_stack: WholeStack
) -> None:
    await set_to(page, temperature="7")
    await page.type("Hello!")
    await page.press("Enter")
    await page.until(PROBLEM)
    told = await page.look(PROBLEM)
    assert told.startswith("temperature: must be a number in [0, 2]"), told
    assert page.troubles.pop().startswith("Failed to load resource")
    # What was asked is in the box again, and nowhere else.
    assert await page.look("document.getElementById('prompt').value") == "Hello!"
    assert await page.look(f"{TURNS}.length") == 0
    await set_to(page, temperature="0", max_output_tokens="4")
    assert await said(page, "")
    assert await page.look(f"{TURNS}.map((turn) => turn.role)") == ["user", "assistant"]
    assert await page.look(PROBLEM) == ""


async def test_a_conversation_may_be_longer_than_the_context(page: Tab) -> None:
    await set_to(page, temperature="0", max_output_tokens="4")
    for _ in range(4):
        assert await said(page, "la " * 400)
    assert await page.look(PROBLEM) == ""
    assert await page.look(f"{TURNS}.length") == 8


async def test_a_conversation_goes_on_after_an_answer_that_failed_or_is_kept_no_more(
    page: Tab, whole_stack: WholeStack
) -> None:
    await set_to(page, temperature="0", max_output_tokens="4")
    first = await said(page, "Hello!")
    with whole_stack.held():
        # As a proxy may add it; of the page no request has a deadline.
        await page.look(
            "window.plain = window.fetch, void (window.fetch = (path, options) => plain(path,"
            " {...options, headers: {...options?.headers, 'x-request-timeout-s': '5'}}))"
        )
        assert await said(page, "Tell me about soup.") == ""
    assert await page.look(PROBLEM)
    await page.look("void (window.fetch = plain)")
    second = await said(page, "And now?")
    assert await before(page) == ["Hello!", first, "And now?"]
    await page.look(f"fetch(`/v1/responses/${{{TURNS}.at(-1).id}}`, {{method: 'DELETE'}})")
    assert await said(page, "And then?")
    assert await before(page) == ["Hello!", first, "And now?", second, "And then?"]
    refused = [each for each in page.troubles if each.startswith("Failed to load resource")]
    assert refused
    page.troubles = [each for each in page.troubles if each not in refused]
    assert await page.look(PROBLEM) == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everybody_can_read_it_on_anything(page: Tab, tmp_path: Path, scheme: str) -> None:
    await page.colours(scheme)
    await set_to(page, temperature="0", max_output_tokens="24")
    await said(page, "Hello!")
    await said(page, "Tell me a story about a salmon plate.")
    # For the README: KAITEN_PICTURES=docs/images make test-browser
    folder = Path(os.environ.get("KAITEN_PICTURES", tmp_path))
    (folder / f"try-{scheme}.png").write_bytes(await page.picture())
    await page.size(360, 640, is_phone=True)
    await page.look("document.getElementById('settings').open = true")
    assert await page.look("document.documentElement.scrollWidth") <= 360
    assert await page.look("document.querySelector('main').clientHeight") >= 150


async def test_it_is_one_small_file_of_this_gateway(page: Tab, whole_stack: WholeStack) -> None:
    """So that it is painted at once: `benchmarks.serving.try_page` says when."""
    await page.until("performance.getEntriesByName('first-contentful-paint').length")
    loaded = await page.look(
        "['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))"
        ".map((one) => [one.name, one.initiatorType, one.transferSize])"
    )
    # What it asks of the API while it is open comes after it, and blocks no paint.
    kinds = {name.removeprefix(whole_stack.door.http): kind for name, kind, _ in loaded}
    assert kinds.pop("/") == "navigation"
    assert {*kinds.values()} <= {"fetch"}, kinds
    assert all(name.startswith(("/v1/", "/ready", "/metrics", "/health")) for name in kinds), kinds
    assert 0 < sum(size for _, _, size in loaded) <= 150_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_axe_finds_nothing(
    page: Tab, whole_stack: WholeStack, axe: str, path: str, scheme: str
) -> None:
    """Contrast, names of controls, landmarks, headings: WCAG 2.2 AA and axe's best practices."""
    await page.colours(scheme)
    await page.go(f"{whole_stack.door.http}{path}")
    if path == "/":
        await set_to(page, temperature="0", max_output_tokens="8")
        await said(page, "Hello!")
        await page.look("document.getElementById('settings').open = true")
    else:
        await page.until("!!document.getElementById('chat')")
    await page.look(f"{axe}; 0")
    found = await page.look(
        "axe.run().then(({violations, passes}) => ({passes: passes.length, violations:"
        " violations.map(({id, nodes}) => [id, nodes.map((each) => each.html).slice(0, 3)])}))"
    )
    assert found["violations"] == []
    assert found["passes"] > 10


async def test_where_keys_are_on_it_asks_for_one_once_and_again_when_something_is_asked(
    browser: Browser, whole_stack: WholeStack, tmp_path: Path
) -> None:
    key = mint("acme", "tenant")
    (tmp_path / "keys.toml").write_text(key.entry)
    door = whole_stack.add_gateway(api_keys_file=tmp_path / "keys.toml")
    focus = "document.activeElement.id"
    try:
        door.process.start()
        door.wait_ready()
        async with browser.tab(f"{door.http}/") as page:
            await page.until(f"{focus} === 'key'")
            await page.look("document.getElementById('prompt').focus()")
            refused = len(page.troubles)
            # As every three seconds: with the same key nothing is asked, and nobody is disturbed.
            await page.look("look()")
            assert await page.look(focus) == "prompt"
            assert len(page.troubles) == refused == 1
            await page.type("Hello!")
            await page.press("Enter")
            await page.until(f"{PROBLEM} && {focus} === 'key'")
            await page.type(key.key)
            await page.until("document.getElementById('model').textContent")
            await page.look("document.getElementById('prompt').focus()")
            assert await said(page, "")
            assert await page.look(PROBLEM) == ""
    finally:
        whole_stack.retire(door)
