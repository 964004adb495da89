"""Both doors' smaller promises: presentation, batches, tokens, deadlines, caps, health, pings."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from gateway.detokenize import decode
from protos.kaiten.v1 import inference_service_pb2 as pb
from protos.kaiten.v1 import model_service_pb2 as model_pb
from protos.kaiten.v1.common_pb2 import FinishReason, SamplingParams
from protos.kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.gateway_stack import MODEL, Stack, running_gateway, running_stack, text_of, until
from tests.support.tokenizers import token_id, write_model_folder

USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def stack(tmp_path: Path, redis_url: str, cell: str) -> AsyncIterator[Stack]:
    async with running_stack(
        tmp_path / "model", redis_url, cell, sse_ping_s=0.05, prompts_max=4
    ) as running:
        yield running


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=10) as client:
        yield client


# Presentation


async def test_the_model_may_be_left_out(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("x")
    assert (await http.post("/v1/completions", json={"prompt": "x"})).json()["model"] == MODEL
    body = {"messages": USER}
    assert (await http.post("/v1/chat/completions", json=body)).json()["model"] == MODEL
    reply = await http.post("/v1/completions", json={"prompt": "x", "model": "../etc"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_the_stop_string_is_shown_on_request(
    stack: Stack, http: httpx.AsyncClient, is_streaming: bool
) -> None:
    stack.says("one END two")
    body = {"prompt": "x", "stop": ["END", "ND t"], "include_stop_str_in_output": True}
    if not is_streaming:
        reply = await http.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"] == "one END"
        return
    events = await stack.generate(text="x", stop=["END"], include_stop=True, request_id="s")
    assert text_of(events) == "one END"
    call = stack.gateway.inference.Attach(pb.AttachRequest(request_id="s"), timeout=10)
    assert text_of([response.event async for response in call]) == "one END"


async def test_control_tokens_are_shown_on_request(stack: Stack, http: httpx.AsyncClient) -> None:
    tokenizer = stack.gateway.card.tokenizer
    marker, stop = token_id(tokenizer, "<|user|>"), stack.gateway.card.eos_token_ids[0]
    tokens = [marker, *stack.gateway.ids("hello"), marker, stop]
    stack.scheduler.script = lambda _record, _choice: iter(tokens)
    body = {"prompt": "x"}
    hidden = await http.post("/v1/completions", json=body)
    assert hidden.json()["choices"][0]["text"] == "hello"
    shown = await http.post("/v1/completions", json=body | {"skip_special_tokens": False})
    assert shown.json()["choices"][0]["text"] == "<|user|>hello<|user|>"
    both = await stack.generate(text="x", show_special_tokens=True, include_stop=True)
    assert text_of(both) == "<|user|>hello<|user|></s>"


async def test_template_options_by_allowed_name_only(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    template = "{{ messages[0]['content'] }}|{{ enable_thinking }}|{{ date_string }}"
    folder = write_model_folder(tmp_path / "model", chat_template=template)
    async with running_stack(folder, redis_url, cell) as stack:
        stack.says("x")
        options = {"enable_thinking": False, "date_string": "<|end|>today"}
        await stack.gateway.openai.chat.completions.create(
            model=MODEL, messages=USER, extra_body={"chat_template_kwargs": options}
        )
        prompt = list(stack.scheduler.submits[0].prompt_token_ids)
        tokenizer = stack.gateway.card.tokenizer
        assert token_id(tokenizer, "<|end|>") not in prompt
        assert tokenizer.decode(prompt).endswith("|<|end|>today")
        conversation = pb.Conversation(
            messages=[pb.ChatMessage(role="user", content="hi")],
            template_options=[
                pb.TemplateOption(name="enable_thinking", flag=False),
                pb.TemplateOption(name="date_string", text="<|end|>today"),
            ],
        )
        await stack.generate(conversation=conversation)
        assert list(stack.scheduler.submits[1].prompt_token_ids) == prompt
        async with httpx.AsyncClient(base_url=stack.gateway.http_url) as http:
            for wrong in ("messages", "raise_exception", "x" * 1000):
                body = {"messages": USER, "chat_template_kwargs": {wrong: "x"}}
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 400
                assert "not among the allowed names" in reply.json()["error"]["message"]
        assert len(stack.scheduler.submits) == 2


@pytest.mark.parametrize("prompt", ["hello world", [["hello"], [7, 8, 9]]])
async def test_echo_gives_the_prompt_before_the_text(
    stack: Stack, http: httpx.AsyncClient, prompt: Any
) -> None:
    stack.says(" and on")
    prompts = [prompt] if isinstance(prompt, str) else [stack.gateway.ids("hello"), [7, 8, 9]]
    pieces = stack.gateway.card.pieces
    expected = [
        (each if isinstance(each, str) else decode(pieces, each)) + " and on" for each in prompts
    ]
    body = {
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        "echo": True,
        "n": 2,
        "best_of": 2,
    }
    reply = await http.post("/v1/completions", json=body)
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert texts == [text for text in expected for _ in range(2)]
    got = [""] * len(texts)
    stream = await http.post("/v1/completions", json=body | {"stream": True})
    for line in stream.text.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            got[choice["index"]] += choice["text"]
    assert got == texts


async def test_priority_is_handed_on(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("x")
    await http.post("/v1/completions", json={"prompt": "x", "priority": -5})
    await stack.generate(text="x", priority=7)
    assert [record.priority for record in stack.scheduler.submits] == [5, 7]


async def test_timing_stands_in_the_last_message(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("x")
    expected = {
        "queue_ms": 0.001,
        "prefill_ms": 0.002,
        "decode_ms": 0.003,
        "preemptions": 0,
    }
    whole = (await http.post("/v1/completions", json={"prompt": "x"})).json()["kaiten"]
    assert expected.items() <= whole.items()
    assert whole["tokens_per_s"] == pytest.approx(2 / 3e-6, rel=1e-3)
    stream = await stack.gateway.openai.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert expected.items() <= (last.model_extra or {})["kaiten"].items()


# Tokens


async def test_tokenize_and_detokenize_over_both_doors(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    ids = stack.gateway.ids("hello 😀")
    reply = (await http.post("/tokenize", json={"prompt": "hello 😀"})).json()
    assert (reply["tokens"], reply["count"]) == (ids, len(ids))
    back = await http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "hello 😀"}
    models = stack.gateway.models
    typed = await models.Tokenize(model_pb.TokenizeRequest(text="hello 😀"))
    assert list(typed.token_ids) == ids
    assert (await models.Detokenize(model_pb.DetokenizeRequest(token_ids=ids))).text == "hello 😀"
    stack.says("x")
    await http.post("/v1/chat/completions", json={"messages": USER})
    chat = (await http.post("/tokenize", json={"messages": USER})).json()
    assert chat["tokens"] == list(stack.scheduler.submits[0].prompt_token_ids)
    special = [token_id(stack.gateway.card.tokenizer, "<|user|>")]
    shown = {"tokens": special, "skip_special_tokens": False}
    assert (await http.post("/detokenize", json=shown)).json() == {"prompt": "<|user|>"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": USER}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"prompt": "\ud800"}, 400),
        ("/tokenize", {"prompt": "x" * (5 << 20)}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [2**40]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
    ],
)
async def test_wrong_token_requests(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int
) -> None:
    reply = await http.post(path, content=json.dumps(body))
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


# Batches


async def batch(stack: Stack, *requests: pb.GenerateRequest) -> list[pb.GenerateBatchResponse]:
    call = stack.gateway.inference.GenerateBatch(
        pb.GenerateBatchRequest(requests=requests), timeout=10
    )
    return [response async for response in call]


async def test_a_batch_is_many_requests_and_a_wrong_one_harms_no_other(stack: Stack) -> None:
    stack.says("fine")
    wrong = pb.GenerateRequest(text="x", n=0, sampling=SamplingParams(temperature=9))
    responses = await batch(
        stack,
        pb.GenerateRequest(text="a", request_id="first"),
        wrong,
        pb.GenerateRequest(token_ids={"ids": []}),
        pb.GenerateRequest(text="b", n=2, return_token_ids=True),
    )
    for which, choices in ((0, 1), (3, 2)):
        events = [r.event for r in responses if r.index == which]
        assert [events[0].WhichOneof("event"), events[-1].WhichOneof("event")] == [
            "accepted",
            "done",
        ]
        assert [text_of(events, choice) for choice in range(choices)] == ["fine"] * choices
        has_ids = any(event.delta.token_ids for event in events)
        assert has_ids is (which == 3)
    errors = {r.index: r.error for r in responses if r.HasField("error")}
    assert set(errors) == {1, 2}
    assert errors[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [each.field for each in errors[1].fields] == ["n", "sampling.temperature"]
    assert [each.field for each in errors[2].fields] == ["token_ids.ids"]
    assert [list(r.prompt_token_ids) for r in stack.scheduler.submits] == [
        stack.gateway.ids("a"),
        stack.gateway.ids("b"),
    ]


async def test_leaving_a_batch_cancels_all_of_it(stack: Stack) -> None:
    stack.scheduler.step_s = 0.01
    endless = SamplingParams(ignore_eos=True)
    requests = [
        pb.GenerateRequest(text="x", sampling=endless, keep_running=index == 0)
        for index in range(4)
    ]
    call = stack.gateway.inference.GenerateBatch(
        pb.GenerateBatchRequest(requests=requests), timeout=20
    )
    seen: set[int] = set()
    async for response in call:
        seen.add(response.index)
        if len(seen) == 4:
            break
    call.cancel()
    await until(lambda: len(stack.scheduler.cancels) == 3, "three cancels")
    await until(lambda: not stack.gateway.service.front._active, "nobody followed")
    assert stack.scheduler.live_count == 1


async def test_batches_have_bounds(stack: Stack) -> None:
    for requests in ([], [pb.GenerateRequest(text="x")] * 5):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await batch(stack, *requests)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert stack.scheduler.submits == []


# Errors and deadlines


def detail(error: "grpc.aio.AioRpcError", kind: Any) -> Any:
    status = Status.FromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    found = kind()
    assert any(packed.Unpack(found) for packed in status.details)
    return found


async def test_every_wrong_field_is_named_at_once(stack: Stack, http: httpx.AsyncClient) -> None:
    sampling = SamplingParams(temperature=3, top_p=0, max_tokens=0, stop_token_ids=[10**6])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(text="", n=99, stop=[""], sampling=sampling)
    fields = [violation.field for violation in detail(caught.value, BadRequest).field_violations]
    assert fields == [
        "n",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.stop_token_ids",
        "stop",
    ]
    body = {"prompt": "x", "temperature": 3, "top_p": 0, "stop": [""]}
    error = (await http.post("/v1/completions", json=body)).json()["error"]
    assert error["param"] == "temperature"
    for name in ("temperature: ", "top_p: ", "stop: "):
        assert name in error["message"]


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_deadline_names_the_phase_before_the_clients_own_clock_ends_the_call(
    stack: Stack, phase: str
) -> None:
    if phase == "decode":
        stack.scheduler.step_s = 0.3
    else:
        stack.scheduler.is_open.clear()
        await until(lambda: stack.scheduler.is_parked, "a scheduler that stands still")
    if phase == "prefill":
        stack.scheduler.cell.running = 1
        watch = stack.gateway.service.front.readiness.watch
        await until(lambda: bool(watch.record and watch.record.running), "a running request")
    request = pb.GenerateRequest(text="x", sampling=SamplingParams(ignore_eos=True))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stack.gateway.inference.Generate(request, timeout=2.0):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == f"deadline exceeded in phase {phase!r}"
    assert dict(detail(caught.value, ErrorInfo).metadata) == {"phase": phase}
    stack.scheduler.is_open.set()
    await until(lambda: len(stack.scheduler.cancels) == 1, "the cancel")
    [record] = stack.scheduler.submits
    assert 1500 < record.timeout_ms <= 1800


async def test_what_the_scheduler_ended_names_the_phase_too(stack: Stack) -> None:
    stack.scheduler.is_open.clear()
    call = stack.gateway.inference.Generate(
        pb.GenerateRequest(text="x", request_id="d"), timeout=10
    )
    await anext(aiter(call))
    late = FinishReason.FINISH_REASON_DEADLINE_EXCEEDED
    await stack.ledger.cancel("default:d", reason=late)
    stack.scheduler.is_open.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    again = stack.gateway.inference.Attach(pb.AttachRequest(request_id="d"), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in again:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


# The doors themselves


async def test_oversized_metadata_and_messages_are_refused_in_bounded_memory(stack: Stack) -> None:
    """Our own process holds both ends, so what is allowed includes the client's copies."""
    before = psutil.Process().memory_info().rss
    text = "x" * (64 << 20)
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 4 << 20)]
    address = f"127.0.0.1:{stack.gateway.service.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        send = channel.unary_stream(
            "/kaiten.v1.InferenceService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _response in send(pb.GenerateRequest(text=text), timeout=20):
                    pass
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            metadata = (("junk", "y" * (1 << 20)),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _response in send(pb.GenerateRequest(text="x"), metadata=metadata):
                    pass
            assert caught.value.code() in (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.INTERNAL,
                grpc.StatusCode.UNKNOWN,
            )
    del text
    stack.says("alive")
    assert text_of(await stack.generate(text="x")) == "alive"
    assert psutil.Process().memory_info().rss - before < 500 << 20
    assert len(stack.scheduler.submits) == 1


async def test_a_connection_ends_at_its_age_and_streams_outlive_it(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with running_stack(
        tmp_path / "model", redis_url, cell, connection_age_s_max=1, step_s=0.05
    ) as stack:
        states: list[grpc.ChannelConnectivity] = []

        async def watch() -> None:
            state = stack.gateway.channel.get_state()
            while True:
                await stack.gateway.channel.wait_for_state_change(state)
                state = stack.gateway.channel.get_state()
                states.append(state)

        watching = asyncio.create_task(watch())
        sampling = SamplingParams(ignore_eos=True, max_tokens=50)
        events = await stack.generate(text="x", sampling=sampling)
        assert events[-1].HasField("done")
        assert grpc.ChannelConnectivity.IDLE in states
        watching.cancel()


async def test_health_per_service_is_watched(tmp_path: Path, redis_url: str, cell: str) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        names = ("", "kaiten.v1.InferenceService", "kaiten.v1.ModelService")
        calls = [
            HealthStub(stack.gateway.channel).Watch(
                health_pb2.HealthCheckRequest(service=name), timeout=20
            )
            for name in names
        ]
        serving = health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            while (await call.read()).status != serving:
                pass
        stack.scheduler.cell.workers_ready = 0
        for call in calls:
            assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stack.scheduler.cell.workers_ready = 1
        for call in calls:
            assert (await call.read()).status == serving
            call.cancel()
        unknown = HealthStub(stack.gateway.channel).Watch(
            health_pb2.HealthCheckRequest(service="nothing"), timeout=20
        )
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


async def test_a_silent_stream_is_pinged(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("late")
    stack.scheduler.is_open.clear()
    body = {"prompt": "x", "stream": True}
    lines: list[str] = []
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            lines.append(line)
            if lines.count(": ping") == 3:
                stack.scheduler.is_open.set()
    assert lines.count(": ping") >= 3
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "late"
    stack.scheduler.is_open.clear()
    stream = await stack.gateway.openai.completions.create(model=MODEL, prompt="x", stream=True)
    asyncio.get_running_loop().call_later(0.2, stack.scheduler.is_open.set)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "late"


async def test_every_answer_carries_the_request_id(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("x")
    replies = [
        await http.request(method, path, headers={"x-request-id": "mine.1"}, content=body)
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/v1/models", None),
            ("GET", "/nowhere", None),
            ("PUT", "/v1/models", None),
            ("POST", "/v1/completions", b"{"),
            ("POST", "/v1/completions", b'{"prompt": "x"}'),
            ("GET", "/v1/requests/nobody", None),
            ("POST", "/tokenize", b"x" * 100),
        )
    ]
    assert [reply.headers["x-request-id"] for reply in replies] == ["mine.1"] * len(replies)
    for wrong in ("a b", "x" * 129, "ü"):
        reply = await http.get("/health", headers={b"x-request-id": wrong.encode()})
        assert reply.headers["x-request-id"] != wrong
        assert len(reply.headers["x-request-id"]) == 24


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_pages_of_other_sites_only_when_allowed(
    tmp_path: Path, redis_url: str, cell: str, is_allowed: bool
) -> None:
    folder = write_model_folder(tmp_path / "model")
    origin = "https://page.example"
    origins = (origin,) if is_allowed else ()
    async with (
        running_gateway(folder, redis_url, cell, cors_origins=origins) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url) as http,
    ):
        reply = await http.get("/v1/models", headers={"origin": origin})
        assert reply.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        headers = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await http.options("/v1/completions", headers=headers)
        assert preflight.status_code == (200 if is_allowed else 405)
        other = await http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_the_document_names_every_route_and_body(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        url = path.replace("{name}", MODEL).replace("{id}", "nobody")
        for method, operation in operations.items():
            reply = await http.request(method, url, content=b"{}")
            assert str(reply.status_code) in operation["responses"], (method, path)
            kind = reply.headers["content-type"]
            assert kind in operation["responses"][str(reply.status_code)]["content"]
    text = json.dumps(document)
    references = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])
    properties = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "echo", "best_of", "include_stop_str_in_output", "priority"} <= set(
        properties
    )


