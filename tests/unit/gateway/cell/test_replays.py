"""What the leader does not know of a request, as an archive has it: whom it is told, and how often
one is replayed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gateway.cell.explaining import Explainer
from gateway.cell.replays import Caller, clipped
from kaiten.v1.scheduler_service_pb2 import (
    ReadTimelineResponse,
    ReplayTimelineRequest,
    ReplayTimelineResponse,
)
from kaiten.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from ledger import CellView, Lease
from service_kit.errors import NotFound, Overloaded, Unavailable
from service_kit.peers import Peers
from tests.support.answers import until
from tests.support.slept_clock import SleptClock

UNKNOWN, QUEUE = TimelinePhase.TIMELINE_PHASE_UNKNOWN, TimelinePhase.TIMELINE_PHASE_QUEUE
PREFILL, DECODE = TimelinePhase.TIMELINE_PHASE_PREFILL, TimelinePhase.TIMELINE_PHASE_DECODE
OPERATOR, TENANT = Caller("ops", is_operator=True), Caller("acme", is_operator=False)


def interval(phase: TimelinePhase, start: int, end: int, **more: Any) -> TimelineInterval:
    return TimelineInterval(phase=phase, start_unix_ns=start, end_unix_ns=end, **more)


class PlayedLeader(SchedulerServiceServicer):
    """Knows what it is given."""

    def __init__(self) -> None:
        self.live: dict[str, ChoiceTimeline] = {}
        self.archived: dict[str, ChoiceTimeline] = {}
        self.asked: list[ReplayTimelineRequest] = []
        self.is_wrong = False
        self.read: list[str] = []
        self.read_gate = asyncio.Event()
        self.read_gate.set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def ReadTimeline(self, request: Any, context: Any) -> ReadTimelineResponse:
        self.read.append(request.id)
        await self.read_gate.wait()
        if self.is_wrong:
            await context.abort(grpc.StatusCode.INTERNAL, "internal error, id=1")
        if request.id not in self.live:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is not there")
        return ReadTimelineResponse(choices=[self.live[request.id]], traceparent="of the leader")

    async def ReplayTimeline(self, request: Any, context: Any) -> ReplayTimelineResponse:
        self.asked.append(request)
        await self.gate.wait()
        for id in request.ids:
            if id in self.archived:
                return ReplayTimelineResponse(
                    id=id, choices=[self.archived[id]], traceparent="of the archive"
                )
        return ReplayTimelineResponse(skipped=["epoch 7: its beginning is gone"])


@asynccontextmanager
async def played() -> AsyncIterator[tuple[PlayedLeader, Explainer, SleptClock]]:
    """A leader, and a gateway's explainer that finds it."""
    leader, server, clock = PlayedLeader(), grpc.aio.server(), SleptClock()
    add_SchedulerServiceServicer_to_server(leader, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def cell() -> CellView:
        lease = Lease(epoch=7, nonce=1, address=address, renew_seq=1, journal_seq=0, folded_seq=0)
        return CellView(None, lease)

    link: Any = SimpleNamespace(cell=cell)
    try:
        yield leader, Explainer(link, clock, Peers()), clock
    finally:
        leader.gate.set()
        await server.stop(None)


def archived() -> ChoiceTimeline:
    told = ChoiceTimeline(num_preemptions=2, num_batch_mates=2, batch_mate_ids=["b:x", "b:y"])
    told.intervals.append(interval(QUEUE, 100, 200, why="every slot is taken"))
    told.intervals.append(interval(PREFILL, 200, 250, worker_id="w"))
    told.intervals.append(interval(DECODE, 250, 900, worker_id="w"))
    return told


def begun_before() -> ChoiceTimeline:
    told = ChoiceTimeline(num_preemptions=1, num_batch_mates=1, batch_mate_ids=["b:z"])
    told.intervals.append(interval(UNKNOWN, 100, 400, why="before this leader led"))
    told.intervals.append(interval(DECODE, 400, 700, worker_id="v"))
    return told


def phases(told: ChoiceTimeline) -> list[tuple[int, int, int]]:
    return [(each.phase, each.start_unix_ns, each.end_unix_ns) for each in told.intervals]


async def test_what_no_leader_knows_is_told_by_archives_by_either_name() -> None:
    async with played() as (leader, explainer, _):
        leader.archived["acme:mine"] = archived()
        found = await explainer.timelines(["acme:cmpl-mine", "acme:mine"], TENANT)
        assert (found.id, found.traceparent) == ("acme:mine", "of the archive")
        assert [list(each.ids) for each in leader.asked] == [["acme:mine", "acme:cmpl-mine"]]
        (told,) = found.choices
        assert phases(told) == phases(archived())
        assert not any(each.worker_id for each in told.intervals)
        assert (told.num_batch_mates, list(told.batch_mate_ids)) == (2, [])
        (told,) = (await explainer.timelines(["acme:mine"], OPERATOR)).choices
        assert told == archived()
        assert len(leader.asked) == 2
        leader.archived["acme:over"] = over = archived()
        over.ended = "length"
        for _ in range(2):
            await explainer.timelines(["acme:over"], TENANT)
            (told,) = (await explainer.timelines(["acme:over"], OPERATOR)).choices
            assert told == over
        assert len(leader.asked) == 3, "what is over stays as it is"


@pytest.mark.parametrize(
    ("caller", "why"),
    [
        (OPERATOR, "nor do the archives tell of it; epoch 7: its beginning is gone"),
        (TENANT, "nor do the archives tell of it; not all of them could be replayed"),
    ],
)
async def test_what_nobody_knows_is_not_found_with_the_reason(caller: Caller, why: str) -> None:
    async with played() as (_, explainer, _):
        with pytest.raises(NotFound) as missing:
            await explainer.timelines(["acme:cmpl-mine", "acme:mine"], caller)
        assert missing.value.what == "request 'mine'"
        assert missing.value.why == f"it does not live and did not end of late, {why}"


async def test_the_beginning_of_what_lives_is_replayed_once() -> None:
    async with played() as (leader, explainer, clock):
        leader.live["acme:mine"] = begun_before()
        for _ in range(2):
            (told,) = (await explainer.timelines(["acme:mine"], OPERATOR)).choices
            assert phases(told) == phases(begun_before())
        assert len(leader.asked) == 1, "what is not there yet is not asked for with every look"
        clock.now_ns += 31 * 10**9
        leader.archived["acme:mine"] = archived()
        for caller in (OPERATOR, TENANT, OPERATOR):
            found = await explainer.timelines(["acme:mine"], caller)
            (told,) = found.choices
            assert found.traceparent == "of the leader"
            known = [(QUEUE, 100, 200), (PREFILL, 200, 250), (DECODE, 250, 400), (DECODE, 400, 700)]
            assert phases(told) == known
            workers = ["", "w", "w", "v"] if caller.is_operator else [""] * 4
            assert [each.worker_id for each in told.intervals] == workers
            mates = ["b:x", "b:y", "b:z"] if caller.is_operator else []
            assert (told.num_batch_mates, list(told.batch_mate_ids)) == (3, mates)
            assert told.num_preemptions == 2
        assert len(leader.asked) == 2


async def test_where_a_leader_is_that_does_not_answer_only_operators_are_told() -> None:
    async with played() as (leader, explainer, _):
        leader.is_wrong = True
        with pytest.raises(Unavailable, match=r"the scheduler at 127\.0\.0\.1:[0-9]+: INTERNAL"):
            await explainer.timelines(["acme:mine"], OPERATOR)
        with pytest.raises(Unavailable) as refused:
            await explainer.timelines(["acme:mine"], TENANT)
        assert str(refused.value) == "unavailable: no scheduler tells of it now"


async def test_who_asks_for_many_at_once_is_in_nobodys_way() -> None:
    async with played() as (leader, explainer, _):
        leader.live = {f"acme:{i}": archived() for i in range(9)} | {"b:x": archived()}
        leader.read_gate.clear()
        many = [asyncio.create_task(explainer.timelines([f"acme:{i}"], TENANT)) for i in range(9)]
        await until(lambda: len(leader.read) == 3, "three of four")
        other = asyncio.create_task(explainer.timelines(["b:x"], Caller("b", is_operator=False)))
        await until(lambda: leader.read[3:] == ["b:x"], "another's")
        leader.read_gate.set()
        assert (await other).choices
        for each in many:
            assert (await each).choices


async def test_a_tenant_has_one_archive_replayed_at_a_time() -> None:
    async with played() as (leader, explainer, _):
        leader.gate.clear()
        leader.archived["acme:mine"] = leader.archived["ops:mine"] = archived()
        first = asyncio.create_task(explainer.timelines(["acme:mine"], TENANT))
        await until(lambda: leader.asked, "a replay")
        with pytest.raises(Overloaded) as refused:
            await explainer.timelines(["acme:mine"], TENANT)
        assert (refused.value.subject, refused.value.tenant) == ("tenant", "acme")
        second = asyncio.create_task(explainer.timelines(["ops:mine"], OPERATOR))
        await until(lambda: len(leader.asked) == 2, "another")
        with pytest.raises(Overloaded, match="too many replays of archives"):
            await explainer.timelines(["ops:mine"], OPERATOR)
        # What the leader knows is told all the same, and waits for nobody.
        leader.live["ops:live"] = begun_before()
        (told,) = (await explainer.timelines(["ops:live"], OPERATOR)).choices
        assert phases(told) == phases(begun_before())
        leader.gate.set()
        assert (await first).choices
        assert (await second).choices
        assert (await explainer.timelines(["acme:mine"], TENANT)).choices


def test_of_what_the_archive_does_not_say_it_is_said_that_it_is_unknown() -> None:
    hole = interval(UNKNOWN, 150, 1000, why="before this leader led")
    told = archived()
    del told.intervals[1]
    assert [(each.phase, each.start_unix_ns, each.end_unix_ns) for each in clipped(told, hole)] == [
        (QUEUE, 150, 200),
        (UNKNOWN, 200, 250),
        (DECODE, 250, 900),
        (UNKNOWN, 900, 1000),
    ]
