"""Each way to fail is the exception that the OpenAI package has for it."""

import asyncio
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.whole_stack import MODEL, Door, WholeStack, wait_until

# Of the SDK's source: a method of its client, and a path.
CALL = re.compile(r'self\._(get|post|delete)(?:_api_list)?\(\s*(?:path_template\(\s*)?f?"(/[^"]+)"')
PLACE = re.compile(r"\{[^}]*\}")
WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    ("temperature", {"temperature": 3}, "temperature"),
    ("a negative temperature", {"temperature": -0.1}, "temperature"),
    ("top_p", {"top_p": 0}, "top_p"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens"),
    ("more than the context", {"max_tokens": 10**6}, "max_tokens"),
    ("no such n", {"n": 0}, "n"),
    ("a huge n", {"n": 1_000_000}, "n"),
    ("logprobs", {"logprobs": 21}, "logprobs"),
    ("a stop too many", {"stop": ["x"] * 17}, "stop"),
    ("an empty stop", {"stop": ""}, "stop"),
    ("a bias of no token", {"logit_bias": {"999999": 1}}, "logit_bias"),
    ("a bias that is no id", {"logit_bias": {"cat": 1}}, "logit_bias"),
    ("presence_penalty", {"presence_penalty": 2.5}, "presence_penalty"),
    ("frequency_penalty", {"frequency_penalty": -2.5}, "frequency_penalty"),
    ("a suffix", {"suffix": "and then"}, "suffix"),
    ("best_of", {"best_of": 4}, "best_of"),
    ("an empty prompt list", {"prompt": []}, "prompt"),
    ("a token beyond the vocabulary", {"prompt": [1536]}, "prompt"),
    ("a misspelt key", {"extra_body": {"max_token": 5}}, "max_token"),
    ("a seed beyond 64 bits", {"seed": 2**64}, "seed"),
    ("echo with too many logprobs", {"echo": True, "logprobs": 21}, "logprobs"),
    ("no output and nothing else", {"max_tokens": 0}, "max_tokens"),
    ("prompt_logprobs", {"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    ("options of no stream", {"stream_options": {"include_usage": True}}, "stream_options"),
]
CHAT_WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    ("no messages", {"messages": []}, "messages"),
    ("an image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    (
        "a tool's name",
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        "tools.0.function.name",
    ),
    (
        "a schema that is none",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format",
    ),
    ("top_logprobs alone", {"top_logprobs": 3}, "top_logprobs"),
    ("audio", {"modalities": ["audio"]}, "modalities"),
]


@pytest.mark.parametrize(("name", "change", "param"), WRONG, ids=[row[0] for row in WRONG])
def test_bad_completions(
    client: OpenAI, name: str, change: dict[str, Any], param: str | None
) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**body)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param


@pytest.mark.parametrize(("name", "change", "param"), CHAT_WRONG, ids=[r[0] for r in CHAT_WRONG])
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_chats(
    async_client: AsyncOpenAI, name: str, change: dict[str, Any], param: str | None, stream: bool
) -> None:
    messages = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": stream, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        await async_client.chat.completions.create(**body)
    assert param is None or caught.value.param == param


def test_too_long_a_prompt_has_openais_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="sushi " * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_no_such_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_no_such_path_or_method(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="generates text, and nothing else") as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unknown_url"
    with pytest.raises(openai.APIStatusError) as refused:
        client.models.delete(MODEL)
    assert refused.value.status_code == 405
    with pytest.raises(openai.APIStatusError, match="it takes POST"):
        client.get("/responses", cast_to=object)
    for path, hint in (
        (
            "responses/compact",
            "Not Found; nothing is compacted; truncation auto leaves out the old",
        ),
        ("decisions", "generates text, and nothing else"),
        ("edits", "there are /v1/completions"),
        ("skills", "there are /v1/conversations and /v1/responses"),
        ("moderations", "generates text, and nothing else"),
        ("audio/speech", "generates text, and nothing else"),
        ("uploads", "POST /v1/files takes a file whole"),
        ("vector_stores", "files are for /v1/batches"),
        ("messages", "there are /v1/chat/completions and /v1/responses"),
        ("organization/projects", "what is used in /metrics"),
        ("prompts/pmpt_1", "prompts are not kept"),
        ("nothing", "GET /docs has all paths"),
    ):
        with pytest.raises(openai.NotFoundError, match=hint) as absent:
            client.post(f"/{path}", body={"model": MODEL}, cast_to=object)
        assert absent.value.code == "unknown_url"
    # What is here under another name is named.
    bare = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    with pytest.raises(openai.NotFoundError, match="paths begin with /v1"):
        bare.models.list()
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses keeps what it answers"):
        client.chat.completions.retrieve("chatcmpl-1")
    with pytest.raises(openai.APIStatusError, match="chats are not kept"):
        client.chat.completions.list()
    messages: Any = [{"role": "user", "content": "x"}]
    for store in (None, False):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, store=store)
    with pytest.raises(openai.BadRequestError, match="only POST /v1/responses keeps") as kept:
        client.chat.completions.create(model=MODEL, messages=messages, store=True)
    assert kept.value.param == "store"


