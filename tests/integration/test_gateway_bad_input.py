"""The same mistake over both protocols: code, field, rule and limit, and nothing disturbed."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from tests.support.gateway_stack import JSON, MODEL, Stack, running_stack, text_of

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"text_bytes_max": 10_000, "body_bytes_max": 100_000}


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One mistake in both languages, and what must be named."""

    name: str
    over_grpc: dict[str, Any]
    over_http: dict[str, Any]
    field: str
    says: str
    param: str | None = None
    code: Any = grpc.StatusCode.INVALID_ARGUMENT
    status: int = 400


def sampling(says: str, **wrong: Any) -> Wrong:
    [(key, value)] = wrong.items()
    return Wrong(
        name=f"{key}={value}",
        over_grpc={"text": "x", "sampling": SamplingParams(**wrong)},
        over_http={"prompt": "x", key: value},
        field=f"sampling.{key}",
        param=key,
        says=says,
    )


CASES = [
    Wrong(
        name="empty prompt",
        over_grpc={"text": ""},
        over_http={"prompt": ""},
        field="text",
        param="prompt",
        says="at least one token",
    ),
    Wrong(
        name="no ids",
        over_grpc={"token_ids": {"ids": []}},
        over_http={"prompt": [[]]},
        field="token_ids.ids",
        param="prompt",
        says="at least one token",
    ),
    Wrong(
        name="too many ids",
        over_grpc={"token_ids": {"ids": [1] * 256}},
        over_http={"prompt": [1] * 256},
        field="token_ids.ids",
        param="prompt",
        says="256 tokens; at most 255",
    ),
    Wrong(
        name="text of too many tokens",
        over_grpc={"text": "x1" * 300},
        over_http={"prompt": "x1" * 300},
        field="text",
        param="prompt",
        says="600 tokens; at most 255",
    ),
    Wrong(
        name="text of too many bytes",
        over_grpc={"text": "x" * 10_001},
        over_http={"prompt": "x" * 10_001},
        field="text",
        param="prompt",
        says="at most 10000 bytes, got 10001",
    ),
    Wrong(
        name="id beyond the vocabulary",
        over_grpc={"token_ids": {"ids": [1, 10**9]}},
        over_http={"prompt": [1, 10**9]},
        field="token_ids.ids",
        param="prompt",
        says="got 1000000000",
    ),
    Wrong(
        name="n too large",
        over_grpc={"text": "x", "n": 1_000_000},
        over_http={"prompt": "x", "n": 1_000_000},
        field="n",
        says="[1, 16], got 1000000",
    ),
    Wrong(
        name="n zero",
        over_grpc={"text": "x", "n": 0},
        over_http={"prompt": "x", "n": 0},
        field="n",
        says="[1, 16], got 0",
    ),
    Wrong(
        name="unknown model",
        over_grpc={"text": "x", "model": "other"},
        over_http={"prompt": "x", "model": "other"},
        field="",
        param="model",
        says="model 'other' not found",
        code=grpc.StatusCode.NOT_FOUND,
        status=404,
    ),
    Wrong(
        name="too many stops",
        over_grpc={"text": "x", "stop": ["s"] * 17},
        over_http={"prompt": "x", "stop": ["s"] * 17},
        field="stop",
        says="at most 16 strings, got 17",
    ),
    Wrong(
        name="stop too long",
        over_grpc={"text": "x", "stop": ["s" * 257]},
        over_http={"prompt": "x", "stop": "s" * 257},
        field="stop",
        says="at most 256 characters each, got 257",
    ),
    Wrong(
        name="empty stop",
        over_grpc={"text": "x", "stop": [""]},
        over_http={"prompt": "x", "stop": [""]},
        field="stop",
        says="empty string",
    ),
    Wrong(
        name="min over max",
        over_grpc={"text": "x", "sampling": SamplingParams(max_tokens=2, min_tokens=3)},
        over_http={"prompt": "x", "max_tokens": 2, "min_tokens": 3},
        field="sampling.min_tokens",
        param="min_tokens",
        says="at most max_tokens, which is 2, got 3",
    ),
    sampling("[0, 2], got 2.5", temperature=2.5),
    sampling("[0, 2], got -1", temperature=-1.0),
    sampling("more than 0", top_p=0.0),
    sampling("more than 0 and at most 1, got 1.5", top_p=1.5),
    sampling("[0, 1], got -0.5", min_p=-0.5),
    sampling("[1, 4294967295], got 0", max_tokens=0),
    sampling("at most 255, got 256", max_tokens=256),
    sampling("[0, 20], got 21", logprobs=21),
    sampling("token ids must be in", stop_token_ids=[10**6]),
    sampling("at most 256 ids, got 257", stop_token_ids=[1] * 257),
]


