"""The load generator against scripted targets: schedules are kept whatever the server does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kaiten.bench.openai_target import OpenAITarget, text_of, tokens_of
from kaiten.bench.outcomes import AskError, Ending, OnTokens
from kaiten.bench.runner import Load
from kaiten.bench.targets import GrpcTarget, target_of
from kaiten.bench.workload import Job
from tests.support.tcp_server import tcp_server


def jobs(count: int) -> list[Job]:
    return [Job(index=index, prompt=(index + 1,) * 3, output_tokens=4) for index in range(count)]


class HandClock:
    """Time goes on when somebody sleeps, or when the target takes some."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    async def sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(0)
        self.at_s = max(self.at_s, at_s)


class Blocking:
    """A server so rude that the client's whole loop stands still for a second per request."""

    vocab_size = context_tokens = None
    says = "rude"

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.asking = self.asking_max = 0

    async def prepare(self) -> None: ...
    async def close(self) -> None: ...

    async def ask(self, job: Job, on_tokens: OnTokens, timeout_s: float) -> Ending:
        self.asking += 1
        self.asking_max = max(self.asking_max, self.asking)
        await asyncio.sleep(0)
        self.clock.at_s += 1.0
        on_tokens(job.output_tokens)
        self.asking -= 1
        if job.index == 3:
            raise AskError("overloaded", "too many")
        return Ending(prompt_tokens=3, output_tokens=job.output_tokens)


async def test_a_slow_server_is_charged_for_the_requests_it_held_up() -> None:
    clock = HandClock()
    outcomes = await Load(Blocking(clock), timeout_s=9, clock=clock).open_loop(
        jobs(8), [0.1 * index for index in range(8)]
    )
    assert [o.due_s for o in outcomes] == pytest.approx([0.1 * index for index in range(8)])
    # All eight cost a second each, one after the other: the last due at 0.7 ends at 8.
    assert max(o.done_s for o in outcomes) >= 8
    assert outcomes[-1].latency_s > 6, "latency counts from the schedule"
    assert outcomes[-1].sent_s > outcomes[-1].due_s
    assert [o.error for o in outcomes] == ["", "", "", "overloaded", "", "", "", ""]


async def test_a_closed_loop_has_no_more_in_flight_than_askers() -> None:
    clock = HandClock()
    target = Blocking(clock)
    heard: list[int] = []
    load = Load(target, timeout_s=9, clock=clock, on_done=lambda o: heard.append(o.index))
    outcomes = await load.closed_loop(jobs(10), 3)
    assert [o.index for o in outcomes] == list(range(10))
    assert sorted(heard) == list(range(10))
    assert target.asking_max == 3
    assert all(o.sent_s == o.due_s for o in outcomes)


class Http:
    """A tiny HTTP server: `answer(body)` gives the status and the events of a completion. It is not
    ready while `models` is None."""

    def __init__(self, answer: Any, models: Any) -> None:
        self.answer = answer
        self.models = models
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            self._send(writer, 503 if self.models is None else 200, json.dumps(self.models))
        else:
            (length,) = (
                int(line.split(":")[1])
                for line in head.lower().splitlines()
                if line.startswith("content-length")
            )
            self.bodies.append(json.loads(await reader.readexactly(length)))
            status, events = self.answer(self.bodies[-1])
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._send(writer, status, "".join([*lines, "data: [DONE]\n\n"]))

    def _send(self, writer: asyncio.StreamWriter, status: int, body: str) -> None:
        text = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((text + body).encode())


MODELS = {"data": [{"id": "m", "max_model_len": 99}]}


@asynccontextmanager
async def serving(
    answer: Any, *, models: Any = MODELS, is_plain: bool = False
) -> AsyncIterator[tuple[OpenAITarget, Http]]:
    http = Http(answer, models)
    async with tcp_server(http) as port:
        target = OpenAITarget(f"http://127.0.0.1:{port}", "", is_plain=is_plain)
        try:
            yield target, http
        finally:
            await target.close()


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **choice}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


async def ask(target: OpenAITarget) -> tuple[list[int], Ending]:
    frames: list[int] = []
    ending = await target.ask(jobs(1)[0], frames.append, 9.0)
    return frames, ending


async def test_a_server_that_returns_token_ids_is_counted_exactly() -> None:
    events = [chunk(text="ab", token_ids=[5, 6]), chunk(text="", token_ids=[7, 8]), usage(4)]
    async with serving(lambda body: (200, events)) as (target, http):
        await target.prepare()
        assert target.context_tokens == 99
        assert "forced length" in target.says
        assert await ask(target) == ([2, 2], Ending(prompt_tokens=3, output_tokens=4))
        assert http.bodies[-1]["min_tokens"] == http.bodies[-1]["max_tokens"] == 4
        assert http.bodies[-1]["prompt"] == [1, 1, 1]