def paths_of_the_sdk() -> set[tuple[str, str]]:
    """Methods, and paths with an id in each place for one."""
    found = set()
    for source in Path(openai.resources.__path__[0]).rglob("*.py"):
        calls = CALL.findall(source.read_text())
        found |= {(method.upper(), PLACE.sub("x", path)) for method, path in calls}
    assert len(found) > 100
    return found


def test_whatever_the_sdk_asks_for_is_answered_in_a_sentence(client: OpenAI) -> None:
    with httpx.Client(base_url=str(client.base_url), timeout=60) as http:
        for method, path in sorted(paths_of_the_sdk()):
            reply = http.request(method, path.removeprefix("/"), json={})
            assert reply.status_code < 500
            error = reply.json().get("error", {})
            if error.get("code") in ("unknown_url", "method_not_allowed"):
                name, _, hint = error["message"].partition(";")
                assert name.startswith(f"{method} /v1{path.partition('?')[0]}: ")
                assert hint


def test_an_output_that_cannot_go_on_is_its_requests_own_fault(client: OpenAI) -> None:
    """One token is allowed, and not twice."""
    wishes = {"allowed_token_ids": [70], "bad_words_token_ids": [[70, 70]]}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "extra_body": wishes}
    rule = "cannot go on as it was asked for: allowed_token_ids, bad_words"
    with pytest.raises(openai.BadRequestError, match=rule) as caught:
        client.completions.create(prompt="x", **body)
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "unsatisfiable")
    with pytest.raises(openai.APIError, match=rule) as streamed:
        for _ in client.completions.create(prompt="x", stream=True, **body):
            pass
    assert streamed.value.code == "unsatisfiable"
    response = client.responses.create(model=MODEL, input="x", extra_body=wishes)
    assert (response.status, response.error and response.error.code) == ("failed", "invalid_prompt")


def test_an_idempotency_key_used_twice(client: OpenAI) -> None:
    headers = {"Idempotency-Key": "twice"}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "extra_headers": headers}
    first = client.completions.create(prompt="The chef", **body)
    assert client.completions.create(prompt="The chef", **body).choices == first.choices
    with pytest.raises(openai.ConflictError):
        client.completions.create(prompt="The salmon", **body)


def test_errors_name_the_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model=MODEL, prompt="x", n=0, extra_headers={"x-request-id": "mine-7"}
        )
    assert caught.value.request_id == "mine-7"


def test_headers_of_an_answer(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-8"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-8"
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().usage is not None
    other = client.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=1)
    assert other.request_id not in (None, "", "mine-8")


