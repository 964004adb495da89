"""grpc.health.v1 with a synchronous `set`: readiness may change where one cannot await.

Its answer has no field for a reason: the trailing metadata of `Check` has it, as `kaiten-reason`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.errors import NotFound, Overloaded

Response = health_pb2.HealthCheckResponse


WATCHES_MAX: Final = 256
# What to ask before a process is killed: it answers, and what it does gets on. It waits for the
# store, for others or for the end of a drain all the same.
LIVE: Final = "live"
# Of a worker, what to ask before another is ended in its favour: a leader has taken it in.
REGISTERED: Final = "registered"
# Why not, behind the answer to `Check`: printable ASCII, which gRPC's metadata must be.
REASON: Final = "kaiten-reason"
REASON_CHARS_MAX: Final = 512
STARTING: Final = "it has not started yet"


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

    `live` and the names of `asked` are asked anew each time, and watchers see them as they were.
    `why_stuck` says why the process gets nowhere, empty: it does.
    """

    def __init__(
        self,
        names: Iterable[str],
        watches_max: int = WATCHES_MAX,
        why_stuck: Callable[[], str] = lambda: "",
        asked: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        # Why not; empty: it serves.
        self._problems = dict.fromkeys(names, STARTING)
        self._asked = {LIVE: why_stuck, **asked}
        self._watches = AtMost(watches_max, "health watches")
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        states = (f"{name or 'process'}={why or 'serving'}" for name, why in self._problems.items())
        return f"HealthStatus({', '.join(states)})"

    def add_to(self, server: "grpc.aio.Server") -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set(self, name: str, problem: str) -> None:
        """Change one name: why it does not serve, in words that anybody may read; empty: it does.

        Another reason is not another state: it wakes nobody.
        """
        before = self._problems.get(name)
        self._problems[name] = problem
        if before is None or bool(before) is not bool(problem):
            self._changed.set()
            self._changed = asyncio.Event()

    def set_all(self, problem: str) -> None:
        """Change every known name, e.g. before draining."""
        for name in self._problems:
            self.set(name, problem)

    async def Check(self, request: Any, context: Any) -> Any:
        if self._problem(request.service) is None:
            raise NotFound(f"service {request.service!r}")
        if problem := self._problem(request.service):
            context.set_trailing_metadata(((REASON, _printable(problem)),))
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

    def _problem(self, name: str) -> str | None:
        """None: nobody knows the name."""
        ask = self._asked.get(name)
        return self._problems.get(name) if ask is None else ask()

    def _answer(self, name: str) -> Any:
        problem = self._problem(name)
        if problem is None:
            return Response(status=Response.SERVICE_UNKNOWN)
        return Response(status=Response.NOT_SERVING if problem else Response.SERVING)


def _printable(text: str) -> str:
    """On one line, in ASCII."""
    words = " ".join(text.split())[:REASON_CHARS_MAX]
    return "".join(c if " " <= c <= "~" else "?" for c in words)
