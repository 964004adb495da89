"""A real grpc.aio server on a local port: errors of all kinds of RPC, health, limits, binding."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from kaiten.local.health import state_of
from service_kit import grpc_health, grpc_server
from service_kit.errors import ConfigError, InvalidRequest, Overloaded

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
WAIT_S = 60.0


@asynccontextmanager
async def served(behaviours: dict[str, Callable[..., Any]], **limits: Any) -> AsyncIterator[str]:
    """The address of a server whose method /t.T/<kind> has the given behaviour; raw bytes."""
    server = grpc_server.create_server(limits=grpc_server.ServerLimits(**limits))
    handlers = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(behaviour)
        for kind, behaviour in behaviours.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = grpc_server.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def serving(
    behaviours: dict[str, Callable[..., Any]], **limits: Any
) -> AsyncIterator[grpc.aio.Channel]:
    """A client of such a server."""
    async with (
        served(behaviours, **limits) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        yield channel


def failing(error: Exception) -> dict[str, Callable[..., Any]]:
    """Behaviours that raise, the streaming ones after one message.

    Streams of requests are read first: a client that still writes when the call ends says
    "Internal error from Core", whatever the server has said.
    """

    async def read(request: Any) -> None:
        if not isinstance(request, bytes):
            async for _ in request:
                pass

    async def unary(request: Any, _context: Any) -> bytes:
        await read(request)
        raise error

    async def stream(request: Any, _context: Any) -> AsyncIterator[bytes]:
        await read(request)
        yield b"first"
        raise error

    return {kind: stream if kind.endswith("stream") else unary for kind in KINDS}


async def call(channel: grpc.aio.Channel, kind: str) -> list[bytes]:
    """Everything the RPC answers. A request stream has one message."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"x"

    method = getattr(channel, kind)(f"/t.T/{kind}")
    rpc = method(requests() if kind.startswith("stream") else b"x", timeout=WAIT_S)
    return [await rpc] if kind.endswith("unary") else [item async for item in rpc]


