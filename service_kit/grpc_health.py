"""grpc.health.v1 with a synchronous `set`: readiness may change where one cannot await."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.errors import NotFound, Overloaded

Response = health_pb2.HealthCheckResponse


WATCHES_MAX: Final = 256
# What to ask before a process is killed: it answers, and what it does gets on. It waits for the
# store, for others or for the end of a drain all the same.
LIVE: Final = "live"


class AtMost:
    """So many streams of a kind at once: whoever needs no key could hold any number for ever."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._taken = 0

    def __enter__(self) -> None:
        if self._taken >= self._count:
            raise Overloaded(
                f"too many {self._what}", 1.0, self._count, live=self._taken, subject="server"
            )
        self._taken += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._taken -= 1


class HealthStatus(health_pb2_grpc.HealthServicer):
    """The state of each service name; "" is the whole process. Watchers see every change.

    `live` is asked anew each time, and watchers see it as it was.
    """

    def __init__(
        self,
        names: Iterable[str],
        watches_max: int = WATCHES_MAX,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._serving = dict.fromkeys(names, False)
        self._is_alive = is_alive
        self._watches = AtMost(watches_max, "health watches")
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
        if request.service != LIVE and request.service not in self._serving:
            raise NotFound(f"service {request.service!r}")
        return self._answer(request.service)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        """The state now and at each change. An unknown name is SERVICE_UNKNOWN until it is set."""
        last = None
        with self._watches:
            while True:
                changed, answer = self._changed, self._answer(request.service)
                if answer != last:
                    last = answer
                    yield answer
                await changed.wait()

    def _answer(self, name: str) -> Any:
        serving = self._is_alive() if name == LIVE else self._serving.get(name)
        if serving is None:
            return Response(status=Response.SERVICE_UNKNOWN)
        return Response(status=Response.SERVING if serving else Response.NOT_SERVING)
