"""`kaiten explain`: what it prints of a timeline, and where else it says to look."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kaiten.cli.complaint import complain
from kaiten.cli.live.explain import _cell, hints, lines_of
from kaiten.client.errors import from_rpc_error
from kaiten.v1.inference_service_pb2 import ExplainResponse
from kaiten.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from kaiten.v1.watch_pb2 import WatchRequest, WatchResponse
from service_kit import grpc_server
from service_kit.errors import Unavailable
from service_kit.grpc_errors import trailers_of

BROKEN = "connections to all backends failing"


def explained(*phases: TimelinePhase) -> ExplainResponse:
    intervals = [TimelineInterval(phase=phase) for phase in phases]
    return ExplainResponse(choices=[ChoiceTimeline(), ChoiceTimeline(intervals=intervals)])


class Leaving(SchedulerServiceServicer):
    """Its watch is over before it has said anything."""

    async def Watch(self, _request: WatchRequest, _context: Any) -> AsyncIterator[WatchResponse]:
        nothing: list[WatchResponse] = []
        for response in nothing:
            yield response


async def test_workers_have_no_names_where_nobody_tells_them() -> None:
    interval = TimelineInterval(phase=TimelinePhase.TIMELINE_PHASE_DECODE, worker_id="w")
    response = ExplainResponse(choices=[ChoiceTimeline(intervals=[interval])])
    server = grpc_server.create_server()
    add_SchedulerServiceServicer_to_server(Leaving(), server)
    address = f"127.0.0.1:{grpc_server.bind(server, '127.0.0.1', 0)}"
    await server.start()
    try:
        assert not (await asyncio.to_thread(_cell, address, None, None, response)).workers
    finally:
        await server.stop(0)


def test_a_gateway_that_answered_is_not_asked_whether_it_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What keeps it is behind it, and it can say what."""
    trailers = trailers_of(Unavailable("the store does not answer"))
    for code, trailing, hint in (
        (grpc.StatusCode.UNAVAILABLE, (), "is a gateway listening on here:1?"),
        (grpc.StatusCode.UNAVAILABLE, trailers, "kaiten healthcheck here:1"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, (), "kaiten healthcheck here:1"),
    ):
        metadata = grpc.aio.Metadata(*trailing)
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "it does not")
        assert complain(from_rpc_error(error), "here:1") == 1
        said = capsys.readouterr().err
        assert "it does not" in said
        assert hint in said
        assert said.count("here:1") == 1


def test_who_gave_no_port_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC asks for that of https."""
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "nobody at here:443")
    assert complain(from_rpc_error(error), "here") == 1
    said = capsys.readouterr().err
    assert "no port was given, and 443 was asked; kaiten serve has 50051: here:50051" in said


@pytest.mark.parametrize(
    "what", ["Trying to connect an http1.x server", f"{BROKEN}: Socket closed"]
)
def test_who_answers_in_another_way_is_there(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, what)
    assert complain(from_rpc_error(error), "here:1") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "50051 by default" in said or "may speak TLS only" in said
    assert "is a gateway listening" not in said


def test_who_waited_under_a_dead_leader_is_sent_to_the_archive() -> None:
    queue, unknown = TimelinePhase.TIMELINE_PHASE_QUEUE, TimelinePhase.TIMELINE_PHASE_UNKNOWN
    assert hints("cmpl-1", "", explained(queue)) == []
    (line,) = hints("cmpl-1", "", explained(queue, unknown))
    assert line.endswith("kaiten explain cmpl-1 --archive .kaiten")
    (line,) = hints("cmpl-1", "acme", explained(queue, unknown))
    assert line.endswith("kaiten explain cmpl-1 --tenant acme --archive .kaiten")


def test_of_many_intervals_it_is_said_first_where_most_went() -> None:
    told, at = ChoiceTimeline(ended="length", num_batch_mates=9), 0
    told.batch_mate_ids.extend(f"default:{number}" for number in range(9))
    phases = (
        (TimelinePhase.TIMELINE_PHASE_DECODE, 30, ""),
        (TimelinePhase.TIMELINE_PHASE_STALL, 20, "a step of its worker took that long"),
        (TimelinePhase.TIMELINE_PHASE_QUEUE, 10, "every slot is taken"),
        (TimelinePhase.TIMELINE_PHASE_PREFILL, 5, ""),
        (TimelinePhase.TIMELINE_PHASE_COMMIT, 1, ""),
    )
    for phase, ms, why in phases * 2:
        told.intervals.add(phase=phase, start_unix_ns=at, end_unix_ns=at + ms * 1_000_000, why=why)
        at += ms * 1_000_000
    _, sums, *rest = lines_of("cmpl-1", told)
    assert sums.strip() == (
        "60.0 ms decode, 40.0 ms stall (a step of its worker took that long), "
        "20.0 ms queue (every slot is taken), 10.0 ms prefill, 2.0 ms otherwise"
    )
    assert len(rest) == 1 + len(told.intervals) + 1
    assert rest[-1].strip().startswith("in a batch with 9 other requests: default:0, default:1, ")
    assert rest[-1].endswith("default:7, …")
