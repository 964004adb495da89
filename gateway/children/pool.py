"""Work for clients in child processes that can be killed: templates, grammars.

Such work may hold the interpreter's lock, grow without end, or take for ever: here it would take
the gateway down and stop every stream. So small children do it, under a memory limit; one past its
time is killed with what it does. While it is replaced the others go on.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.children.child import LENGTH, frame
from service_kit.errors import InvalidRequest, KaitenError, Unavailable

PACKAGES: Final = Path(__file__).parents[2]
# A child that imports and compiles longer than this is not coming.
START_S_MAX: Final = 60.0
# Of a text as JSON: a control character takes six bytes, a piece of one character four.
ESCAPED_MAX: Final = 6
REPLY_HEAD_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """What one answer may take, and how many are made at once."""

    # A machine that is busy with others may put a child aside for seconds.
    answer_s_max: float = 5.0
    text_bytes_max: int = 8 << 20
    children: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the children do: their module, and how to speak of it to clients."""

    module: str
    # Of the request: where the work comes from.
    field: str
    # "the chat template"
    subject: str


class WorkRefused(InvalidRequest):
    """By a child. `at`: as its `Refused` has it."""

    def __init__(self, work: Work, said: Mapping[str, Any]) -> None:
        super().__init__(work.field, f"{work.subject} {said['error']}")
        self.at: int | None = said.get("at")


class ChildPool:
    """The parent's side. A question per child; waiting ones queue, which their clients bound."""

    def __init__(self, work: Work, setup: Mapping[str, Any], limits: ChildLimits) -> None:
        framed = frame(setup)
        self._work = work
        self.count = limits.children
        self._children = [_Child(work, framed, limits) for _ in range(limits.children)]
        # Who was used last comes first: it runs.
        self._free: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()
        for child in reversed(self._children):
            self._free.put_nowait(child)
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. WorkRefused: it is an error. InvalidRequest: the work outgrows its limits."""
        asked = frame(question)
        child = await self._free.get()
        # A frame half-way must be finished although its client may leave: the next frame would
        # answer the wrong question, and a new child for each that leaves would serve nobody else.
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(self._serve(child, asked, reply))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        said = await reply
        if "error" in said:
            raise WorkRefused(self._work, said)
        return said

    async def _serve(
        self, child: "_Child", asked: bytes, reply: "asyncio.Future[dict[str, Any]]"
    ) -> None:
        """One answer; a child that did not survive it is replaced before it is free again."""
        try:
            said = await child.ask(asked)
            if not reply.done():
                reply.set_result(said)
        except KaitenError as error:
            if not reply.done():
                reply.set_exception(error)
            with suppress(Unavailable):
                await child.start()
        finally:
            reply.cancel()
            self._free.put_nowait(child)

    async def start(self) -> None:
        """Have a child ready. Unavailable when there is none to be had."""
        await self._children[0].start()

    async def close(self) -> None:
        """Kill the children and wait for their end."""
        for serving in (ending := tuple(self._serving)):
            serving.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for child in self._children:
            await child.close()


class _Child:
    """One process, which answers one question at a time."""

    def __init__(self, work: Work, setup: bytes, limits: ChildLimits) -> None:
        self._work = work
        self._setup = setup
        self._limits = limits
        self._reply_bytes_max = ESCAPED_MAX * limits.text_bytes_max + REPLY_HEAD_BYTES
        self.process: asyncio.subprocess.Process | None = None

    async def ask(self, asked: bytes) -> dict[str, Any]:
        """The answer. InvalidRequest: there is none, and the child is gone."""
        process = await self.start()
        try:
            async with asyncio.timeout(self._limits.answer_s_max):
                return await _exchange(process, asked, self._reply_bytes_max)
        except TimeoutError:
            await self.close()
            limit = f"{self._limits.answer_s_max:g} s"
            raise InvalidRequest(
                self._work.field, f"{self._work.subject} took longer than {limit}"
            ) from None
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            await self.close()
            raise InvalidRequest(
                self._work.field, f"{self._work.subject} outgrew its memory or time"
            ) from error

    async def start(self) -> asyncio.subprocess.Process:
        """The running process, a new one if there is none."""
        if self.process is not None and self.process.returncode is None:
            return self.process
        try:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._work.module),
                # The first place on its path, wherever this process has its own from.
                cwd=PACKAGES,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(START_S_MAX):
                await _exchange(self.process, self._setup, REPLY_HEAD_BYTES)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise Unavailable(f"the process for {self._work.subject} does not start") from error
        return self.process

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _exchange(
    process: asyncio.subprocess.Process, frame: bytes, reply_bytes_max: int
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > reply_bytes_max:
        raise ValueError("reply too long")
    reply: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
    return reply
