"""The OpenAI endpoints as the real `openai` package and a plain HTTP client see them."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.gateway_stack import MODEL, Stack, until

USER: list[Any] = [{"role": "user", "content": "hi"}]


async def test_chat(stack: Stack) -> None:
    stack.says("hello 😀 world")
    reply = await stack.gateway.openai.chat.completions.create(model=MODEL, messages=USER)
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "hello 😀 world"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    prompt = stack.scheduler.submits[0].prompt_token_ids
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.total_tokens == len(prompt) + reply.usage.completion_tokens


async def test_chat_stream(stack: Stack) -> None:
    stack.says("hello 😀 world")
    stream = await stack.gateway.openai.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "hello 😀 world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_streamed_is_equal_to_not_streamed(stack: Stack) -> None:
    stack.says("  spaces first, and a dot . é日本 END tail")
    create = stack.gateway.openai.chat.completions.create
    whole = await create(model=MODEL, messages=USER, stop="END")
    stream = await create(model=MODEL, messages=USER, stop="END", stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert whole.choices[0].message.content == "".join(parts)
    assert "".join(parts) == "  spaces first, and a dot . é日本 "


async def test_n_choices(stack: Stack) -> None:
    texts = ("one", "two three", "four five six")
    tokens = [stack.gateway.ids(text) for text in texts]
    stop = stack.gateway.card.eos_token_ids[0]
    stack.scheduler.script = lambda _record, choice: iter((*tokens[choice], stop))
    create = stack.gateway.openai.chat.completions.create
    whole = await create(model=MODEL, messages=USER, n=3)
    assert [choice.message.content for choice in whole.choices] == list(texts)
    got = ["", "", ""]
    ends = []
    async for chunk in await create(model=MODEL, messages=USER, n=3, stream=True):
        got[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
    assert got == list(texts)
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("hello", 1),
        (["hello", "world", "third"], 3),
        ([1, 2, 3], 1),
        ([[1, 2], [3, 4]], 2),
    ],
)
async def test_completions_take_every_form_of_prompt(stack: Stack, prompt: Any, count: int) -> None:
    stack.says("the end")
    create = stack.gateway.openai.completions.create
    reply = await create(model=MODEL, prompt=prompt, n=2)
    assert [choice.index for choice in reply.choices] == list(range(2 * count))
    assert {choice.text for choice in reply.choices} == {"the end"}
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(
        len(record.prompt_token_ids) for record in stack.scheduler.submits
    )
    got: dict[int, str] = {}
    async for chunk in await create(model=MODEL, prompt=prompt, n=2, stream=True):
        choice = chunk.choices[0]
        got[choice.index] = got.get(choice.index, "") + choice.text
    assert got == dict.fromkeys(range(2 * count), "the end")


async def test_the_sync_client_works_too(stack: Stack) -> None:
    stack.says("from a thread")

    def ask() -> tuple[str | None, str]:
        url = f"{stack.gateway.http_url}/v1"
        with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
            whole = client.chat.completions.create(model=MODEL, messages=USER)
            with client.chat.completions.create(model=MODEL, messages=USER, stream=True) as stream:
                parts = [chunk.choices[0].delta.content or "" for chunk in stream]
            return whole.choices[0].message.content, "".join(parts)

    assert await asyncio.to_thread(ask) == ("from a thread", "from a thread")


async def test_chat_logprobs(stack: Stack) -> None:
    stack.says("hello 😀")
    reply = await stack.gateway.openai.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    raw = b"".join(bytes(token.bytes or []) for token in logprobs.content[:-1])
    assert raw.decode() == "hello 😀"
    assert logprobs.content[-1].token == "</s>"
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)


async def test_completion_logprobs(stack: Stack) -> None:
    stack.says("hello world")
    reply = await stack.gateway.openai.completions.create(model=MODEL, prompt="x", logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens[:-1]) == "hello world"
    for token, offset in zip(logprobs.tokens[:-1], logprobs.text_offset, strict=False):
        assert reply.choices[0].text[offset:].startswith(token)


async def test_token_ids_on_request(stack: Stack) -> None:
    stack.says("hello world")
    expected = [*stack.gateway.ids("hello world"), stack.gateway.card.eos_token_ids[0]]
    create = stack.gateway.openai.completions.create
    extra = {"return_token_ids": True}
    reply = await create(model=MODEL, prompt="x", extra_body=extra)
    assert reply.choices[0].model_extra is not None
    assert reply.choices[0].model_extra["token_ids"] == expected
    got: list[int] = []
    async for chunk in await create(model=MODEL, prompt="x", extra_body=extra, stream=True):
        got += (chunk.choices[0].model_extra or {}).get("token_ids", [])
    assert got == expected


async def test_vendor_extras_and_harmless_fields(stack: Stack) -> None:
    stack.says("x")
    await stack.gateway.openai.chat.completions.create(
        model=MODEL,
        messages=USER,
        user="me",
        metadata={"a": "b"},
        seed=-1,
        max_tokens=1,
        presence_penalty=0,
        response_format={"type": "text"},
        extra_body={"top_k": -1, "min_p": 0.5, "ignore_eos": True, "stop_token_ids": [7]},
    )
    sampling = stack.scheduler.submits[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.5, 2**64 - 1)
    assert list(sampling.stop_token_ids) == [7]


async def test_models_and_pages(stack: Stack, http: httpx.AsyncClient) -> None:
    models = await stack.gateway.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await stack.gateway.openai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await stack.gateway.openai.models.retrieve("other")
    for path in ("/health", "/livez"):
        assert (await http.get(path)).json() == {"status": "ok"}
    assert "version" in (await http.get("/version")).json()
    service = stack.gateway.service.generation_service
    await until(lambda: service.readiness.problem == "", "readiness")
    for path in ("/ready", "/readyz"):
        assert (await http.get(path)).json() == {"status": "serving"}


async def test_sse_framing(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("line\nbreak")
    body = {"model": MODEL, "prompt": "x", "stream": True}
    reply = await http.post("/v1/completions", json=body, headers={"x-request-id": "my-id.1"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"] == "my-id.1"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("\n" not in event for event in events)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "line\nbreak"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop") == 1
    assert "usage" not in chunks[0]


async def test_one_chunk_per_token_while_the_client_keeps_up(stack: Stack) -> None:
    """It keeps up: each token comes when it has the one before."""
    tokens, scheduler = stack.gateway.ids("one two three four"), stack.scheduler

    def script(_record: object, _choice: int) -> Iterator[int]:
        for token in (*tokens, stack.gateway.card.eos_token_ids[0]):
            scheduler.is_open.clear()
            yield token

    scheduler.script = script
    stream = await stack.gateway.openai.completions.create(model=MODEL, prompt="x", stream=True)
    texts = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        scheduler.is_open.set()
    assert len([text for text in texts if text]) == len(tokens)


async def test_an_error_in_mid_stream_is_an_event(stack: Stack) -> None:
    stack.says("cut short", then_stop=False)
    stream = await stack.gateway.openai.chat.completions.create(
        model=MODEL, messages=USER, stream=True
    )
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - it raises

    with pytest.raises(openai.APIError, match="the script ended"):
        await read()
    assert "".join(texts) == "cut short"
    with pytest.raises(openai.InternalServerError, match="the script ended"):
        await stack.gateway.openai.chat.completions.create(model=MODEL, messages=USER)


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_disconnect_cancels(
    stack: Stack, http: httpx.AsyncClient, is_streaming: bool
) -> None:
    body = {"model": MODEL, "prompt": "x", "stream": is_streaming, "ignore_eos": True}
    # So that it does not end by itself before it is missed.
    body["max_tokens"] = 200
    stack.scheduler.step_s = 0.02

    async def post() -> None:
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_bytes():
                pass

    posting = asyncio.create_task(post())
    await until(lambda: len(stack.scheduler.submits) == 1, "the submit")
    posting.cancel()
    await until(lambda: len(stack.scheduler.cancels) == 1, "the cancel")
    await until(lambda: stack.scheduler.live_count == 0, "an idle scheduler")


async def test_an_idempotency_key_names_the_request(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("once")
    body = {"model": MODEL, "prompt": "x"}
    key = {"idempotency-key": "retry-7"}
    first = await http.post("/v1/completions", json=body, headers=key)
    again = await http.post("/v1/completions", json=body, headers=key)
    assert first.json()["choices"] == again.json()["choices"]
    assert first.json()["id"] == "cmpl-retry-7"
    assert len(stack.scheduler.submits) == 1
    other = await http.post("/v1/completions", json=body | {"n": 2}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "already_exists")
