"""`/dashboard` in a real browser, beside a stack whose slots are all taken."""

import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kaiten.cli.keygen import mint
from kaiten.client import Client
from tests.support.answers import until
from tests.support.browser import CHROMIUM
from tests.support.crowd import Crowd
from tests.support.tab import Browser, Tab
from tests.support.whole_stack import WholeStack, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]
SLOTS = 16
KEY_NAME = "kaiten-operator-key"
STATE = "document.getElementById('state').textContent"
DRAWER = "document.getElementById('drawer').textContent"
# Cells of the ribbon in which a sequence had a token, or was told to have one (kinds 1 and 3).
TOKENS_OF = """(() => {
  const number = live.owners.numbers.get(SEQUENCE), of = track();
  let count = 0;
  for (let index = of.oldest; index < of.count; index++)
    for (let slot = 0; slot < of.slots; slot++) {
      const cell = of.cell(index, slot);
      if (cell.owner === number && [1, 3].includes(cell.kind & 15)) count++;
    }
  return count;
})()"""
# As the leader tells that a worker is gone, and that it has started again.
AGAIN = """(() => {
  const [worker] = live.core.workers.values(), head = view.head;
  const told = {epoch: live.core.epoch, seq: live.core.seq, unix_ms: live.core.at};
  live.take({...told, worker_ids_gone: [worker.worker_id]});
  followLive();
  const gone = [view.workerId === worker.worker_id, view.head === head];
  const other = {...worker, worker_id: "other", address: "elsewhere:1"};
  live.take({...told, workers: [other, {...worker, worker_id: "again"}]});
  followLive();
  const followed = view.workerId;
  pause(true);
  live.take({...told, worker_ids_gone: ["again"]});
  followLive();
  const paused = view.workerId;
  pause(false);
  return [...gone, followed, paused, view.workerId];
})()"""
# The first answer of /explain is that nobody leads.
NOBODY_LEADS = """(() => {
  const real = ask;
  ask = async (...asked) => { ask = real; throw new Refused("nobody leads", 503); };
})()"""
# A pause begins; more iterations come than are kept.
LONG_PAUSE = """(() => {
  pause(true);
  const isHeld = frameNow() === live.frames.at(-1), of = track(), column = of.column(of.count - 1);
  for (let more = 0; more < of.cap + 5; more++)
    of.push({...column}, new Map(), new Set(), [], [], new Heat());
  draw(performance.now() + 1000);
  const when = document.getElementById('when').textContent;
  pause(false);
  return [isHeld, when !== 'no iteration yet'];
})()"""
# The middle of a cell of the newest iteration, of whoever is there.
CELL = """(() => {
  const box = ribbon.canvas.getBoundingClientRect(), of = track();
  const slot = [...Array(of.slots).keys()].find((slot) => of.cell(view.head - 1, slot).owner);
  return {x: box.right - ribbon.columnWidth / 2, y: box.top + (slot + .5) * ribbon.rowHeight(of)};
})()"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeStack]:
    """Few slots, few blocks, and an archive. Nobody kills a part of it."""
    folder = tmp_path_factory.mktemp("dashboard")
    small = {"slots": SLOTS, "kv_blocks": 320, "kv_host_memory_mb": 50}
    kept = {"archive_dir": folder / "archive"}
    with WholeStack(folder, worker_flags=small, scheduler_flags=kept) as stack:
        yield stack
        stack.check()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, stack: WholeStack) -> AsyncIterator[Tab]:
    async with browser.tab(f"{stack.door.http}/dashboard") as page:
        await page.size(1280, 900)
        await page.until(f"{STATE} === 'live'")
        yield page
        assert not page.troubles, page.troubles


async def until_full(page: Tab) -> None:
    """Iterations by the dozen, nobody without a reason."""
    await page.until(
        f"track()?.count > 40 && live.core.queue.length > 5 && {SLOTS} === "
        "[...live.core.sequences.values()].filter((one) => "
        "one.place?.state === 'running').length"
    )
    # What is drawn may be of when everybody waited.
    drawn = "document.querySelectorAll('#{} [data-sequence]').length > 5"
    await page.until(" && ".join(drawn.format(table) for table in ("queue", "running")))


async def ask(stack: WholeStack, max_tokens: int) -> str:
    """The id of a request that is answered."""
    asked = {"prompt": "The chef", "max_tokens": max_tokens, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.door.http, timeout=60) as http:
        reply = await http.post("/v1/completions", json=asked)
    return str(reply.json()["id"].removeprefix("cmpl-"))


async def answered(page: Tab, stack: WholeStack, max_tokens: int) -> int:
    """Somebody asked, and the page has seen all of it; the sequence's id."""
    id = await ask(stack, max_tokens)
    named = f"[...live.owners.all.values()].find((one) => one.id === 'default:{id}')"
    await page.until(f"!!{named}?.ended")
    return int(await page.look(f"{named}.sequenceId"))


