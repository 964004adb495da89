"""Who is asked again: OpenAI's own client with its default retries, and gRPC's by service config.

What can never succeed arrives once. A poison request above all: each time it is tried it costs
workers. What may succeed later is repeated, at the time the answer says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from service_kit import errors
from tests.support.gateway_stack import MODEL, WAIT_S, Stack, until
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished

POISON = "the script ended"


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"requests_max": 1, "choices_max": 1}


def nothing(_record: object, _choice: int) -> Iterator[int]:
    """Every choice ends at once as failed, as one does that was convicted."""
    return iter(())


@asynccontextmanager
async def default_client(stack: Stack) -> AsyncIterator[tuple[AsyncOpenAI, list[httpx.Request]]]:
    """As OpenAI ships it, retries and all, and every request that it sends."""
    sent: list[httpx.Request] = []

    async def keep(request: httpx.Request) -> None:
        sent.append(request)

    http = DefaultAsyncHttpxClient(event_hooks={"request": [keep]})
    async with AsyncOpenAI(
        base_url=f"{stack.gateway.http_url}/v1", api_key="any", timeout=WAIT_S, http_client=http
    ) as client:
        assert client.max_retries > 0
        yield client, sent


async def test_a_poison_request_arrives_once(stack: Stack) -> None:
    stack.scheduler.script = nothing
    async with default_client(stack) as (client, sent):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt="x")
        assert (caught.value.code, POISON in str(caught.value)) == ("generation_failed", True)
        assert (len(sent), len(stack.scheduler.submits)) == (1, 1)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            )
        assert (len(sent), len(stack.scheduler.submits)) == (2, 2)


async def test_a_key_of_another_body_arrives_once(stack: Stack) -> None:
    stack.says("x")
    async with default_client(stack) as (client, sent):
        key = {"Idempotency-Key": "mine"}
        await client.completions.create(model=MODEL, prompt="one", extra_headers=key)
        with pytest.raises(openai.ConflictError):
            await client.completions.create(model=MODEL, prompt="two", extra_headers=key)
        assert len(sent) == 2


class TestDeadline:
    @pytest.fixture
    def stack_options(self) -> dict[str, Any]:
        return {"request_timeout_s": 0.1}

    async def test_what_ran_out_of_time_arrives_once(self, stack: Stack) -> None:
        stack.scheduler.is_open.clear()
        async with default_client(stack) as (client, sent):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model=MODEL, prompt="x")
            assert (caught.value.status_code, len(sent)) == (504, 1)


async def test_overload_is_asked_again(stack: Stack) -> None:
    stack.says("x")
    stack.scheduler.is_open.clear()
    async with default_client(stack) as (client, sent):
        first = asyncio.create_task(client.completions.create(model=MODEL, prompt="x"))
        await until(
            lambda: stack.gateway.service.generation_service.door.active != {}, "the first is live"
        )
        # More tries than it is shipped with: the first one's place may take a moment to be free.
        patient = client.with_options(max_retries=50)
        second = asyncio.create_task(patient.completions.create(model=MODEL, prompt="y"))
        await until(lambda: len(sent) >= 3, "the second one's second try")
        stack.scheduler.is_open.set()
        await asyncio.gather(first, second)
        assert len(stack.scheduler.submits) == 2


async def test_every_answer_that_is_an_error_says_whether_to_ask_again(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    stack.scheduler.script = nothing
    body = {"prompt": "x"}
    await http.post("/v1/completions", json=body, headers={"idempotency-key": "taken"})
    asked: list[tuple[str, str, dict[str, Any], int]] = [
        ("GET", "/nowhere", {}, 404),
        ("PUT", "/v1/models", {}, 405),
        ("GET", "/v1/responses/resp_nobody", {}, 404),
        ("GET", "/v1/responses/b@d", {}, 400),
        ("POST", "/v1/completions", {"json": body | {"n": 9}}, 400),
        ("POST", "/v1/completions", {"json": body | {"model": "other"}}, 404),
        ("POST", "/v1/completions", {"json": {}, "headers": {"idempotency-key": "taken"}}, 400),
        ("POST", "/v1/completions", {"json": body}, 500),
        ("POST", "/tokenize", {"json": {}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": "x" * (17 << 20)}}, 413),
    ]
    for method, path, given, status in asked:
        reply = await http.request(method, path, **given)
        told = (reply.status_code, reply.headers.get("x-should-retry"))
        assert told == (status, "false"), (method, path, reply.text)
    assert "x-should-retry" not in (await http.get("/v1/models")).headers
    stack.scheduler.cell.workers_ready = 0
    await until(
        lambda: stack.gateway.service.generation_service.readiness.problem != "", "not ready"
    )
    reply = await http.get("/ready")
    assert (reply.status_code, reply.headers["x-should-retry"]) == (503, "true")
    stack.gateway.service.generation_service.readiness.drain()
    reply = await http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (503, "true")


async def test_complaints_are_in_the_words_of_http(stack: Stack, http: httpx.AsyncClient) -> None:
    """`request_id` is the proto's."""
    stack.says("x")
    body = {"prompt": "x"}
    for method, path, headers, param in (
        ("GET", "/v1/responses/b@d", {}, "id"),
        ("DELETE", "/v1/responses/resp_", {}, "id"),
        ("POST", "/v1/responses/b@d/cancel", {}, "id"),
        ("POST", "/v1/completions", {"idempotency-key": "b@d"}, "Idempotency-Key"),
    ):
        content = body if path.endswith("completions") else None
        reply = await http.request(method, path, headers=headers, json=content)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: must ")


# Over gRPC the retries are the channel's own, told by this and by what the status carries.
EAGER = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": [
                    "INVALID_ARGUMENT",
                    "ALREADY_EXISTS",
                    "RESOURCE_EXHAUSTED",
                    "DEADLINE_EXCEEDED",
                    "UNAVAILABLE",
                    "INTERNAL",
                    "DATA_LOSS",
                    "CANCELLED",
                ],
            },
        }
    ]
}
ANSWER = [accepted(), delta(0, "x"), finished(1), done(1)]


@asynccontextmanager
async def eager_stub(address: str) -> AsyncIterator[Any]:
    options = [("grpc.service_config", json.dumps(EAGER))]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield InferenceServiceStub(channel)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("n", "no"),
        errors.AlreadyExists("request 'x'"),
        errors.DeadlineExceeded("queue"),
        errors.DataLoss("other tokens"),
        errors.Cancelled(),
        errors.NotLeader(""),
        pytest.param(ValueError("a fault of ours"), id="ValueError"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_grpc_repeats_nothing_that_cannot_succeed(error: Exception) -> None:
    async with ScriptedGateway([error], ANSWER) as gateway, eager_stub(gateway.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(pb.GenerateRequest(text="x"), timeout=WAIT_S)))
    assert len(gateway.calls) == 1
    assert dict(caught.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "-1"


@pytest.mark.parametrize("error", [errors.Overloaded("full", 0.05), errors.Unavailable("a", 0.05)])
async def test_grpc_repeats_what_may_succeed_later(error: errors.KaitenError) -> None:
    async with ScriptedGateway([error], ANSWER) as gateway, eager_stub(gateway.address) as stub:
        call = stub.Generate(pb.GenerateRequest(text="x"), timeout=WAIT_S)
        kinds = [response.event.WhichOneof("event") async for response in call]
    assert (len(gateway.calls), kinds[-1]) == (2, "done")