@pytest.mark.parametrize("wrong", CASES, ids=lambda wrong: wrong.name)
async def test_a_mistake_has_one_cause_and_two_codes(stack: Stack, wrong: Wrong) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(**wrong.over_grpc)
    assert caught.value.code() == wrong.code
    assert wrong.says in (caught.value.details() or "")
    if wrong.field:
        assert violation(caught.value).field == wrong.field
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
        reply = await http.post("/v1/completions", json={"model": MODEL} | wrong.over_http)
    assert reply.status_code == wrong.status
    error = reply.json()["error"]
    assert wrong.says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == (wrong.param or wrong.field)
    assert stack.scheduler.submits == []


def violation(error: "grpc.aio.AioRpcError") -> Any:
    """The field violation in the rich details."""
    trailers = dict(error.trailing_metadata() or ())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    for detail in status.details:
        bad = BadRequest()
        if detail.Unpack(bad):
            return bad.field_violations[0]
    raise AssertionError("no BadRequest among the details")


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("key", ["temperature", "top_p", "min_p"])
async def test_what_is_no_number_is_refused(stack: Stack, key: str, wrong: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(text="x", sampling={key: wrong})
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    body = json.dumps({"model": MODEL, "prompt": "x", key: wrong})
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
        reply = await http.post("/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 400
    assert "is not valid JSON" in reply.json()["error"]["message"]


HTTP_ONLY: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": [1, -1]}, "got -1", "prompt"),
    ({"prompt": [2**63]}, "got 9223372036854775808", "prompt"),
    ({"prompt": [[1], []]}, "at least one token", "prompt"),
    ({"prompt": []}, "must not be empty", "prompt"),
    ({"prompt": ["x"] * 65}, "at most 64 prompts, got 65", "prompt"),
    ({"prompt": {"a": 1}}, "must be a string, a list of strings", "prompt"),
    ({"prompt": [True]}, "must be a string, a list of strings", "prompt"),
    ({"prompt": "\ud800"}, "is not valid JSON", None),
    ({"prompt": "x" * 10_001}, "prompt: must have at most 10000 bytes", "prompt"),
    ({"prompt": "x", "n": -1}, "got -1", "n"),
    ({"prompt": "x", "n": "2"}, "valid integer", "n"),
    ({"prompt": "x", "seed": 2**64}, f"[{-(2**63)}, {2**64 - 1}], got {2**64}", "seed"),
    ({"prompt": "x", "seed": -(2**63) - 1}, "got -9223372036854775809", "seed"),
    ({"prompt": "x", "positions": [1]}, "positions: is not a known field", "positions"),
    ({"prompt": "x", "max_token": 3}, "not a known field", "max_token"),
    ({"prompt": "x", "tools": [{"type": "function"}]}, "is for chats", "tools"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "'json_schema'", "response_format.type"),
    ({"prompt": "x", "suffix": "end"}, "not supported", "suffix"),
    ({"prompt": "x", "store": True}, "only POST /v1/responses keeps", "store"),
    ({"prompt": "x", "conversation": "c"}, "POST /v1/responses goes on", "conversation"),
    ({"prompt": "x", "functions": [{}]}, "chat has tools for them", "functions"),
    ({"prompt": "x", "max_tokens": 0, "echo": True}, "[1, 4294967295], got 0", "max_tokens"),
    ({"prompt": "x", "echo": True, "logprobs": 21}, "in [0, 20], got 21", "logprobs"),
    ({"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": -1}, "got -1", "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, "[1, 4294967295], got 0", "max_tokens"),
    ({"prompt": "x", "best_of": 2}, "not supported", "best_of"),
    ({"prompt": "x", "best_of": 1, "n": 2}, "at least n, which is 2", "best_of"),
    ({"prompt": "x", "background": True}, "is not a known field", "background"),
    ({"prompt": "x", "priority": -1001}, "[-1000, 1000]", "priority"),
    ({"prompt": "x", "prompt_logprobs": 21}, "in [0, 20], got 21", "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": -1}, "in [0, 20], got -1", "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "in streams", "prompt_logprobs"),
    ({"prompt": "x", "stream_options": {}}, "left out where stream is not", "stream_options"),
    ({"prompt": "x", "logit_bias": {"one": 5}}, "must be token ids, got 'one'", "logit_bias"),
    ({"prompt": "x", "logit_bias": {"01": 5}}, "must be token ids, got '01'", "logit_bias"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "in [-100, 100], got 101", "logit_bias"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "got -1", "logit_bias"),
    ({"prompt": "x", "logit_bias": [1]}, "valid dictionary", "logit_bias"),
    ({"prompt": "x", "presence_penalty": 2.5}, "in [-2, 2], got 2.5", "presence_penalty"),
    ({"prompt": "x", "repetition_penalty": 0}, "more than 0", "repetition_penalty"),
    ({"prompt": "x", "bad_words_token_ids": [[]]}, "empty sequence", "bad_words_token_ids"),
    ({}, "is required", "prompt"),
]


@pytest.mark.parametrize(("body", "says", "param"), HTTP_ONLY)
async def test_mistakes_only_json_can_make(
    stack: Stack, body: dict[str, Any], says: str, param: str | None
) -> None:
    content = json.dumps({"model": MODEL} | body)
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
        reply = await http.post("/v1/completions", content=content, headers=JSON)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


async def test_a_priority_is_not_told_turned_round(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
        reply = await http.post("/v1/completions", json={"prompt": "x", "priority": -1001})
    assert reply.json()["error"]["message"] == "priority: must be in [-1000, 1000]"


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role tool"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role: must be one of"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "images, audio and files are not taken",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type: input should be 'text'; images, audio and files are not taken",
    ),
    (
        {"tools": [{"type": "custom", "custom": {"name": "x"}}], "messages": []},
        "tools.0.type: input should be 'function'",
    ),
    ({"messages": "hi"}, "valid list"),
]


@pytest.mark.parametrize(("body", "says"), CHAT)
async def test_wrong_conversations(stack: Stack, body: dict[str, Any], says: str) -> None:
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
        reply = await http.post("/v1/chat/completions", json={"model": MODEL} | body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


BEYOND = '{"messages":[{"role":"user","content":"x"}],"model":"tiny",%s}'


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (
            '"tools":[{"type":"function","function":{"name":"f","parameters":{"a":1e999}}}]',
            "tools.0.function.parameters",
        ),
        ('"structured_outputs":{"json":{"maximum":1e999}}', "structured_outputs.json"),
        (
            '"response_format":{"type":"json_schema","json_schema":{"schema":{"minimum":-1e999}}}',
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_a_number_that_none_can_hold(stack: Stack, field: str, param: str) -> None:
    """JSON may write it, and Python reads it as an infinite one, which JSON has not."""
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, headers=JSON, timeout=60) as http:
        reply = await http.post("/v1/chat/completions", content=BEYOND % field)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param}: must have no number beyond 1.8e308"


GZIP, PLAIN = {"content-encoding": "gzip"}, {"content-encoding": "identity"}


async def test_wrong_http(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, headers=JSON, timeout=60) as http:
        replies = [
            (await http.post("/v1/completions", content=b"{"), 400, "not valid JSON"),
            (await http.post("/v1/completions", content=b"[1]"), 400, "JSON object"),
            (await http.post("/v1/completions", content=b"[" * 10_000), 400, "not valid JSON"),
            (await http.post("/v1/completions", content=b"[" * 50_000), 400, "at most"),
            (await http.post("/v1/completions", content=b"x" * 100_001), 413, "100000 bytes"),
            (await http.post("/v1/completions", content=chunks()), 413, "100000 bytes"),
            (await http.get("/v1/completions"), 405, "Method Not Allowed"),
            (await http.get("/nowhere"), 404, "Not Found"),
            # Where GET and DELETE have an id.
            (await http.get("/v1/responses/input_tokens"), 405, "it takes POST"),
            (await http.delete("/v1/responses/input_tokens"), 405, "it takes POST"),
            (await http.post("/v1/completions", content=b"{", headers=GZIP), 415, "got 'gzip'"),
            (await http.post("/v1/completions", content=b"{", headers=PLAIN), 400, "not valid"),
            (await http.post("/v1/files", content=b"{"), 415, "must be multipart/form-data, got"),
        ]
    for reply, status, says in replies:
        assert reply.status_code == status
        assert says in reply.json()["error"]["message"]


async def chunks() -> AsyncIterator[bytes]:
    """A body without content-length."""
    for _ in range(11):
        yield b"x" * 10_000


async def test_wrong_grpc(stack: Stack) -> None:
    stub = stack.gateway.inference
    long_id = "x" * 129
    for fields in ({"text": "x", "request_id": "a/b"}, {"text": "x", "request_id": long_id}, {}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(**fields)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for call in (
        stub.Cancel(pb.CancelRequest(request_id="nobody")),
        stub.GetRequest(pb.GetRequestRequest(request_id="nobody")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert "default:" not in (caught.value.details() or "")


async def test_the_same_id_with_another_body_is_refused(stack: Stack) -> None:
    stack.says("x")
    await stack.generate(text="one", request_id="taken")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(text="two", request_id="taken")
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "default:" not in (caught.value.details() or "")


async def test_after_all_mistakes_the_gateway_serves_on(stack: Stack) -> None:
    for wrong in CASES:
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.generate(**wrong.over_grpc)
    stack.says("still here")
    assert text_of(await stack.generate(text="x")) == "still here"
    load = await stack.ledger.load()
    assert (load.choices, load.prompt_tokens) == (0, 0)


async def test_overload_is_refused_at_once(tmp_path: Path, redis_url: str, cell: str) -> None:
    """While what fills the queue still waits; `benchmarks.faults.refusals` measures how soon."""
    async with running_stack(
        tmp_path / "model", redis_url, cell, requests_max=2, choices_max=2
    ) as stack:
        stack.scheduler.is_open.clear()
        call = stack.gateway.inference.Generate(pb.GenerateRequest(text="x", n=2), timeout=300)
        await anext(aiter(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(text="y")
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(caught.value.trailing_metadata() or ())
        assert int(trailers["grpc-retry-pushback-ms"]) > 0
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
            reply = await http.post("/v1/completions", json={"model": MODEL, "prompt": "y"})
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"
        call.cancel()
