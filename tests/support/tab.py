"""Pages in a real browser, driven as a person would: by keys, clicks and looks.

Chromium's own protocol over a pipe (`--remote-debugging-pipe`): messages of JSON that end with a
zero byte.
"""

import asyncio
import base64
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.browser import command

WAIT_S = 60.0
POLL_S = 0.03
KEYS = {"Enter": ("\r", 13), "Tab": ("\t", 9), "Escape": ("", 27), " ": (" ", 32)}
KEYS |= {f"Arrow{name}": ("", 37 + at) for at, name in enumerate(("Left", "Up", "Right", "Down"))}
# Of a document that nobody has left.
NEW = "!window.isLeft"
MESSAGE_BYTES_MAX = 64 << 20


class Tab:
    """One page. `troubles` is what its console said that is an error."""

    def __init__(self, browser: "Browser", session_id: str, context_id: str) -> None:
        self._browser = browser
        self._session_id = session_id
        self._context_id = context_id
        self.troubles: list[str] = []

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Performance.enable", timeDomain="threadTicks")
        await self.go(url)

    async def go(self, url: str) -> None:
        await self._leave()
        await self._call("Page.navigate", url=url)
        await self.until(
            f"{NEW} && location.href === {json.dumps(url)} && document.readyState !== 'loading'"
        )

    async def reload(self) -> None:
        """What is looked at afterwards is of the new document, whose scripts have run."""
        await self._leave()
        await self._call("Page.reload")
        await self.until(f"{NEW} && document.readyState !== 'loading'")

    async def _leave(self) -> None:
        await self.look("void (window.isLeft = true)")

    async def look(self, expression: str) -> Any:
        """What an expression of the page is."""
        found = await self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        began_at = time.monotonic()
        while time.monotonic() - began_at < WAIT_S:
            # A page that is being left cannot be asked.
            with suppress(AssertionError):
                if await self.look(expression):
                    return
            await asyncio.sleep(POLL_S)
        shown = await self.look("document.body.innerText")
        raise AssertionError(f"still not after {WAIT_S:g} s: {expression}\nThe page: {shown}")

    async def type(self, text: str) -> None:
        await self._call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        text, code = KEYS[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        pressed["modifiers"] = 8 if shift else 0
        kind = "keyDown" if text else "rawKeyDown"
        await self._call("Input.dispatchKeyEvent", type=kind, text=text, **pressed)
        await self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def point(self, x: float, y: float, *, click: bool = False) -> None:
        """The mouse goes there, in CSS pixels of what is to be seen."""
        await self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            async with self.held(x, y):
                pass

    @asynccontextmanager
    async def held(self, x: float, y: float) -> AsyncIterator[None]:
        """A click there that takes as long as the block."""
        click = {"x": x, "y": y, "button": "left", "clickCount": 1}
        await self._call("Input.dispatchMouseEvent", type="mousePressed", **click)
        yield
        await self._call("Input.dispatchMouseEvent", type="mouseReleased", **click)

    async def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        await self._call("Emulation.setDeviceMetricsOverride", **shape)

    async def colours(self, scheme: str) -> None:
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        await self._call("Emulation.setEmulatedMedia", features=wanted)

    async def offline(self, *, is_off: bool) -> None:
        await self._call("Network.enable")
        limits = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self._call("Network.emulateNetworkConditions", offline=is_off, **limits)

    async def downloads(self, folder: Path) -> None:
        """Files that the page gives away go there."""
        asked = {"behavior": "allow", "downloadPath": str(folder)}
        await self._browser.call(
            "Browser.setDownloadBehavior", browserContextId=self._context_id, **asked
        )

    async def choose(self, id: str, path: Path) -> None:
        """A file, for the field with this id."""
        found = await self._call(
            "Runtime.evaluate", expression=f"document.getElementById({json.dumps(id)})"
        )
        field = found["result"]["objectId"]
        await self._call("DOM.setFileInputFiles", files=[str(path)], objectId=field)

    async def figures(self) -> dict[str, float]:
        """What Chromium counts, times in seconds of the page's main thread that it ran."""
        found = await self._call("Performance.getMetrics")
        return {each["name"]: each["value"] for each in found["metrics"]}

    async def picture(self) -> bytes:
        """A PNG of what is to be seen."""
        found = await self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])

    async def _call(self, method: str, **parameters: Any) -> Any:
        return await self._browser.call(method, self._session_id, **parameters)

    def hear(self, method: str, told: dict[str, Any]) -> None:
        """What the page says of itself."""
        match method:
            case "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(told["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if told["type"] == "error":
                self.troubles.append(json.dumps(told["args"])[:500])
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                entry = told["entry"]
                self.troubles.append(f"{entry['text']} {entry.get('url', '')}")


class Browser:
    """Chromium. Each tab is of a person of its own: none sees what another has stored."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}

    @asynccontextmanager
    async def tab(self, url: str) -> AsyncIterator[Tab]:
        made = await self.call("Target.createBrowserContext")
        of_context = {"browserContextId": made["browserContextId"]}
        try:
            target = await self.call("Target.createTarget", url="about:blank", **of_context)
            attached = await self.call(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )
            session_id = attached["sessionId"]
            page = self._tabs[session_id] = Tab(self, session_id, made["browserContextId"])
            await page.open(url)
            yield page
        finally:
            await self.call("Target.disposeBrowserContext", **of_context)

    async def call(self, method: str, session_id: str = "", **parameters: Any) -> Any:
        """What it answers; AssertionError: it refuses, or has ended."""
        assert not self._reader.at_eof(), "the browser has ended"
        id = next(self._ids)
        future = self._waiting[id] = asyncio.get_running_loop().create_future()
        session = {"sessionId": session_id} if session_id else {}
        message = {"id": id, "method": method, "params": parameters, **session}
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(WAIT_S):
            return await future

    async def listen(self) -> None:
        """For as long as the browser speaks."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                self._heard(json.loads((await self._reader.readuntil(b"\0"))[:-1]))

    def _heard(self, message: dict[str, Any]) -> None:
        if (page := self._tabs.get(message.get("sessionId", ""))) is not None:
            page.hear(message.get("method", ""), message.get("params", {}))
        future = self._waiting.pop(message.get("id", 0), None)
        if future is not None and not future.done():
            if "error" in message:
                future.set_exception(AssertionError(message["error"]))
            else:
                future.set_result(message["result"])


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Browser]:
    """A headless browser that keeps its things in this folder, ended with all its processes."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    process = await asyncio.create_subprocess_exec(
        # Other shells take descriptors of one digit only.
        *("bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"),
        *(*command(folder), "--remote-debugging-pipe", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(theirs_in, theirs_out),
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MESSAGE_BYTES_MAX)
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours_in, "rb"))
    transport, writing = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(ours_out, "wb")
    )
    browser = Browser(reader, asyncio.StreamWriter(transport, writing, reader, loop))
    listening = asyncio.create_task(browser.listen())
    try:
        yield browser
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        listening.cancel()
        transport.close()


@asynccontextmanager
async def tab(folder: Path, url: str) -> AsyncIterator[Tab]:
    """This page, in a browser of its own."""
    async with browsing(folder) as browser, browser.tab(url) as page:
        yield page
