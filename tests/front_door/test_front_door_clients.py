"""Clients that vanish, ask for the impossible, knock too often, and stay when a server goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import psutil
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2 as model_pb
from kaiten.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from kaiten.v1.model_service_pb2_grpc import ModelServiceStub
from service_kit.grpc_server import ServerLimits, bind, create_server
from tests.support.answers import until
from tests.support.commands import Command
from tests.support.relay import Relay
from tests.support.whole_stack import WholeStack, wait_until

CANCELS = 600
ROUNDS_MAX = 15
CLIENTS = 64
SLOTS = 16
TOKENS = 50


def golden_request(**more: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="The chef", **more)
    request.sampling.max_tokens = 24
    request.sampling.temperature = 0
    return request


def endless_request(tokens: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="The chef")
    request.sampling.max_tokens = tokens
    request.sampling.ignore_eos = True
    return request


def test_64_streams_of_a_killed_client_are_freed(whole_stack: WholeStack) -> None:
    """Nothing comes to an end by itself before those who wait have gone."""
    many = (
        "--concurrency",
        str(CLIENTS),
        "--count",
        str(CLIENTS),
        "--warmup",
        "0",
        "--scale",
        "0.2",
    )
    with whole_stack.held():
        crowd = Command("bench", whole_stack.door.grpc, *many)
        try:

            def are_all_there() -> bool:
                state = whole_stack.state()
                return state.running > 0 and state.running + state.waiting == CLIENTS

            wait_until(are_all_there, "a cell with a queue")
        finally:
            crowd.kill()
        wait_until(lambda: not whole_stack.state().waiting, "whoever waits is freed")
    wait_until(lambda: not whole_stack.problem(), "everything is freed")
    whole_stack.check()


async def test_a_queued_clients_disconnect_touches_nobody_else(whole_stack: WholeStack) -> None:
    async with grpc.aio.insecure_channel(whole_stack.door.grpc) as channel:
        stub = InferenceServiceStub(channel)

        async def are_live(count: int) -> None:
            def is_so() -> bool:
                state = whole_stack.state()
                return state.running + state.waiting == count

            await until(is_so, f"{count} live requests")

        # Nobody is done before all have come and some have gone.
        with whole_stack.held():
            active = [stub.Generate(endless_request(TOKENS)) for _ in range(SLOTS)]
            readers = [asyncio.create_task(tokens_of(call)) for call in active]
            await are_live(SLOTS)
            queued = [stub.Generate(endless_request(TOKENS)) for _ in range(6)]
            for call in queued:
                assert (await call.read()).event.HasField("accepted")
            await are_live(SLOTS + len(queued))
            for call in queued:
                call.cancel()
            await are_live(SLOTS)
        assert [len(ids) for ids in await asyncio.gather(*readers)] == [TOKENS] * SLOTS
    await asyncio.to_thread(whole_stack.check)


async def tokens_of(call: Any) -> list[int]:
    return [i async for reply in call for i in range(reply.event.delta.token_count)]


def has_grown(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """By what 160 bytes a cancel would be, either of them."""
    return any(new - old >= 96 << 10 for old, new in zip(before, after, strict=True))


async def test_thousands_of_cancels_of_nothing_grow_nothing(whole_stack: WholeStack) -> None:
    """Half of them of a finished request, half of ids that never were."""
    gateway = psutil.Process(whole_stack.door.process.pid)
    async with grpc.aio.insecure_channel(whole_stack.door.grpc) as channel:
        stub = InferenceServiceStub(channel)
        async for _ in stub.Generate(golden_request(request_id="over"), timeout=60):
            pass
        store = psutil.Process(whole_stack.store.pid)

        async def cancel(start: int, count: int) -> None:
            for number in range(start, start + count):
                name = f"never-{number}" if number % 2 else "over"
                call = stub.Cancel(pb.CancelRequest(request_id=name), timeout=60)
                expected = grpc.StatusCode.OK if name == "over" else grpc.StatusCode.NOT_FOUND
                assert await call.code() is expected

        async def cancel_many(count: int) -> None:
            share = count // 20
            await asyncio.gather(*(cancel(worker * share, share) for worker in range(20)))

        # What grows with every cancel grows in every round. What does not grows too, until gRPC's
        # arenas are full, and now and then by chance.
        sizes: list[tuple[int, int]] = []
        while len(sizes) < 2 or has_grown(*sizes[-2:]):
            assert len(sizes) < ROUNDS_MAX, sizes
            await cancel_many(CANCELS)
            sizes.append((gateway.memory_info().rss, store.memory_info().rss))
    await asyncio.to_thread(whole_stack.check)


def test_prompts_beyond_every_cap(whole_stack: WholeStack) -> None:
    text = "x" * (5 << 20)
    with grpc.insecure_channel(
        whole_stack.door.grpc, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(InferenceServiceStub(channel).Generate(pb.GenerateRequest(text=text), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4194304" in caught.value.details()
    with httpx.Client(base_url=whole_stack.door.openai, timeout=60) as http:
        reply = http.post("/completions", json={"prompt": text})
        assert reply.status_code == 400
        assert "at most 4194304 bytes" in reply.json()["error"]["message"]
        reply = http.post("/completions", json={"prompt": "x" * 140_000})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert "no more than 131072 can fit" in reply.json()["error"]["message"]
        reply = http.post("/completions", json={"prompt": text * 4})
        assert reply.status_code == 413
    whole_stack.check()


def test_a_megabyte_of_headers(whole_stack: WholeStack) -> None:
    with grpc.insecure_channel(
        whole_stack.door.grpc, options=[("grpc.max_metadata_size", 4 << 20)]
    ) as channel:
        metadata = [("junk", "x" * (1 << 20))]
        stub = ModelServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ListModels(model_pb.ListModelsRequest(), metadata=metadata, timeout=60)
        assert stub.ListModels(model_pb.ListModelsRequest(), timeout=60).models
    with httpx.Client(base_url=whole_stack.door.openai, timeout=60) as http:
        # Or hung up on before all of it was sent.
        with suppress(httpx.TransportError):
            assert http.get("/models", headers={"x-junk": "x" * (1 << 20)}).status_code == 400
        assert http.get("/models").status_code == 200
    whole_stack.check()


class Patient(InferenceServiceServicer):
    """A stream that never ends by itself, and notes when it is left."""

    def __init__(self) -> None:
        self.is_streaming = asyncio.Event()
        self.is_left = asyncio.Event()

    async def Generate(
        self, _request: pb.GenerateRequest, _context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse()
            self.is_streaming.set()
            await asyncio.Event().wait()
        finally:
            self.is_left.set()


@pytest.fixture
async def patient() -> AsyncIterator[tuple[Patient, str]]:
    servicer = Patient()
    server = create_server(limits=ServerLimits(keepalive_ms=300, keepalive_timeout_ms=4000))
    add_InferenceServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_host_that_vanishes_is_noticed_by_keepalive(
    patient: tuple[Patient, str],
) -> None:
    """No FIN, no RST: packets stop. What a server that is built by us does then."""
    servicer, address = patient
    async with Relay(address) as relay, grpc.aio.insecure_channel(relay.address) as channel:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest())
        await call.read()
        await asyncio.wait_for(servicer.is_streaming.wait(), 60)
        relay.is_silent = True
        await asyncio.wait_for(servicer.is_left.wait(), 60)
        call.cancel()
    # What every service of ours is built with.
    limits = ServerLimits()
    assert limits.keepalive_ms + limits.keepalive_timeout_ms <= 30_000


async def test_one_channel_meets_every_gateway_within_the_connection_age(
    whole_stack: WholeStack,
) -> None:
    """Behind a level-4 balancer, which chooses per connection."""
    doors = [whole_stack.add_gateway(connection_age_s_max=1) for _ in range(2)]
    try:
        for door in doors:
            door.process.start()
        for door in doors:
            await asyncio.to_thread(door.wait_ready)
        addresses = [door.grpc for door in doors]
        async with (
            Relay(*addresses) as relay,
            grpc.aio.insecure_channel(relay.address) as channel,
        ):
            stub = ModelServiceStub(channel)

            async def has_met_all() -> bool:
                await stub.ListModels(model_pb.ListModelsRequest(), timeout=30, wait_for_ready=True)
                return set(relay.connections) == set(addresses)

            await until(has_met_all, "calls at every gateway", timeout_s=60)
    finally:
        for door in doors:
            whole_stack.retire(door)