async def test_a_server_that_is_not_ready_is_not_asked_for_a_model_of_any_name() -> None:
    async with serving(lambda body: (404, []), models=None) as (target, http):
        with pytest.raises(AskError, match="is not ready") as caught:
            await target.prepare()
        assert caught.value.kind == "unavailable"
        assert not http.bodies


async def test_the_plainest_server_gets_plain_text_and_its_count_is_believed() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, list[Any]]:
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return 400, []
        return 200, [chunk(text="one"), chunk(text="", finish_reason="stop"), usage(3)]

    async with serving(answer) as (target, http):
        await target.prepare()
        assert "text in" in target.says
        assert len(http.bodies) == 4
        assert await ask(target) == ([1], Ending(prompt_tokens=3, output_tokens=3))
    async with serving(answer, is_plain=True) as (target, http):
        await target.prepare()
        assert len(http.bodies) == 1


@pytest.mark.parametrize(
    ("status", "events", "kind"),
    [
        (429, [], "http 429"),
        (500, [], "http 500"),
        (200, [{"error": {"message": "lost"}}], "error in stream"),
        (200, [5], "bad stream"),
        (200, [{"choices": [None]}], "bad stream"),
        (200, [{"choices": 7}], "bad stream"),
        (200, [{"usage": "many"}], "bad stream"),
        (200, [{"usage": {"prompt_tokens": [3]}}], "bad stream"),
        (200, [{"usage": {"prompt_tokens_details": [3]}}], "bad stream"),
        (200, [{"choices": [{"token_ids": 3}]}], "bad stream"),
    ],
)
async def test_failures_have_a_kind(status: int, events: list[Any], kind: str) -> None:
    async with serving(lambda body: (status, events)) as (target, _):
        with pytest.raises(AskError) as caught:
            await target.prepare()
        assert caught.value.kind == kind


@pytest.mark.parametrize(
    "models",
    [
        [],
        5,
        {"data": 5},
        {"data": [5]},
        {"data": [{}]},
        {"data": [{"id": "m", "max_model_len": None}]},
    ],
)
async def test_a_server_that_says_nothing_of_its_models_is_asked_all_the_same(models: Any) -> None:
    async with serving(lambda body: (200, [usage(1)]), models=models) as (target, http):
        await target.prepare()
        assert target.context_tokens is None
        assert http.bodies[-1]["model"] in ("m", "default")


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    return await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))


@pytest.mark.parametrize("answers", [0, 1, 3])
async def test_a_kept_connection_that_is_closed_is_no_answer(answers: int) -> None:
    """A server that hangs up on the request after so many on each connection, without a word."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            for _ in range(answers):
                await read_request(reader)
                event = f"data: {json.dumps(chunk(text='x', token_ids=[1, 2]))}\n\n"
                head = f"HTTP/1.1 200 X\r\ncontent-length: {len(event)}\r\n\r\n"
                writer.write((head + event).encode())
            await read_request(reader)

    async with tcp_server(serve) as port:
        target = OpenAITarget(f"http://127.0.0.1:{port}", "m", is_plain=False)
        if answers:
            for _ in range(6):
                assert await ask(target) == ([2], Ending(output_tokens=2))
            assert connections == 6 // answers
        else:
            with pytest.raises(AskError, match="connection"):
                await ask(target)
            assert connections == 1, "a new connection's end is the server's answer"
        await target.close()


async def test_nobody_there_is_said_at_once() -> None:
    target = OpenAITarget("http://127.0.0.1:9", "", is_plain=False)
    with pytest.raises(AskError, match="unavailable"):
        await target.prepare()
    await target.close()


async def test_addresses_choose_the_protocol() -> None:
    http = target_of("http://host:1/v1/")
    grpc = target_of("grpc://host:1")
    assert isinstance(http, OpenAITarget)
    assert "http://host:1 " in http.says
    assert isinstance(grpc, GrpcTarget)
    await http.close()
    await grpc.close()


def test_frames_without_tokens_count_nothing() -> None:
    assert tokens_of({"choices": []}) == 0
    assert tokens_of(chunk(text="")) == 0
    assert tokens_of(chunk(text="x")) == 1
    assert tokens_of(chunk(text="", token_ids=[1, 2])) == 2
    assert len(text_of(jobs(1)[0]).split()) == 3
