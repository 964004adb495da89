"""Drives batches: feeds their lines to the ledger, and writes their answers down.

Any gateway drives any batch, one at a time. A line is a request whose id follows from the batch and
the number of the line, so whoever goes on after a death submits it again and finds it accepted; its
answer is written once. Nothing here is needed to go on but what the store has.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
import structlog

from gateway.cell.ledger_session import LedgerLink
from gateway.observe.metrics import BatchMeters
from gateway.openai.batches.files import TooManyLines, at_most, lines_of
from gateway.openai.batches.lines import (
    Line,
    LineAnswer,
    LineProblem,
    LineResponse,
    answer_of,
    custom_id_of,
    line_of,
)
from gateway.openai.batches.outputs import ChunkWriter
from gateway.openai.batches.usage import UsageSum
from gateway.openai.batches.window import Share, Window
from gateway.openai.operation import Api
from gateway.tenants import Keyring, Tenant
from ledger.batches.batches import BatchName, StoredBatch
from service_kit.error_table import retry_after_s
from service_kit.errors import InvalidRequest, KaitenError, NotFound, Overloaded, Unavailable
from service_kit.outages import Outage

log = structlog.get_logger()

LINES_MAX: Final = 50_000
# How often it is looked whether there is something to drive, and whether somebody wants its end.
LOOK_S: Final = 1.0
# Who does not say for so long that it drives a batch is succeeded.
HOLD_MS: Final = 5_000
# How often it is tried to keep an output for which its tenant has no room.
ROOM_S: Final = 10.0
# The next line begins when this one is in the ledger, or that takes longer than a line takes of the
# loop: who is live gets a turn in between, and slots do not wait for lines where others are slow.
OPENING_S: Final = 0.002
# A line's own time ends so long after its batch's: who drives it says better why it has no answer.
PARTING_S: Final = 60.0
# Others may have come and workers left since the lines were fed.
WINDOWS: Final = 8
# Answers read at once: each may have megabytes, and the store holds what it sends.
AT_ONCE: Final = 32
OUTPUTS: Final = {True: "output", False: "errors"}
OK: Final = {True: b"+", False: b"-"}


class InputGone(Exception):
    """The input file of a batch is not there any more."""


class BatchDriver:
    """One per gateway."""

    def __init__(self, api: Api, keyring: Keyring) -> None:
        self._api = api
        self._keyring = keyring
        self._window = Window(api.generation_service.readiness)
        # One file at a time.
        self._counting = asyncio.Lock()
        self._who = secrets.token_hex(8)
        self._driven: dict[BatchName, asyncio.Task[None]] = {}
        self._meters = BatchMeters(api.metrics.meter, lambda: len(self._driven))
        self._kicked = asyncio.Event()

    def kick(self) -> None:
        """There is something new to drive."""
        self._kicked.set()

    async def run(self) -> None:
        """For as long as the gateway lives; once it drains, batches are for others to drive."""
        try:
            while True:
                if self._api.generation_service.readiness.is_draining:
                    await self._let_go()
                else:
                    await self._look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._kicked.wait()
                self._kicked.clear()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        """Their requests go on, and another gateway with them."""
        for task in (tasks := list(self._driven.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        # What is wrong with the store, readiness says.
        with suppress(KaitenError):
            for name in await self._api.link.ledger.batches.live():
                if name not in self._driven and await self._hold(name):
                    task = asyncio.create_task(self._drive(name))
                    self._driven[name] = task
                    task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: BatchName, _task: asyncio.Task[None]) -> None:
        del self._driven[name]

    async def _hold(self, name: BatchName) -> bool:
        return await self._api.link.ledger.batches.hold(name, self._who, HOLD_MS)

    async def _drive(self, name: BatchName) -> None:
        """Until it is over, is somebody else's, or the store is away: then all begins anew."""
        driving = asyncio.create_task(
            BatchRun(
                self._api, self._keyring, self._window, self._counting, self._meters, name
            ).to_its_end()
        )
        try:
            while not driving.done():
                await asyncio.wait({driving}, timeout=LOOK_S)
                if not driving.done() and not await self._hold(name):
                    return
            driving.result()
        except KaitenError as error:
            log.info("batch.left", batch=name.id, reason=str(error))
        except Exception as error:
            log.error("batch.crashed", batch=name.id, exc_info=error)
            # Whatever it is, it is not tried again at once.
            await asyncio.sleep(LOOK_S)
        finally:
            driving.cancel()
            await asyncio.wait({driving})


