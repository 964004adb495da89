"""Bodies that cost more than they are: hostile lists, slow ones, too many, too large ones."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import httpx
import psutil
import pytest

from gateway.grpc.convert import IDS_MAX, LIST_MAX, ask_from_proto
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams, TokenBias, TokenSequence
from service_kit.errors import TooLong
from tests.support.cpu_cost import goes_until_below
from tests.support.gateway_stack import MODEL, Stack, running_stack, until
from tests.support.tokenizers import write_model_folder

BODY_BYTES_MAX = 1 << 20
READING_BYTES_MAX = 2 << 20
JSON = {"content-type": "application/json"}
JSON_LINES = ("Content-Type: application/json",)


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {
        "text_bytes_max": 1 << 19,
        "body_bytes_max": BODY_BYTES_MAX,
        "bodies_bytes_max": READING_BYTES_MAX,
    }


class Sending:
    """One connection that sends as it likes."""

    def __init__(self, stack: Stack) -> None:
        self._port = stack.gateway.service.http_port

    async def __aenter__(self) -> "Sending":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()

    async def reply(self) -> tuple[int, Any]:
        """Status and body of the next answer."""
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 60)).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        content = await asyncio.wait_for(self._reader.readexactly(length), 60)
        return int(head.split()[1]), json.loads(content)


def head(length: int, *lines: str, path: str = "/v1/completions") -> bytes:
    all_ = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        *JSON_LINES,
        f"Content-Length: {length}",
        *lines,
        "",
        "",
    ]
    return "\r\n".join(all_).encode()


@pytest.mark.parametrize("times", [1.5, 2.5])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_who_sends_too_much_hears_of_it(stack: Stack, times: float, connection: str) -> None:
    """Closed before all is taken in the connection would be reset, and the answer with it."""
    body = b"x" * int(times * BODY_BYTES_MAX)
    async with Sending(stack) as client:
        await client.send(head(len(body), f"Connection: {connection}"), body)
        status, content = await client.reply()
    assert status == 413
    assert content["error"]["message"] == f"the body must have at most {BODY_BYTES_MAX} bytes"


async def test_without_a_length_it_is_counted(stack: Stack, http: httpx.AsyncClient) -> None:
    async def parts() -> Any:
        for _ in range(40):
            yield b"[" + b" " * (BODY_BYTES_MAX // 20)

    reply = await http.post("/v1/completions", content=parts(), headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_long")


async def test_who_asks_first_need_not_send(stack: Stack) -> None:
    async with Sending(stack) as client:
        await client.send(head(10 * BODY_BYTES_MAX, "Expect: 100-continue"))
        assert (await client.reply())[0] == 413


async def test_a_slow_body_is_not_waited_for(tmp_path: Any, redis_url: str, cell: str) -> None:
    async with (
        running_stack(tmp_path / "model", redis_url, cell, body_s_max=0.2) as stack,
        Sending(stack) as client,
    ):
        await client.send(head(100), b'{"prompt"')
        status, content = await client.reply()
        assert (status, content["error"]["code"]) == (408, "slow")
        assert "within 0.2 s" in content["error"]["message"]


async def test_all_bodies_together_are_bounded_and_small_ones_find_room(stack: Stack) -> None:
    part = b'{"prompt": "' + b"x" * (BODY_BYTES_MAX - 100)
    async with AsyncExitStack() as held:
        senders = [await held.enter_async_context(Sending(stack)) for _ in range(3)]
        for sender in senders:
            await sender.send(head(len(part) + 2), part)
        replies = [asyncio.create_task(sender.reply()) for sender in senders]
        done, _ = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED, timeout=1)
        assert not done, "two fit, and the third one's rest is taken in first"
        small = await held.enter_async_context(Sending(stack))
        await small.send(head(2), b"{}")
        assert (await small.reply())[0] == 400
        for sender in senders:
            await sender.send(b'"}')
        statuses = sorted([(await reply)[0] for reply in replies])
        assert statuses == [400, 400, 429]
        # What was counted is given back: as many fit again.
        for _ in range(4):
            again = await held.enter_async_context(Sending(stack))
            await again.send(head(len(part) + 2), part, b'"}')
            assert (await again.reply())[0] == 400


async def test_hostile_lists_cost_what_they_are(stack: Stack, http: httpx.AsyncClient) -> None:
    """Complaints about every value would take a gigabyte and ten seconds."""
    process = psutil.Process()
    rss_bytes = process.memory_info().rss
    for path, field, item in (
        ("/v1/completions", "prompt", "1"),
        ("/v1/completions", "stop", "1"),
        ("/v1/completions", "stop_token_ids", "1"),
        ("/detokenize", "tokens", "1"),
        ("/v1/chat/completions", "messages", "1"),
    ):
        rest = '"prompt":"x",' if field.startswith("stop") else ""
        body = f'{{{rest}"{field}":[{f"{item}," * 260_000}null]}}'
        costs_s: list[float] = []
        for _ in goes_until_below(1.0, costs_s):
            begin_s = time.thread_time()
            reply = await http.post(path, content=body.encode(), headers=JSON)
            # The loop's own time, the client's included; without a bound it is four seconds.
            costs_s.append(time.thread_time() - begin_s)
        assert (reply.status_code, reply.json()["error"]["param"].split(".")[0]) == (400, field)
    # The client has the bodies too.
    assert process.memory_info().rss - rss_bytes < 60e6


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("stop", pb.GenerateRequest(text="x", stop=["a"] * (LIST_MAX + 1))),
        (
            "conversation.messages",
            pb.GenerateRequest(conversation={"messages": [{}] * (LIST_MAX + 1)}),
        ),
        (
            "sampling.logit_bias",
            pb.GenerateRequest(
                text="x", sampling=SamplingParams(logit_bias=[TokenBias()] * (LIST_MAX + 1))
            ),
        ),
        (
            "sampling.bad_words",
            pb.GenerateRequest(
                text="x", sampling=SamplingParams(bad_words=[TokenSequence()] * (LIST_MAX + 1))
            ),
        ),
        ("token_ids.ids", pb.GenerateRequest(token_ids={"ids": [1] * (IDS_MAX + 1)})),
    ],
)
def test_messages_of_more_than_any_limit_are_not_taken_apart(
    field: str, request_: pb.GenerateRequest
) -> None:
    with pytest.raises(TooLong) as caught:
        ask_from_proto(request_)
    assert caught.value.field == field


async def test_control_tokens_in_a_chat_leave_the_loop_free(
    tmp_path: Any, redis_url: str, cell: str
) -> None:
    """Each becomes plain text by a table; one by one they would be minutes of tokenizing."""
    config = {"max_position_embeddings": 100_000}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_model_folder(tmp_path / "model", config=config, chat_template=template)
    async with running_stack(folder, redis_url, cell) as stack:
        service = stack.gateway.service.generation_service
        stack.scheduler.cell.model.context_tokens_max = 100_000
        await until(lambda: service.limits.context_tokens_max == 100_000, "the larger context")
        card = stack.gateway.card
        special = card.special_texts[0]
        content = f"{special}a" * 20_000
        ids = [
            token_id
            for character in special
            for token_id in card.tokenizer.encode(character, add_special_tokens=False).ids
        ] + stack.gateway.ids("a")
        dearest_s: list[float] = []
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as client:
            # The goal is 50 ms. The client, which reads a million numbers, is on the same loop.
            for _ in goes_until_below(1.0, dearest_s):
                async with loop_watched(dearest_s):
                    messages = [{"role": "user", "content": content}]
                    reply = await client.post(
                        "/tokenize", json={"model": MODEL, "messages": messages}
                    )
        assert reply.status_code == 200, reply.text
        assert reply.json()["tokens"] == ids * 20_000


@asynccontextmanager
async def loop_watched(dearest_s: list[float]) -> AsyncIterator[None]:
    """Adds the dearest of what `watch_loop` measures."""
    gaps_s: list[float] = []
    watching = asyncio.create_task(watch_loop(gaps_s))
    try:
        yield
    finally:
        watching.cancel()
    # What it found wrong is told.
    with suppress(asyncio.CancelledError):
        await watching
    dearest_s.append(max(gaps_s))


async def watch_loop(gaps_s: list[float]) -> None:
    """What the loop's thread computed between two turns."""
    while True:
        begin_s = time.thread_time()
        await asyncio.sleep(0)
        gaps_s.append(time.thread_time() - begin_s)