async def test_every_token_is_a_cell(page: Tab, stack: WholeStack) -> None:
    """All iterations of a request are told, and none twice."""
    sequence = await answered(page, stack, 150)
    assert await page.look(TOKENS_OF.replace("SEQUENCE", str(sequence))) == 150
    assert await page.look("live.lost") == 0
    seen = f"live.owners.at(live.owners.of({sequence}))"
    assert await page.look(f"{seen}.first - {seen}.arrived") > 0
    # What the page shows of a worker stays until another is there, and for as long as it is paused.
    assert await page.look(AGAIN) == [True, True, "again", "again", "other"]


async def test_a_pause_holds_what_is_shown(page: Tab, stack: WholeStack) -> None:
    """To the moment, and for as long as it may be."""
    await answered(page, stack, 20)
    assert await page.look(LONG_PAUSE) == [True, True]


async def test_where_its_time_went_is_asked_again_where_nobody_could_say(
    page: Tab, stack: WholeStack
) -> None:
    sequence = await answered(page, stack, 20)
    await page.look(f"{NOBODY_LEADS}; drawer.open({sequence}, null)")
    await page.until(f"/, ended: /.test({DRAWER})")


async def test_what_was_seen_goes_into_files(page: Tab, stack: WholeStack, tmp_path: Path) -> None:
    """Saved and loaded it is the same, and a Chrome trace has every iteration once."""
    await page.downloads(tmp_path)
    sequence = await answered(page, stack, 60)

    async def given(button: str, name: str) -> Path:
        await page.look(f"document.getElementById('{button}').click()")

        # Its name is taken by an empty file first, which the whole one then replaces.
        async def is_there() -> bool:
            return (tmp_path / name).is_file() and (tmp_path / name).stat().st_size > 0

        await until(is_there, name)
        return tmp_path / name

    saved = await given("save", "kaiten-dashboard.json")
    await page.choose("load", saved)
    await page.until(f"{STATE} === 'a file'")
    count = TOKENS_OF.replace("SEQUENCE", str(sequence)).replace("live", "view.story")
    assert await page.look(count) == 60
    assert await page.look("document.getElementById('problem').textContent") == ""
    traces = [json.loads((await given("trace", "kaiten-trace.json")).read_text())]
    await page.look("document.getElementById('older').click()")
    older = "the archive has no iteration of the ten seconds before"
    await page.until(
        f"{STATE} === 'from the archive'"
        f" || document.getElementById('problem').textContent === '{older}'"
    )
    await page.look("document.getElementById('pause').click()")
    assert await page.look(STATE) == "live"
    (tmp_path / "kaiten-trace.json").unlink()
    traces.append(json.loads((await given("trace", "kaiten-trace.json")).read_text()))
    for trace in traces:
        drawn = [each for each in trace["traceEvents"] if each["ph"] == "X"]
        ours = [each for each in drawn if each["args"]["sequence_id"] == sequence]
        assert [each["cat"] for each in ours][:2] == ["prefill", "decode"]
        assert sum(each["args"]["iterations"] for each in ours) == 60
        assert ours[-1]["args"]["finished"]
        for slot in {each["tid"] for each in drawn}:
            of_slot = [each for each in drawn if each["tid"] == slot]
            for one, other in pairwise(sorted(of_slot, key=lambda each: each["ts"])):
                assert one["ts"] + one["dur"] <= other["ts"]
    saved.write_text('{"format": "another"}')
    await page.choose("load", saved)
    await page.until("/its format must be/.test(document.getElementById('problem').textContent)")


