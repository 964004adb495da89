"""`/` in a real browser: a person who chats, stops, sets, reloads, and has only a keyboard."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM
from tests.support.tab import Tab, tab
from tests.support.whole_stack import WholeStack

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]
IDLE = "!document.getElementById('send').hidden"
LAST = "document.querySelector('#log article:last-child')"


@pytest.fixture
async def page(whole_stack: WholeStack, tmp_path: Path) -> AsyncIterator[Tab]:
    async with tab(tmp_path / "profile", f"{whole_stack.door.http}/") as page:
        await page.size(1280, 800)
        await page.until("document.getElementById('state').textContent === 'ready'")
        yield page
        assert not page.troubles, page.troubles


async def said(page: Tab, text: str) -> str:
    """The answer, whole."""
    await page.type(text)
    await page.press("Enter")
    await page.until(f"{IDLE} && /tokens/.test({LAST}?.querySelector('small').textContent)")
    return str(await page.look(f"{LAST}.querySelector('p').textContent"))


async def set_to(page: Tab, **values: str) -> None:
    for name, value in values.items():
        await page.look(
            f"(() => {{ const field = document.getElementById('{name}'); field.value = '{value}';"
            " field.dispatchEvent(new Event('input')); })()"
        )


async def test_a_conversation_by_keyboard(page: Tab, tmp_path: Path) -> None:
    assert await page.look("document.activeElement.id") == "prompt"
    await set_to(page, temperature="0", max_output_tokens="12")
    first = await said(page, "Hello!")
    assert first
    assert await page.look("document.getElementById('prompt').value") == ""
    assert await page.look("document.activeElement.id") == "prompt"
    second = await said(page, "And now?")
    assert await page.look("document.querySelectorAll('#log article').length") == 4
    # The conversation is one: alone the question has another answer, or another length of prompt.
    ids = await page.look(
        "JSON.parse(sessionStorage.kaiten).turns.filter((turn) => turn.id).map((turn) => turn.id)"
    )
    items = await page.look(
        f"fetch('/v1/responses/{ids[1]}/input_items?order=asc').then((reply) => reply.json())"
    )
    assert [each["content"][0]["text"] for each in items["data"]] == ["Hello!", first, "And now?"]
    assert second
    await page.go(await page.look("location.href"))
    await page.until("document.querySelectorAll('#log article').length === 4")
    assert await page.look(f"{LAST}.querySelector('p').textContent") == second


@contextmanager
def frozen(stack: WholeStack) -> Iterator[None]:
    """No answer goes on before the end of the block."""
    stack.worker.send(signal.SIGSTOP)
    try:
        yield
    finally:
        stack.worker.send(signal.SIGCONT)


async def asked(page: Tab) -> None:
    await page.type("Tell me about soup.")
    await page.press("Enter")
    await page.until("JSON.parse(sessionStorage.kaiten).turns.at(-1)?.id")


async def test_an_answer_goes_on_after_a_reload(page: Tab, whole_stack: WholeStack) -> None:
    with frozen(whole_stack):
        await asked(page)
        await page.reload()
        await page.until("document.querySelectorAll('#log article').length === 2")
        assert await page.look(f"{LAST}.querySelector('p').textContent") == ""
    await page.until(f"{IDLE} && /tokens/.test({LAST}?.querySelector('small').textContent)")
    turn = await page.look("JSON.parse(sessionStorage.kaiten).turns.at(-1)")
    whole = await page.look(f"fetch('/v1/responses/{turn['id']}').then((reply) => reply.json())")
    assert turn["text"] == whole["output"][0]["content"][0]["text"] != ""


async def test_an_answer_is_stopped(page: Tab, whole_stack: WholeStack) -> None:
    with frozen(whole_stack):
        await asked(page)
        await page.look("document.getElementById('stop').focus()")
        await page.press("Enter")
        await page.until(IDLE)
    note = await page.look(f"{LAST}.querySelector('small').textContent")
    assert note == "0 tokens · stopped"


async def test_what_is_wrong_is_said_and_the_next_one_is_fine(page: Tab) -> None:
    await set_to(page, temperature="7")
    await page.type("Hello!")
    await page.press("Enter")
    await page.until("document.getElementById('problem').textContent")
    told = await page.look("document.getElementById('problem').textContent")
    assert told.startswith("temperature: must be a number in [0, 2]"), told
    assert page.troubles.pop().startswith("Failed to load resource")
    await set_to(page, temperature="0", max_output_tokens="4")
    assert await said(page, "Hello!")
    assert await page.look("document.getElementById('problem').textContent") == ""
    for button, word in (("curl", "curl http"), ("python", "client.responses.create")):
        await page.look(f"document.getElementById('{button}').click()")
        assert word in await page.look(f"document.getElementById('{button}').dataset.copied")


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
