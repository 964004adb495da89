"""SchedulerService at a gateway: what only operators may see, and nothing else of that service."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from gateway.cell.operators import SERVICE, Operators
from gateway.grpc.inference import metadata
from gateway.tenants import AUTHORIZATION_CHARS_MAX, Keyring
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest, ReadArchiveResponse
from kaiten.v1.watch_pb2 import WatchRequest


class OperatorServicer:
    """The methods are SchedulerService's own, so whoever can ask a scheduler can ask a gateway."""

    def __init__(self, operators: Operators, keyring: Keyring) -> None:
        self._operators, self._keyring = operators, keyring

    def add_to(self, server: "grpc.aio.Server") -> None:
        """These methods and no others: all else of the service is between schedulers and workers.
        What the leader says is handed on unread.
        """
        handlers = {
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.Watch, request_deserializer=WatchRequest.FromString
            ),
            "ReadArchive": grpc.unary_stream_rpc_method_handler(
                self.ReadArchive,
                request_deserializer=ReadArchiveRequest.FromString,
                response_serializer=ReadArchiveResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[bytes]:
        authorization = await self._check(context)
        async with aclosing(self._operators.watch(request)) as responses:
            async for response in responses:
                # It has no end, and the key may be gone since.
                self._keyring.check_operator(authorization)
                yield response.data

    async def ReadArchive(
        self, request: ReadArchiveRequest, context: Any
    ) -> AsyncIterator[ReadArchiveResponse]:
        authorization = await self._check(context)
        async with aclosing(self._operators.read_archive(request)) as parts:
            async for entries in parts:
                # Prompts of everybody may be in it, and it is read at its reader's pace.
                self._keyring.check_operator(authorization)
                yield ReadArchiveResponse(entries=entries)

    async def _check(self, context: Any) -> str:
        """What the caller is admitted by."""
        authorization = metadata(context, "authorization", AUTHORIZATION_CHARS_MAX)
        await self._keyring.admit_operator(authorization, context.peer())
        return authorization