# Whatever is held, somebody who is seen holds: of every event there was.
NEVER_WHOLE = """(() => {
  const take = live.take.bind(live);
  window.events = window.wrong = 0;
  live.take = (told) => {
    take(told);
    window.events++;
    for (const [id, worker] of live.core.workers) {
      const {owner} = live.frames.at(-1).maps.get(id);
      if (owner.filter(Boolean).length !== worker.block_count - worker.blocks_free) window.wrong++;
    }
  };
})()"""


async def test_a_full_batch_is_seen_and_why_others_wait(page: Tab, stack: WholeStack) -> None:
    await page.look(NEVER_WHOLE)
    with Crowd(stack):
        await until_full(page)
        # Somebody may have ended since.
        await page.until(
            f"document.getElementById('workers').textContent.includes('{SLOTS} of {SLOTS}')"
        )
        await page.until(
            "document.getElementById('queue').textContent.includes('every slot is taken')"
        )
        await page.until("document.querySelectorAll('#running tr').length === 16")
        held, shared, cached = await page.look(
            "(() => { const {owner, held, cached} = live.frames.at(-1).maps.values().next().value;"
            " return [owner.filter(Boolean).length, held.filter((of) => of > 1).length,"
            " cached.filter(Boolean).length]; })()"
        )
        assert held > SLOTS
        # All prompts begin alike.
        assert shared > 0
        assert cached > 0
        note = await page.look("document.getElementById('blocks-note').textContent")
        assert re.match(r"320 of 16 tokens: \d+ held, \d+ shared", note), note
        # Who ended has left blocks that others needed since.
        await page.until(
            "/host[1-9]\\d* of \\d+/.test(document.getElementById('workers').textContent)"
        )
        note = await page.look("document.getElementById('blocks-note').textContent")
        assert re.search(r"; \d+ of \d+ in the host's memory hold what had to go$", note), note
        for kind in ("ttft", "gap"):
            await page.until(
                f"/^half below/.test(document.getElementById('{kind}-note').textContent)"
            )
    await page.until("document.getElementById('queue-note').textContent === 'nobody waits'")
    await page.until("document.getElementById('running-note').textContent === '0 sequences'")
    assert await page.look("window.events") > 3
    assert await page.look("window.wrong") == 0


async def test_a_tab_out_of_sight_is_told_nothing(page: Tab, stack: WholeStack) -> None:
    """And all there is as soon as it is looked at again."""
    see = "document.dispatchEvent(new Event('visibilitychange'))"
    await page.look(
        "Object.defineProperty(document, 'hidden', {get: () => window.isAway});"
        f"window.isAway = true; {see}"
    )
    await page.until(f"{STATE} === 'out of sight'")
    seen_at = await page.look("live.core.at")
    id = await ask(stack, 20)
    assert await page.look("live.core.at") == seen_at
    await page.look(f"window.isAway = false; {see}")
    await page.until(f"{STATE} === 'live' && live.core.at > {seen_at}")
    told = "[...live.owners.all.values()].map((one) => one.id)"
    assert f"default:{id}" not in await page.look(told)