async def test_a_hundred_visitors_leave_every_place_free(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """Connect, read a token, leave: afterwards as many streams fit as before."""
    async with running_stack(tmp_path / "model", redis_url, cell, streams_max=8) as stack:
        front = stack.gateway.service.front
        endless = SamplingParams(ignore_eos=True)

        async def visit() -> None:
            call = stack.gateway.inference.Generate(
                pb.GenerateRequest(text="x", sampling=endless), timeout=30
            )
            async for response in call:
                if response.event.HasField("delta"):
                    break
            call.cancel()

        for _ in range(25):
            await asyncio.gather(*(visit() for _ in range(4)))
            await until(lambda: not front._active, "nobody followed")
        stack.scheduler.is_open.clear()
        calls = [
            stack.gateway.inference.Generate(pb.GenerateRequest(text="x"), timeout=30)
            for _ in range(8)
        ]
        for call in calls:
            await anext(aiter(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(text="x")
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(detail(caught.value, ErrorInfo).metadata)["subject"] == "gateway"
        for call in calls:
            call.cancel()


async def test_a_client_that_pings_every_second_is_not_sent_away(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        stack.says("still connected")
        stack.scheduler.is_open.clear()
        options = [
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        address = f"127.0.0.1:{stack.gateway.service.grpc_port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=20)
            # Long enough for the strikes that would end in GOAWAY, counted on the loop's clock.
            asyncio.get_running_loop().call_later(4, stack.scheduler.is_open.set)
            events = [response.event async for response in call]
        assert text_of(events) == "still connected"


async def end_of(call: Any) -> grpc.StatusCode:
    """How a stream ended, after whatever was still under way."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_stop_with_open_streams_is_on_time(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        stack.scheduler.is_open.clear()
        body = {"prompt": "x", "stream": True}
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=20) as http:
            calls = [
                stack.gateway.inference.Generate(pb.GenerateRequest(text="x"), timeout=30)
                for _ in range(10)
            ]
            for call in calls:
                await call.read()
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async with asyncio.timeout(8):
                    await stack.gateway.service.stop()
                text = "".join([part async for part in reply.aiter_text()])
        assert [await end_of(call) for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 10
        assert '"code":"unavailable"' in text
        assert stack.scheduler.cancels == []