class BatchRun:
    """One batch, from where it is to its end. It holds `counting` while it counts its lines: a
    file may be long, and there may be many.
    """

    def __init__(
        self,
        api: Api,
        keyring: Keyring,
        window: Window,
        counting: asyncio.Lock,
        meters: BatchMeters,
        name: BatchName,
    ) -> None:
        self._api = api
        self._window = window
        self._counting = counting
        self._meters = meters
        self._name = name
        self._keyring = keyring
        # By this process's clock, once it is being computed.
        self._expires_s = 0.0

    @property
    def _tenant(self) -> Tenant:
        """As its keys file has it now."""
        return self._keyring.named(self._name.tenant)

    @property
    def _link(self) -> LedgerLink:
        return self._api.link

    async def to_its_end(self) -> None:
        batches = self._link.ledger.batches
        while True:
            try:
                batch = await batches.find(self._name)
            except NotFound as error:
                log.warning("batch.gone", batch=self._name.id, reason=str(error))
                await batches.let_go(self._name)
                return
            match batch.status:
                case "validating":
                    await self._validate(batch)
                case "in_progress":
                    await self._compute(batch)
                case "cancelling" | "finalizing":
                    await self._write_down(batch)
                case over:
                    self._meters.ended[over] += 1
                    return

    async def _validate(self, batch: StoredBatch) -> None:
        """What is wrong with one of its lines is told as its answer."""
        total, problem = await self._count(batch)
        if not total:
            problem = problem or "the input file has no line"
        of = ("validating",)
        if problem:
            fields = {"problem": problem, "total": str(total)}
            await self._link.ledger.batches.move(self._name, "failed", of=of, fields=fields)
        else:
            fields = {"total": str(total)}
            await self._link.ledger.batches.move(self._name, "in_progress", of=of, fields=fields)

    async def _count(self, batch: StoredBatch) -> tuple[int, str]:
        """Its lines, and what is wrong with the file."""
        total = 0
        async with self._counting:
            try:
                async for _ in self._lines(batch, lines_max=LINES_MAX):
                    total += 1
            except (InputGone, TooManyLines) as error:
                return total, str(error)
        return total, ""

    async def _compute(self, batch: StoredBatch) -> None:
        """All lines without an answer, until it is to be cancelled, its time is over, or its input
        is gone: those that are left then have none.
        """
        done = set(await self._link.ledger.batches.answered(self._name))
        left_s = await self._left_s(batch)
        self._expires_s, is_late = self._now_s() + left_s, left_s <= 0
        feeding = asyncio.create_task(self._feed(batch, done))
        try:
            while not is_late:
                await asyncio.wait({feeding}, timeout=LOOK_S)
                if feeding.done():
                    feeding.result()
                    break
                now = await self._link.ledger.batches.find(self._name)
                if now.status != "in_progress":
                    return
                is_late = await self._left_s(now) <= 0
        except InputGone:
            pass
        except NotFound:
            # An answer came too late: its state is another by now.
            return
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
        fields = {"is_late": "1"} if is_late else {}
        of = ("in_progress",)
        await self._link.ledger.batches.move(self._name, "finalizing", of=of, fields=fields)

    async def _feed(self, batch: StoredBatch, done: set[int]) -> None:
        """At most a window of lines at once."""
        try:
            with self._window.of(self._name.tenant) as window:
                share = Share(window)
                async with asyncio.TaskGroup() as running:
                    async for number, line in self._good_lines(batch, done):
                        await share.room()
                        is_open = asyncio.Event()
                        running.create_task(self._run(batch, number, line, share, is_open))
                        with suppress(TimeoutError):
                            async with asyncio.timeout(OPENING_S):
                                await is_open.wait()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _good_lines(
        self, batch: StoredBatch, done: set[int]
    ) -> AsyncIterator[tuple[int, Line]]:
        """Without an answer. What is wrong with the others is theirs."""
        number, seen = 0, set[str]()
        async for raw in self._lines(batch):
            number += 1
            try:
                line = self._line(batch, raw)
                if (custom_id := line.custom_id) in seen:
                    raise InvalidRequest("custom_id", f"{custom_id!r} is that of an earlier line")
                seen.add(custom_id)
            except InvalidRequest as error:
                if number not in done:
                    problem = LineProblem("invalid_line", f"line {number}: {error}")
                    await self._answer(number, custom_id_of(raw), problem)
                continue
            if number not in done:
                yield number, line

    async def _run(
        self, batch: StoredBatch, number: int, line: Line, share: Share, is_open: asyncio.Event
    ) -> None:
        """Refused, it leaves its place to other lines until it may be asked again."""

        def on_accepted() -> None:
            share.let_in(number)
            is_open.set()

        while True:
            async with share.window.place():
                try:
                    response = await self._asked(batch, number, line, on_accepted)
                except (Overloaded, Unavailable) as error:
                    share.refused(number)
                    wait_s = retry_after_s(error) or LOOK_S
                else:
                    on_accepted()
                    await self._keep_answer(number, line, response)
                    share.answered()
                    return
            await share.change(wait_s)

    async def _asked(
        self, batch: StoredBatch, number: int, line: Line, on_accepted: Callable[[], None]
    ) -> LineResponse:
        """By what its tenant may now."""
        endpoint, id = batch.fields["endpoint"], self._request_id(number)
        left_s = max(0.0, self._expires_s - self._now_s()) + PARTING_S
        return await answer_of(self._api, self._tenant, id, line, endpoint, left_s, on_accepted)

    async def _keep_answer(self, number: int, line: Line, response: LineResponse) -> None:
        id = self._request_id(number)
        found = LineAnswer(id=f"batch_req_{id}", custom_id=line.custom_id, response=response)
        raw, is_ok = msgspec.json.encode(found), response.is_answer
        try:
            await self._keep(number, raw, is_ok=is_ok)
        except Overloaded as error:
            rule = f"{error.reason} (files_mb: {error.limit}); fetch outputs, and ask again"
            said = f"line {number}: its answer of {len(raw)} bytes had no room: {rule}"
            await self._answer(number, line.custom_id, LineProblem("no_room", said))

    async def _answer(self, number: int, custom_id: str | None, problem: LineProblem) -> None:
        await self._keep(number, self._failure(number, custom_id, problem), is_ok=False)

    def _failure(self, number: int, custom_id: str | None, problem: LineProblem) -> bytes:
        id = f"batch_req_{self._request_id(number)}"
        return msgspec.json.encode(LineAnswer(id=id, custom_id=custom_id, error=problem))

    async def _keep(self, number: int, raw: bytes, *, is_ok: bool) -> None:
        batches = self._link.ledger.batches
        await batches.answer(self._name, number, OK[is_ok] + raw, is_ok=is_ok)
        self._meters.lines["answered" if is_ok else "failed"] += 1

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def _left_s(self, batch: StoredBatch) -> float:
        """Until its window is over; 0 or less: it is."""
        return batch.number("expires_at") - await self._link.ledger.now_ns() / 1_000_000_000

    async def _write_down(self, batch: StoredBatch) -> None:
        """The answers in the order of their lines, and why others have none, become two files; then
        it is over. No answer comes any more: whoever does it again writes the same.
        """
        numbers = await self._link.ledger.batches.answered(self._name)
        # It may have been cancelled while it was validated.
        total = batch.number("total") or (await self._count(batch))[0]
        rest = await self._rest(batch, total, set(numbers))
        if rest:
            await self._give_up(batch, set(numbers))
        fields, usage = dict[str, str](), UsageSum(batch.fields["endpoint"])
        writers = {is_ok: self._writer(kind) for is_ok, kind in OUTPUTS.items()}
        async for is_ok, answer in self._answers(batch, numbers, rest):
            await writers[is_ok].write(answer)
            if is_ok:
                usage.add(answer)
        for is_ok, writer in writers.items():
            await writer.end()
            if writer.size_bytes:
                await self._keep_file(batch, writer, f"{self._name.id}_{OUTPUTS[is_ok]}.jsonl")
                fields[f"{OUTPUTS[is_ok]}_file_id"] = writer.id
        fields |= usage.fields | {"failed": str(batch.number("failed") + len(rest))}
        fields["total"] = str(total)
        state, of = _end(batch), ("finalizing", "cancelling")
        if await self._link.ledger.batches.move(self._name, state, of=of, fields=fields) == state:
            self._meters.lines["failed"] += len(rest)

    async def _rest(
        self, batch: StoredBatch, total: int, answered: set[int]
    ) -> dict[int, str | None]:
        """Lines without an answer, and what they are called where that can be read."""
        left = range(1, total + 1)
        rest: dict[int, str | None] = {each: None for each in left if each not in answered}
        if rest:
            with suppress(InputGone):
                number = 0
                async for raw in self._lines(batch):
                    number += 1
                    if number in rest:
                        rest[number] = custom_id_of(raw)
        return rest

    async def _give_up(self, batch: StoredBatch, done: set[int]) -> None:
        """Requests that may have been begun: there is never more than a window beyond those done.

        Of another driver too, whose window was as large.
        """
        last = min(batch.number("total"), len(done) + WINDOWS * self._window.size)
        for number in range(1, last + 1):
            if number not in done:
                with suppress(NotFound):
                    await self._api.generation_service.cancel(
                        self._request_id(number), self._tenant
                    )

    async def _answers(
        self, batch: StoredBatch, answered: list[int], rest: dict[int, str | None]
    ) -> AsyncIterator[tuple[bool, bytes]]:
        """Of all lines, in their order, and whether it is a good one."""
        problem, numbers = _why_none(batch), sorted([*answered, *rest])
        for start in range(0, len(numbers), AT_ONCE):
            some = numbers[start : start + AT_ONCE]
            known = [number for number in some if number not in rest]
            found = iter(await self._link.ledger.batches.answers(self._name, known))
            for number in some:
                if number in rest:
                    yield False, self._failure(number, rest[number], problem)
                else:
                    answer = next(found)
                    yield answer[:1] == OK[True], answer[1:]

    def _writer(self, kind: str) -> ChunkWriter:
        id = f"file-{self._name.id.removeprefix('batch_')}-{kind}"
        return ChunkWriter(self._link.ledger.files, self._name, id)

    async def _keep_file(self, batch: StoredBatch, writer: ChunkWriter, filename: str) -> None:
        """Computed and not lost: it waits until its tenant has made room."""
        outage = Outage("batch.waits_for_room", over="batch.has_room")
        while True:
            try:
                await writer.keep(filename, batch.number("output_ttl_s") or None)
                outage.ended(time.monotonic_ns(), batch=self._name.id)
                return
            except Overloaded as error:
                outage.failed(time.monotonic_ns(), batch=self._name.id, reason=str(error))
            await asyncio.sleep(ROOM_S)
            # NotFound: it has waited for so long that nobody could ask for it any more.
            await self._link.ledger.batches.find(self._name)

    async def _lines(
        self, batch: StoredBatch, *, lines_max: int | None = None
    ) -> AsyncIterator[bytes]:
        """Empty ones are none. TooManyLines: they are more than `lines_max` with them."""
        files, tenant = self._link.ledger.files, self._name.tenant
        id = batch.fields["input_file_id"]
        try:
            stored = await files.find(tenant, id)
            pieces = files.read(tenant, stored)
            if lines_max is not None:
                pieces = at_most(lines_max, pieces)
            async for line in lines_of(pieces, self._api.config.body_bytes_max):
                if line.strip():
                    yield line
        except NotFound:
            raise InputGone(_gone(batch)) from None

    def _line(self, batch: StoredBatch, raw: bytes) -> Line:
        bytes_max = self._api.config.body_bytes_max
        return line_of(raw, endpoint=batch.fields["endpoint"], bytes_max=bytes_max)

    def _request_id(self, number: int) -> str:
        return f"{self._name.id}-{number}"


def _end(batch: StoredBatch) -> str:
    """The state that it will be in."""
    if batch.status == "cancelling":
        return "cancelled"
    return "expired" if batch.fields.get("is_late") else "completed"


def _why_none(batch: StoredBatch) -> LineProblem:
    """What is told of lines that have no answer at its end."""
    match _end(batch):
        case "cancelled":
            return LineProblem("batch_cancelled", "the batch was cancelled before its turn")
        case "expired":
            return LineProblem("batch_expired", "the batch's time ran out before its turn")
        case _:
            return LineProblem("input_gone", _gone(batch))


def _gone(batch: StoredBatch) -> str:
    return f"the input file {batch.fields['input_file_id']} is not kept any more"