async def test_a_cell_opens_its_request(page: Tab, stack: WholeStack) -> None:
    """By the mouse: what is under it is said, a click explains it."""
    with Crowd(stack):
        await until_full(page)
        await page.look("document.getElementById('pause').click()")
        spot = await page.look(CELL)
        await page.point(**spot)
        await page.until("/slot \\d+: default:/.test(document.getElementById('tip').textContent)")
        tip = await page.look("document.getElementById('tip').textContent")
        id = re.search("default:([0-9a-f]+)", tip)
        assert id is not None
        await page.point(**spot, click=True)
        assert id[0] in await page.look("document.getElementById('drawer-title').textContent")
        await page.until("document.querySelectorAll('#drawer tbody tr').length > 2")
        told = await page.look(DRAWER)
        async with httpx.AsyncClient(base_url=stack.door.http, timeout=60) as http:
            explained = (await http.get(f"/v1/requests/{id[1]}/explain")).json()
        for interval in explained["choices"][0]["intervals"][:2]:
            assert interval["why"] in told
        await page.press("Escape")
        assert await page.look("document.getElementById('drawer').hidden")


async def test_who_ends_while_it_is_explained_is_explained_to_its_end(
    page: Tab, stack: WholeStack
) -> None:
    """As of one whose end this page heard of before that is committed."""
    with Crowd(stack) as crowd:
        last = crowd.ids[-1]
        named = f"[...live.owners.all.values()].find((one) => one.id === 'default:{last}')"
        await page.until(f"!!{named}")
        await page.look(f"{named}.ended = true; drawer.open({named}.sequenceId, null)")
        await page.until(f"/ so far/.test({DRAWER})")
        with Client(stack.door.grpc) as client:
            client.cancel(last)
        await page.until(f"/, ended: /.test({DRAWER})")


async def test_by_keyboard_alone(page: Tab, stack: WholeStack) -> None:
    with Crowd(stack):
        await until_full(page)
        await page.press(" ")
        assert await page.look(STATE) == "paused"
        stands = await page.look("view.head")
        await page.until(f"track().count > {stands} + 5")
        assert await page.look("view.head") == stands
        for _ in range(30):
            await page.press("Tab")
            if await page.look("document.activeElement.id") == "ribbon":
                break
        for key in ("ArrowLeft", "ArrowLeft", "ArrowDown", "ArrowUp", "ArrowDown"):
            await page.press(key)
        # The first key goes to the newest one.
        cursor = await page.look("ribbon.cursor")
        assert cursor == {"index": stands - 2, "slot": 1}
        # Somebody's end may be here.
        while "slot 1: default:" not in await page.look(
            "document.getElementById('spoken').textContent"
        ):
            await page.press("ArrowLeft")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#drawer tbody tr').length > 2")
        assert await page.look("document.activeElement.id") == "drawer-title"
        await page.press("Escape")
        assert await page.look("document.activeElement.id") == "ribbon"
        # The slider is the time, and what is beside it is of that time.
        await page.look("document.getElementById('scrub').focus()")
        await page.press("ArrowLeft")
        assert await page.look("view.head") == stands - 1
        then = await page.look("track().column(view.head - 1).at")
        assert await page.look("frameNow().at") <= then
        await page.press(" ")
        assert await page.look(STATE) == "live"
        await page.until(f"view.head > {stands} + 5")


async def test_a_key_does_not_lose_who_pressed_it(page: Tab, stack: WholeStack) -> None:
    """By a button that has to wait, a row that was made anew, and a cell of another worker."""
    focus = "document.activeElement.id"
    with Crowd(stack):
        await until_full(page)
        await page.look("document.getElementById('older').focus()")
        await page.press("Enter")
        await page.until(f"{STATE} === 'from the archive'")
        assert await page.look(focus) == "older"
        await page.look("document.getElementById('pause').click()")
        await until_full(page)
        await page.look("[...document.querySelectorAll('#queue [data-sequence]')].at(-1).focus()")
        chosen = await page.look("document.activeElement.dataset.sequence")
        await page.press("Enter")
        assert await page.look(focus) == "drawer-title"
        await page.until("!drawer.opener.isConnected")
        await page.press("Escape")
        assert await page.look("document.activeElement.dataset.sequence") == chosen
        await page.look("document.getElementById('ribbon').focus()")
        await page.press("ArrowLeft")
        assert await page.look("ribbon.cursor !== null")
        await page.look("chooseWorker('another')")
        assert await page.look("ribbon.cursor") is None
        await page.look("document.getElementById('pause').click()")


