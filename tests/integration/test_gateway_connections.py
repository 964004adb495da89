"""What a connection may do and how long: caps, ages, health watches, pings, stops."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.gateway_stack import MODEL, Stack, detail, running_stack, text_of, until


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"sse_ping_s": 0.05, "prompts_max": 4}


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
                async for _response in send(pb.GenerateRequest(text=text), timeout=60):
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
        await until(lambda: grpc.ChannelConnectivity.IDLE in states, "the end of a connection")
        watching.cancel()


async def test_health_per_service_is_watched(tmp_path: Path, redis_url: str, cell: str) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        names = ("", "kaiten.v1.InferenceService", "kaiten.v1.ModelService")
        calls = [
            HealthStub(stack.gateway.channel).Watch(
                health_pb2.HealthCheckRequest(service=name), timeout=60
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
            health_pb2.HealthCheckRequest(service="nothing"), timeout=60
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


async def test_a_hundred_visitors_leave_every_place_free(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """Connect, read a token, leave: afterwards as many streams fit as before."""
    async with running_stack(tmp_path / "model", redis_url, cell, streams_max=8) as stack:
        service = stack.gateway.service.generation_service
        endless = SamplingParams(ignore_eos=True)

        async def visit() -> None:
            call = stack.gateway.inference.Generate(
                pb.GenerateRequest(text="x", sampling=endless), timeout=300
            )
            async for response in call:
                if response.event.HasField("delta"):
                    break
            call.cancel()

        for _ in range(25):
            await asyncio.gather(*(visit() for _ in range(4)))
            await until(lambda: not service.door.active, "nobody followed")
        stack.scheduler.is_open.clear()
        calls = [
            stack.gateway.inference.Generate(pb.GenerateRequest(text="x"), timeout=300)
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
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=60)
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
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
            calls = [
                stack.gateway.inference.Generate(pb.GenerateRequest(text="x"), timeout=300)
                for _ in range(10)
            ]
            for call in calls:
                await call.read()
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                # Far before the calls' own ends, which would let it stop as well.
                async with asyncio.timeout(60):
                    await stack.gateway.service.stop()
                text = "".join([part async for part in reply.aiter_text()])
        assert [await end_of(call) for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 10
        assert '"code":"unavailable"' in text
        assert stack.scheduler.cancels == []
