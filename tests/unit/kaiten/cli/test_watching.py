"""Whom commands that watch ask, for how long, and how they end."""

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import grpc
import pytest

from kaiten.cli.complaint import RESUME_S
from kaiten.cli.live import watch
from kaiten.cli.live.watch import Watching
from kaiten.client.errors import UnauthenticatedError, UnavailableError
from kaiten.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from kaiten.v1.watch_pb2 import WatchRequest, WatchResponse
from service_kit import grpc_server
from tests.support.terminal import Terminal

NONE = grpc.aio.Metadata()


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Asked(Watching):
    """Of gateways that answer as it is written: a response, or seconds until nobody is there."""

    def __init__(
        self, clock: Clock, *, resume_s: float = RESUME_S, **answers: list[WatchResponse | float]
    ) -> None:
        gateways = [(f"{name}:1", None) for name in answers]
        super().__init__(gateways, None, 250, resume_s=resume_s)
        self.clock, self.answers, self.asked = clock, answers, list[str]()

    def _of(self, address: str, tls: Any) -> Iterator[WatchResponse]:
        name = address.partition(":")[0]
        self.asked.append(name)
        while (answers := self.answers[name]) and isinstance(answers[0], WatchResponse):
            yield answers.pop(0)  # type: ignore[misc]
        self.clock.now_s += answers.pop(0) if answers else 0  # type: ignore[operator]
        code = grpc.StatusCode.UNAVAILABLE
        raise grpc.aio.AioRpcError(code, NONE, NONE, "nobody is there")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def test_whoever_is_behind_one_that_hangs_is_asked(clock: Clock) -> None:
    """gRPC takes twenty seconds to see that who let it connect says nothing."""
    response = WatchResponse(epoch=7)
    watching = Asked(clock, hangs=[20.0], answers=[response])
    assert next(iter(watching)) == response
    assert watching.asked == ["hangs", "answers"]


def test_one_that_hung_is_asked_again_when_that_is_seen(clock: Clock) -> None:
    responses = [WatchResponse(epoch=7), WatchResponse(epoch=8)]
    watching = Asked(clock, one=[responses[0], 40.0, responses[1]])
    assert [*islice(watching, 2)] == responses


def test_a_top_waits_for_a_gateway_that_is_started_again(clock: Clock) -> None:
    responses = [WatchResponse(epoch=7), WatchResponse(epoch=7, seq=1)]
    away = [1.0] * 60
    watching = iter(Asked(clock, one=[responses[0], *away, responses[1]], resume_s=math.inf))
    assert [next(watching), next(watching)] == responses
    watching = iter(Asked(clock, one=[responses[0], *away, responses[1]]))
    next(watching)
    with pytest.raises(UnavailableError):
        next(watching)


def test_nobody_is_looked_for_for_a_while(clock: Clock) -> None:
    watching = Asked(clock, one=[], other=[])
    with pytest.raises(UnavailableError, match="nobody is there"):
        next(iter(watching))
    assert RESUME_S < clock.now_s - 100 < RESUME_S + 1
    assert set(watching.asked) == {"one", "other"}


def test_who_may_not_watch_is_told_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Asked(clock, one=[])

    def refused(*_: object) -> Iterator[WatchResponse]:
        raise grpc.aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, NONE, NONE, "for operators")

    monkeypatch.setattr(watching, "_of", refused)
    with pytest.raises(UnauthenticatedError):
        next(iter(watching))


class Hanging(SchedulerServiceServicer):
    """A leader that says one thing, and then nothing."""

    async def Watch(self, _request: WatchRequest, _context: Any) -> AsyncIterator[WatchResponse]:
        yield WatchResponse(is_snapshot=True, epoch=7)
        await asyncio.Event().wait()


async def test_a_top_that_is_killed_leaves_the_terminal_as_it_was() -> None:
    """And at once, though its watch says nothing."""
    pytest.importorskip("textual", reason="kaiten[top] is not installed")
    server = grpc_server.create_server()
    add_SchedulerServiceServicer_to_server(Hanging(), server)
    address = f"127.0.0.1:{grpc_server.bind(server, '127.0.0.1', 0)}"
    await server.start()

    def story() -> None:
        with Terminal("top", "--address", address) as terminal:
            terminal.until("leader 7")
            terminal.process.send_signal(signal.SIGTERM)
            assert terminal.ends() == 128 + signal.SIGTERM
            last = terminal._shown.rpartition(b"\x1b[?1049h")[2]
            assert b"\x1b[?1049l" in last, "the screen that was before"
            assert b"\x1b[?25h" in last, "its cursor"

    try:
        await asyncio.to_thread(story)
    finally:
        await server.stop(0)