@pytest.mark.parametrize("kind", KINDS)
async def test_domain_errors_become_their_status(kind: str) -> None:
    async with serving(failing(InvalidRequest("n", "must be at least 1"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "n: must be at least 1"
    assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("kind", KINDS)
async def test_anything_else_is_internal_and_tells_nothing(kind: str) -> None:
    with capture_logs() as logs:
        async with serving(failing(ValueError("secret prompt"))) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, kind)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    (crash,) = [entry for entry in logs if entry["event"] == "rpc.crashed"]
    assert caught.value.details() == f"internal error, id={crash['error_id']}"
    assert str(crash["exc_info"]) == "secret prompt"
    assert crash["method"] == f"/t.T/{kind}"


async def test_retry_pushback_reaches_the_client() -> None:
    async with serving(failing(Overloaded("queue full", 0.5))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "500"


async def test_an_abort_of_the_handler_is_left_alone() -> None:
    async def unary(_request: Any, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "mine")
        return b""

    async with serving({"unary_unary": unary}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "mine")


async def test_success_passes_through() -> None:
    async def unary(request: bytes, _context: Any) -> bytes:
        return request * 2

    async def stream(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield request
        yield request

    async with serving({"unary_unary": unary, "unary_stream": stream}) as channel:
        assert await call(channel, "unary_unary") == [b"xx"]
        assert await call(channel, "unary_stream") == [b"x", b"x"]


@pytest.mark.parametrize("blocks_in_write", [False, True])
async def test_cancellation_passes_and_cleans_up_at_once(blocks_in_write: bool) -> None:
    """A client that goes away must run the handler's `finally`, wherever the handler is waiting."""
    ended, kinds = asyncio.Event(), []

    async def stream(_request: Any, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            while blocks_in_write:
                yield b"x" * 100_000
            await asyncio.Event().wait()
        except BaseException as error:
            kinds.append(type(error))
            raise
        finally:
            ended.set()

    with capture_logs() as logs:
        async with serving({"unary_stream": stream}) as channel:
            rpc = channel.unary_stream("/t.T/unary_stream")(b"", timeout=WAIT_S)
            assert await rpc.read() == b"first"
            rpc.cancel()
            await asyncio.wait_for(ended.wait(), WAIT_S)
    assert kinds in ([asyncio.CancelledError], [GeneratorExit])
    assert not [entry for entry in logs if entry["event"] == "rpc.crashed"]


async def test_who_leaves_while_a_write_waits_crashes_nothing() -> None:
    """Write and cancellation are over at once, and the handler may hear of the write first."""
    with capture_logs() as logs:
        for _ in range(10):
            await _leave_while_a_write_waits()
    assert not [entry for entry in logs if entry["event"] == "rpc.crashed"]


async def _leave_while_a_write_waits() -> None:
    loop = asyncio.get_running_loop()
    holds_up, has_left, ended = threading.Event(), threading.Event(), asyncio.Event()

    def hold_up_the_loop() -> None:
        holds_up.set()
        assert has_left.wait(WAIT_S)
        # Until the server's core, a thread of its own, has most likely heard.
        time.sleep(0.03)

    async def stream(_request: Any, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            loop.call_later(0.02, hold_up_the_loop)
            while True:
                yield b"x" * 1_000_000
        finally:
            ended.set()

    def leave(target: str) -> None:
        with grpc.insecure_channel(target) as channel:
            rpc = channel.unary_stream("/t.T/unary_stream")(b"", timeout=WAIT_S)
            assert next(rpc) == b"first"
            assert holds_up.wait(WAIT_S)
            rpc.cancel()
            has_left.set()

    async with served({"unary_stream": stream}) as target:
        leaving = asyncio.create_task(asyncio.to_thread(leave, target))
        await asyncio.wait_for(ended.wait(), WAIT_S)
        await leaving


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving({}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "unary_unary")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("size", "code"), [(1024, None), (1 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED)]
)
async def test_messages_have_a_cap(size: int, code: grpc.StatusCode | None) -> None:
    async def unary(_request: bytes, _context: Any) -> bytes:
        return b"ok"

    async with serving({"unary_unary": unary}, message_in_bytes_max=64 << 10) as channel:
        rpc = channel.unary_unary("/t.T/unary_unary")(b"x" * size, timeout=WAIT_S)
        if code is None:
            assert await rpc == b"ok"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc
            assert caught.value.code() is code


@pytest.mark.parametrize("size", [1_000, 1_000_000])
async def test_metadata_has_a_cap(size: int) -> None:
    async def unary(_request: bytes, _context: Any) -> bytes:
        return b"ok"

    async with serving({"unary_unary": unary}) as channel:
        rpc = channel.unary_unary("/t.T/unary_unary")(
            b"", timeout=WAIT_S, metadata=(("x-big", "y" * size),)
        )
        if size < 16 << 10:
            assert await rpc == b"ok"
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await rpc


async def test_health_tells_each_change() -> None:
    server, service = grpc_server.create_server(), "kaiten.v1.InferenceService"
    health = grpc_server.add_health(server, [service])
    address = f"127.0.0.1:{grpc_server.bind(server, '127.0.0.1', 0)}"
    await server.start()
    states = health_pb2.HealthCheckResponse
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert (await watch.read()).status == states.NOT_SERVING
        health.set("", "")
        assert (await watch.read()).status == states.SERVING
        assert await state_of(address) == "serving"
        named = health_pb2.HealthCheckRequest(service=service)
        assert (await stub.Check(named)).status == states.NOT_SERVING
        assert await state_of(address, service) == f"not serving: {grpc_health.STARTING}"
        health.set_all("")
        assert (await stub.Check(named)).status == states.SERVING
        # What others wrote comes into a header: any text is one line of it.
        health.set_all("the store of Malmö\r\nx: y " + "!" * 1000)
        assert (await watch.read()).status == states.NOT_SERVING
        said = await state_of(address)
        assert said.startswith("not serving: the store of Malm? x: y !!")
        assert len(said) == len("not serving: ") + grpc_health.REASON_CHARS_MAX
        # Another reason is known to who asks, and no change to who watches.
        health.set_all("it is draining")
        assert await state_of(address, service) == "not serving: it is draining"
        health.set("", "")
        assert (await watch.read()).status == states.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=WAIT_S)
        assert (await unknown.read()).status == states.SERVICE_UNKNOWN
    await server.stop(0)


async def test_who_drains_is_alive_and_who_gets_nowhere_is_not() -> None:
    stuck = ""
    server = grpc_server.create_server()
    health = grpc_server.add_health(server, why_stuck=lambda: stuck)
    port = grpc_server.bind(server, "127.0.0.1", 0)
    await server.start()
    states = health_pb2.HealthCheckResponse
    health.set_all("it is draining")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        live = health_pb2.HealthCheckRequest(service="live")
        assert (await stub.Check(live)).status == states.SERVING
        stuck = "a step has not ended for 61 s"
        assert (await stub.Check(live)).status == states.NOT_SERVING
        assert await state_of(f"127.0.0.1:{port}", "live") == f"not serving: {stuck}"
    await server.stop(0)


async def test_reflection_lists_the_services() -> None:
    server = grpc_server.create_server()
    grpc_server.add_health(server)
    grpc_server.add_reflection(server, ["grpc.health.v1.Health"])
    port = grpc_server.bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        rpc = stub.ServerReflectionInfo(iter([asked]), timeout=WAIT_S)
        answer = await rpc.read()
        rpc.cancel()
    await server.stop(0)
    assert "grpc.health.v1.Health" in [s.name for s in answer.list_services_response.service]


async def test_calls_watches_and_reflection_are_bounded() -> None:
    """What needs no key and lives for ever must not add up."""
    server = grpc_server.create_server(limits=grpc_server.ServerLimits(rpcs_max=3))
    grpc_server.add_health(server, watches_max=1)
    grpc_server.add_reflection(server, ["grpc.health.v1.Health"], streams_max=1)
    port = grpc_server.bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        look = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError, match="too many health watches"):
            await health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S).read()
        looking = look(timeout=WAIT_S)
        await looking.write(asked)
        await looking.read()
        with pytest.raises(grpc.aio.AioRpcError, match="too many reflection streams"):
            await look(timeout=WAIT_S).read()
        watch.cancel()
        # The server hears of an end in its own time.
        again = await let_in(lambda: health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
        # Two are held; a third one fits, and none beside it.
        looking.cancel()
        await let_in(lambda: look(iter([asked]), timeout=WAIT_S))
        assert not again.done()
    await server.stop(0)


async def let_in(ask: Callable[[], Any]) -> Any:
    """Ask again and again until a first answer is there; the call."""
    async with asyncio.timeout(WAIT_S):
        while True:
            call = ask()
            try:
                await call.read()
                return call
            except grpc.aio.AioRpcError as error:
                # INTERNAL is the client's own word for a call refused while it was writing to it.
                if error.code() not in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.INTERNAL,
                ):
                    raise


async def test_calls_beyond_their_bound_are_refused() -> None:
    let_go, all_in = asyncio.Event(), asyncio.Semaphore(0)

    async def hold(_request: Any, _context: Any) -> bytes:
        all_in.release()
        await let_go.wait()
        return b""

    async with serving({"unary_unary": hold}, rpcs_max=2) as channel:
        method = channel.unary_unary("/t.T/unary_unary")
        held = [method(b"", timeout=60) for _ in range(2)]
        for _ in held:
            await asyncio.wait_for(all_in.acquire(), 60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", timeout=60)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        let_go.set()
        await asyncio.gather(*held)


async def test_a_taken_port_says_so() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            grpc_server.bind(grpc_server.create_server(), "127.0.0.1", port)
    assert str(caught.value) == (
        f"port {port} is taken on 127.0.0.1; stop what holds it, or choose another with --grpc-port"
    )


async def test_two_servers_never_share_a_port() -> None:
    first = grpc_server.create_server()
    port = grpc_server.bind(first, "127.0.0.1", 0)
    await first.start()
    with pytest.raises(ConfigError, match=f"port {port} is taken"):
        grpc_server.bind(grpc_server.create_server(), "127.0.0.1", port)
    await first.stop(0)


async def test_an_address_of_another_machine_says_so() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:5005: .*--grpc-host"):
        grpc_server.bind(grpc_server.create_server(), "192.0.2.1", 5005)