async def test_the_document_is_made_once(stack: Stack, http: httpx.AsyncClient) -> None:
    service = stack.gateway.service.generation_service
    first = (await http.get("/openapi.json")).content
    with patch("gateway.openai.openapi.document", side_effect=AssertionError("made again")):
        assert (await http.get("/openapi.json")).content == first
    stack.scheduler.cell.model.context_tokens_max = 100
    await until(lambda: service.limits.context_tokens_max == 100, "another context")
    assert (await http.get("/openapi.json")).content != first


async def test_far_too_many_tokens_are_not_all_made(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """A token per byte takes some 200 bytes of memory each, and no context holds them."""
    folder = write_model_folder(tmp_path / "model", config={"max_position_embeddings": 8192})
    async with running_stack(folder, redis_url, cell) as stack:
        service = stack.gateway.service.generation_service
        stack.scheduler.cell.model.context_tokens_max = 8192
        await until(lambda: service.limits.context_tokens_max == 8192, "the larger context")
        process = psutil.Process()
        rss_bytes = process.memory_info().rss
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as client:
            for path in ("/v1/completions", "/tokenize"):
                reply = await client.post(path, json={"prompt": "z" * 1_000_000})
                error = reply.json()["error"]
                assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "more than 32768 tokens; at most 8191 leave room" in error["message"]
            # Control tokens' texts are tokens, however they come.
            special = stack.gateway.card.special_texts[0]
            for content in (special * 40_000, f"{special}a" * 40_000):
                messages = [{"role": "user", "content": content}]
                reply = await client.post("/tokenize", json={"messages": messages})
                error = reply.json()["error"]
                assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "more than 32768 tokens; at most 8191 leave room" in error["message"]
            # What is more than a context holds, but not far more, is told.
            text = "z, " * 8_000
            reply = await client.post("/tokenize", json={"prompt": text})
            assert reply.json()["tokens"] == stack.gateway.card.tokenizer.encode(text).ids
        assert process.memory_info().rss - rss_bytes < 60e6


async def test_messages_of_millions_of_messages_are_not_parsed(stack: Stack) -> None:
    """Parsed, these four megabytes take a tenth of a second and two hundred megabytes."""
    method = stack.gateway.channel.unary_stream("/kaiten.v1.InferenceService/GenerateBatch")
    raw = b"\x0a\x00" * (2_000_000)
    with pytest.raises(grpc.aio.AioRpcError, match="at most 32768 fields in all") as caught:
        await method(raw, timeout=60).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