async def test_headers_of_a_stream(async_client: AsyncOpenAI) -> None:
    async with async_client.completions.with_streaming_response.create(
        model=MODEL, prompt="x", max_tokens=2, stream=True
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["cache-control"] == "no-store"
        lines = [line async for line in raw.iter_lines()]
    assert "data: [DONE]" in lines


def long_request(client: OpenAI, **more: Any) -> Any:
    extra = {"ignore_eos": True}
    return client.completions.create(
        model=MODEL, prompt="The chef", max_tokens=900, extra_body=extra, **more
    )


def unread_stream(client: OpenAI) -> Any:
    """More than fits between here and there: it does not end before it is read."""
    return long_request(client, stream=True, n=8, logprobs=20)


def test_a_timeout_of_the_client_cancels(client: OpenAI, whole_stack: WholeStack) -> None:
    with whole_stack.held(), pytest.raises(openai.APITimeoutError):
        long_request(client, timeout=0.1)
    wait_until(lambda: not whole_stack.problem(), "nothing runs for a client that left")


async def test_a_timeout_of_the_async_client_cancels(
    async_client: AsyncOpenAI, whole_stack: WholeStack
) -> None:
    with whole_stack.held(), pytest.raises(openai.APITimeoutError):
        await async_client.completions.create(
            model=MODEL,
            prompt="x",
            max_tokens=900,
            timeout=0.1,
            extra_body={"ignore_eos": True},
        )
    await asyncio.to_thread(wait_until, lambda: not whole_stack.problem(), "an idle cell")


def test_closing_a_stream_cancels(client: OpenAI, whole_stack: WholeStack) -> None:
    with long_request(client, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: not whole_stack.problem(), "an idle cell")


async def test_leaving_an_async_stream_cancels(
    async_client: AsyncOpenAI, whole_stack: WholeStack
) -> None:
    stream = await async_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a story"}],
        stream=True,
        max_tokens=900,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    await asyncio.to_thread(wait_until, lambda: not whole_stack.problem(), "an idle cell")


async def test_a_cancelled_task_cancels(async_client: AsyncOpenAI, whole_stack: WholeStack) -> None:
    is_cancelled = False
    # Once more if it was over before anybody looked.
    while not is_cancelled:
        asked = asyncio.create_task(
            async_client.completions.create(
                model=MODEL, prompt="The chef", max_tokens=900, extra_body={"ignore_eos": True}
            )
        )

        def has_begun(asked: "asyncio.Task[Any]" = asked) -> bool:
            return bool(whole_stack.state().running) or asked.done()

        await asyncio.to_thread(wait_until, has_begun, "it runs")
        is_cancelled = asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.to_thread(wait_until, lambda: not whole_stack.problem(), "an idle cell")


def test_the_rate_limit_says_when_to_come_back(
    another_door: Callable[..., Door], whole_stack: WholeStack
) -> None:
    door = another_door(streams_max=1)
    with OpenAI(base_url=door.openai, api_key="any", max_retries=0, timeout=60) as client:
        with unread_stream(client) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=MODEL, prompt="x")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.type == "rate_limit_error"
        # Once the stream is gone, a client that retries does not even notice.
        patient = client.with_options(max_retries=8)
        answer = patient.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert answer.usage is not None


def test_a_deadline_of_the_server(
    another_door: Callable[..., Door], whole_stack: WholeStack
) -> None:
    door = another_door(request_timeout_s=0.2)
    with (
        OpenAI(base_url=door.openai, api_key="any", max_retries=0, timeout=60) as client,
        whole_stack.held(),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            long_request(client)
        assert caught.value.status_code == 504
        assert caught.value.code == "deadline_exceeded"
        with pytest.raises(openai.APIError, match="deadline"):
            for _ in long_request(client, stream=True):
                pass


def test_keys(another_door: Callable[..., Door], tmp_path: Path) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.alice]\nkeys = ["sha256:{digest}"]\n')
    door = another_door(api_keys_file=keys)
    with OpenAI(base_url=door.openai, api_key="wrong", max_retries=0, timeout=60) as wrong:
        with pytest.raises(openai.AuthenticationError):
            wrong.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        right = wrong.with_options(api_key="right")
        assert right.models.list().data[0].id == MODEL
        assert right.completions.create(model=MODEL, prompt="x", max_tokens=1).usage is not None


def test_a_gateway_that_restarts(another_door: Callable[..., Door]) -> None:
    door = another_door()
    with OpenAI(base_url=door.openai, api_key="any", max_retries=0, timeout=60) as client:
        before = client.completions.create(
            model=MODEL, prompt="The chef", max_tokens=5, temperature=0
        )
        door.process.kill()
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
        door.process.start()
        # Connections are refused, then it says 503 with retry-after, then it serves: who waits for
        # the model to be listed needs no second try.
        (model,) = client.with_options(max_retries=12).models.list().data
        after = client.completions.create(
            model=model.id, prompt="The chef", max_tokens=5, temperature=0
        )
        assert after.choices == before.choices


def test_a_gateway_that_dies_in_mid_stream(another_door: Callable[..., Door]) -> None:
    door = another_door()
    with OpenAI(base_url=door.openai, api_key="any", max_retries=0, timeout=60) as client:
        stream = unread_stream(client)
        next(iter(stream))
        door.process.kill()
        with pytest.raises(openai.APIConnectionError):
            for _ in stream:
                pass


@pytest.mark.parametrize(
    ("asked", "right"),
    [
        ("/v1/models/", "/v1/models"),
        ("//v1//models//", "/v1/models"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/responses/resp_1/", "/v1/responses/resp_1"),
        ("/v1/nothing/", ""),
    ],
)
def test_a_path_that_is_a_slip_away_is_named(client: OpenAI, asked: str, right: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.get(str(client.base_url.join(client.base_url.copy_with(path=asked))), cast_to=object)
    message = caught.value.body["message"]  # type: ignore[index]
    assert message.endswith(f" the path is {right}" if right else "paths that there are")
