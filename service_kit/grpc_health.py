"""grpc.health.v1 with a synchronous `set`: readiness may change where one cannot await."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.errors import NotFound

Response = health_pb2.HealthCheckResponse


class HealthStatus(health_pb2_grpc.HealthServicer):
    """The state of each service name; "" is the whole process. Watchers see every change."""

    def __init__(self, names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        states = (f"{name or 'process'}={serving}" for name, serving in self._serving.items())
        return f"HealthStatus({', '.join(states)})"

    def add_to(self, server: "grpc.aio.Server") -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set(self, name: str, serving: bool) -> None:
        """Change one name. Setting what already is wakes nobody."""
        if self._serving.get(name) is serving:
            return
        self._serving[name] = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def set_all(self, serving: bool) -> None:
        """Change every known name, e.g. to False before draining."""
        for name in self._serving:
            self.set(name, serving)

    async def Check(self, request: Any, _context: Any) -> Any:
        if request.service not in self._serving:
            raise NotFound(f"service {request.service!r}")
        return self._answer(request.service)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        """The state now and at each change. An unknown name is SERVICE_UNKNOWN until it is set."""
        last = None
        while True:
            changed, answer = self._changed, self._answer(request.service)
            if answer != last:
                last = answer
                yield answer
            await changed.wait()

    def _answer(self, name: str) -> Any:
        serving = self._serving.get(name)
        if serving is None:
            return Response(status=Response.SERVICE_UNKNOWN)
        return Response(status=Response.SERVING if serving else Response.NOT_SERVING)
