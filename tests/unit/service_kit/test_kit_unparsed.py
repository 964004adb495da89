"""Bytes that are no message are the client's mistake, told as one, in every unary-request kind."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from service_kit.errors import InvalidRequest
from service_kit.grpc_errors import _guarded
from service_kit.grpc_server import bind, create_server


class Echo(InferenceServiceServicer):
    async def Cancel(self, request: pb.CancelRequest, _context: Any) -> pb.CancelResponse:
        return pb.CancelResponse(was_live=request.request_id == "x")

    async def Attach(
        self, _request: pb.AttachRequest, _context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        yield pb.AttachResponse()


@pytest.mark.parametrize("raw", [b"\x34", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\xff" * 20])
@pytest.mark.parametrize("method", ["Cancel", "Attach"])
async def test_unparsable_requests(method: str, raw: bytes) -> None:
    server = create_server()
    add_InferenceServiceServicer_to_server(Echo(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            path = f"/kaiten.v1.InferenceService/{method}"
            if method == "Cancel":
                answer = channel.unary_unary(path)(raw, timeout=60)
            else:
                answer = channel.unary_stream(path)(raw, timeout=60).read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            good = channel.unary_unary("/kaiten.v1.InferenceService/Cancel")
            reply = await good(pb.CancelRequest(request_id="x").SerializeToString(), timeout=60)
            assert pb.CancelResponse.FromString(reply).was_live
    finally:
        await server.stop(None)


class LeftClient:
    """A context whose client is gone, as grpc.aio tells it while it does not know that yet."""

    async def abort(self, *_status: object) -> None:
        raise ExecuteBatchError("SendStatusFromServerOperation failed", (), ())


@pytest.mark.parametrize("error", [InvalidRequest("n", "must be at least 1"), ValueError("n")])
async def test_a_client_that_left_before_its_error_is_nobodys_fault(error: Exception) -> None:
    async def stream(_request: Any, _context: Any) -> AsyncIterator[None]:
        nothing: tuple[None, ...] = ()
        for never in nothing:
            yield never
        raise error

    await _guarded(stream, "/kaiten.v1.InferenceService/Generate")(None, LeftClient())
