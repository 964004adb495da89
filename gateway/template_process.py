"""Render chat templates in a child process that can be killed.

minijinja holds the interpreter's lock while it renders and has no memory limit: a template that
doubles a string forty times would take the gateway down, a slow one would stop every stream. So one
small child renders, under a memory limit; a rendering past its time is killed with the child, and
the next one gets a new child. Frames on its stdin and stdout: 4 bytes of length, then JSON.
"""

import asyncio
import json
import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from gateway.template import ChatTemplate, TemplateFailed
from service_kit.errors import InvalidRequest, Unavailable

MEMORY_BYTES_MAX: Final = 512 << 20
# A child that imports and compiles longer than this is not coming.
START_S_MAX: Final = 20.0
LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What one rendering may take."""

    render_s_max: float = 1.0
    text_bytes_max: int = 8 << 20


class TemplateProcess:
    """The parent's side. One rendering at a time; waiting ones queue, which their clients bound."""

    def __init__(
        self, source: str, names: Mapping[str, Any], limits: TemplateLimits | None = None
    ) -> None:
        self._setup = json.dumps({"source": source, "names": dict(names)}).encode()
        self._limits = limits or TemplateLimits()
        self._child: asyncio.subprocess.Process | None = None
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self._turn = asyncio.Lock()

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text. InvalidRequest when the template refuses or outgrows its limits."""
        asked = json.dumps({"messages": list(messages), "options": dict(options or {})}).encode()
        await self._turn.acquire()
        # A frame half-way must be finished although its client may leave: the next frame would
        # answer the wrong question, and a new child for each that leaves would serve nobody else.
        asking = self._asking = asyncio.create_task(self._ask(asked))
        asking.add_done_callback(self._pass_on)
        reply = await asyncio.shield(asking)
        if "error" in reply:
            raise InvalidRequest("messages", f"the chat template says: {reply['error']}")
        return str(reply["text"])

    def _pass_on(self, asking: "asyncio.Task[dict[str, Any]]") -> None:
        self._turn.release()
        if not asking.cancelled():
            # Looked at here too: nobody may be left to hear of it.
            asking.exception()

    async def start(self) -> None:
        """Have a child ready. Unavailable when there is none to be had."""
        async with self._turn:
            await self._ready_child()

    async def close(self) -> None:
        """Kill the child and wait for its end."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _ask(self, asked: bytes) -> dict[str, Any]:
        child = await self._ready_child()
        try:
            async with asyncio.timeout(self._limits.render_s_max):
                return await _exchange(child, asked, self._limits.text_bytes_max)
        except TimeoutError:
            await self.close()
            limit = f"{self._limits.render_s_max:g} s"
            raise InvalidRequest(
                "messages", f"the chat template took longer than {limit}"
            ) from None
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            await self.close()
            raise InvalidRequest("messages", "the chat template outgrew its memory") from error

    async def _ready_child(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gateway.template_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(START_S_MAX):
                await _exchange(self._child, self._setup, 1 << 20)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise Unavailable("the chat template process does not start") from error
        return self._child


async def _exchange(
    child: asyncio.subprocess.Process, frame: bytes, reply_bytes_max: int
) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(LENGTH.pack(len(frame)) + frame)
    await child.stdin.drain()
    (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    if length > reply_bytes_max:
        raise ValueError("reply too long")
    reply: dict[str, Any] = json.loads(await child.stdout.readexactly(length))
    return reply


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return message


def _write(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    frame = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def main() -> None:
    """The child: set up once, then one reply per question until stdin ends with the parent."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(questions)
    if setup is None:
        return
    template = ChatTemplate(setup["source"], setup["names"])
    _write(answers, {})
    while (question := _read(questions)) is not None:
        try:
            answer = {"text": template.render(question["messages"], **question["options"])}
        except TemplateFailed as error:
            answer = {"error": str(error)}
        _write(answers, answer)


if __name__ == "__main__":
    # SIGINT from a terminal reaches the whole group; the child ends when its stdin does.
    with suppress(KeyboardInterrupt):
        main()