async def test_a_click_that_takes_its_time_is_one(page: Tab, stack: WholeStack) -> None:
    """Rows are not made anew under a finger, nor does one go away when others end."""
    with Crowd(stack) as crowd, Client(stack.door.grpc) as client:
        await until_full(page)
        await page.look(
            "document.addEventListener('mousedown', ({target}) => { window.since = tablesAt;"
            " window.hit = target.closest('#running [data-sequence]')?.dataset.sequence; })"
        )
        hit = None
        # Rows may move between a look at one and the click.
        while not hit:
            spot = await page.look(
                "(() => { const {x, y, height} ="
                " document.querySelector('#running [data-sequence]').getBoundingClientRect();"
                " return {x: x + 4, y: y + height / 2}; })()"
            )
            async with page.held(**spot):
                hit = await page.look("window.hit")
                named = f"live.owners.at(live.owners.of({hit})).id"
                name = await page.look(named) if hit else ""
                if hit:
                    crowd.close()
                    for id in crowd.ids:
                        if not name.endswith(id):
                            client.cancel(id)
                    await page.until("!live.core.queue.length && tablesAt > window.since + 800")
        assert await page.look(f"drawer.id === {hit} && !$('drawer').hidden")


async def test_what_was_before_the_page_comes_from_the_archive(
    browser: Browser, stack: WholeStack
) -> None:
    with Crowd(stack):
        wait_until(lambda: stack.state().waiting and stack.state().running, "a queue")
        async with browser.tab(f"{stack.door.http}/dashboard") as page:
            await page.until("track()?.count > 5")
            first = await page.look("track().column(track().oldest).at")
            await page.until("!!document.querySelector('#running [data-sequence]')")
            await page.look("document.querySelector('#running [data-sequence]').click()")
            assert not await page.look("$('drawer').hidden")
            await page.look("document.getElementById('older').click()")
            await page.until(f"{STATE} === 'from the archive'")
            assert await page.look("$('drawer').hidden"), "its request is another story's"
            # What its newest iteration says of the worker.
            await page.until(
                "(() => { const {busy, free} = track().column(Math.ceil(view.head) - 1);"
                " const [slots, blocks] = document.querySelectorAll('#workers .meter');"
                " const all = frameNow().workers.get(view.workerId).block_count;"
                " return slots.textContent === `slots${busy} of ${track().slots}` &&"
                " blocks.textContent === `blocks${free === null ? '?' : all - free} of ${all}`;"
                " })()"
            )
            assert await page.look("track().count") > 0
            assert await page.look("track().column(track().count - 1).at") <= first
            assert await page.look(f"track().slots === {SLOTS}")
            named = "[...view.story.owners.all.values()].map((one) => one.id)"
            assert any(id.startswith("default:") for id in await page.look(named))
            await page.look("document.getElementById('pause').click()")
            assert await page.look(STATE) == "live"
            assert not page.troubles, page.troubles


async def test_continuous_beside_static(
    page: Tab, stack: WholeStack, axe: str, tmp_path: Path
) -> None:
    """The burst is served, and the same lengths are played under `static`."""
    await page.until("live.core.workers.size === 1")
    await page.look("document.getElementById('burst').click()")
    await page.until("!document.getElementById('compare-pair').hidden")
    note = await page.look("document.getElementById('compare-note').textContent")
    assert re.fullmatch(
        r"64 requests with outputs of 2 to \d+ tokens\. Both played, static takes [\d.]+ times"
        r" the iterations and [\d.]+ times the time of fair\.",
        note,
    ), note
    tokens, counts = await page.look(
        "[comparison.pair.map((of) => of.columns.slice(0, of.count)"
        ".reduce((sum, column) => sum + column.tokens, 0)), comparison.pair.map((of) => of.count)]"
    )
    assert (
        tokens[0]
        == tokens[1]
        == await page.look("raggedLengths(64).reduce((sum, length) => sum + length)")
    )
    assert counts[1] > counts[0]
    folder = Path(os.environ.get("KAITEN_PICTURES", tmp_path))
    (folder / "dashboard-compare.png").write_bytes(await page.picture())
    await page.look(f"{axe}; 0")
    await no_violation(page)
    await page.look("document.getElementById('compare-close').click()")
    assert await page.look("document.getElementById('compare').hidden")
    assert await page.look("document.activeElement.id") == "burst"


async def test_where_keys_are_on_it_is_for_operators(
    browser: Browser, stack: WholeStack, tmp_path: Path
) -> None:
    keys = {role: mint("acme", role) for role in ("tenant", "operator")}
    (tmp_path / "keys.toml").write_text("".join(each.entry for each in keys.values()))
    door = stack.add_gateway(api_keys_file=tmp_path / "keys.toml")
    try:
        door.process.start()
        door.wait_ready()
        async with browser.tab(f"{door.http}/dashboard") as page:
            is_asked = "document.getElementById('key-dialog').open"
            why = "document.getElementById('key-why').textContent"
            await page.until(is_asked)
            assert await page.look("track()?.count || 0") == 0
            await page.type(keys["tenant"].key)
            await page.press("Enter")
            await page.until(f"{is_asked} && /operator/.test({why})")
            await page.look("document.getElementById('key-input').select()")
            await page.type(keys["operator"].key)
            await page.press("Enter")
            await page.until(f"{STATE} === 'live'")
            # Escape is no answer, whatever was answered before.
            kept = f"sessionStorage.getItem('{KEY_NAME}')"
            await page.look("document.getElementById('key').click()")
            await page.look("document.getElementById('key-input').select()")
            await page.type("another")
            await page.press("Escape")
            await page.until(f"!{is_asked}")
            assert await page.look(kept) == keys["operator"].key
            await page.reload()
            await page.until(f"{STATE} === 'live'")
            # A key that is gone is asked for, though its watch began long before.
            (tmp_path / "others.toml").write_text(keys["tenant"].entry)
            (tmp_path / "others.toml").rename(tmp_path / "keys.toml")
            await page.until(is_asked)
            # Nothing else was refused, and nothing else is wrong.
            refused = [re.findall(r"status of (\d+)", each) for each in page.troubles]
            assert refused == [["401"], ["403"], ["401"]]
    finally:
        stack.retire(door)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everybody_can_read_it_on_anything(
    page: Tab, stack: WholeStack, axe: str, scheme: str, tmp_path: Path
) -> None:
    """axe finds nothing, with the drawer and without; nothing is wider than a phone."""
    await page.colours(scheme)
    with Crowd(stack):
        await until_full(page)
        await page.until("track().count > 160")
        # For the docs: KAITEN_PICTURES=docs/images make test-browser
        folder = Path(os.environ.get("KAITEN_PICTURES", tmp_path))
        (folder / f"dashboard-{scheme}.png").write_bytes(await page.picture())
        await page.look(f"{axe}; 0")
        await no_violation(page)
        await page.look("document.querySelector('#running [data-sequence]').click()")
        await page.until("document.querySelectorAll('#drawer tbody tr').length > 2")
        await no_violation(page)
        await page.size(1280, 720)
        assert await page.look("document.documentElement.scrollWidth") <= 1280
        await page.size(360, 740, is_phone=True)
        assert await page.look("document.documentElement.scrollWidth") <= 360
        await page.press("Escape")
        assert await page.look("document.documentElement.scrollWidth") <= 360
        (folder / f"dashboard-phone-{scheme}.png").write_bytes(await page.picture())


async def no_violation(page: Tab) -> None:
    found = await page.look(
        "axe.run().then(({violations, passes}) => ({passes: passes.length, violations:"
        " violations.map(({id, nodes}) => [id, nodes.map((each) => each.html).slice(0, 3)])}))"
    )
    assert found["violations"] == []
    assert found["passes"] > 10
