"""Those who watch alike read one watch of the leader's, and are told what they would be alone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gateway.cell.operators import BEHIND_MAX, Operators, Told
from kaiten.client.live_core import LiveCore
from kaiten.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from kaiten.v1.watch_pb2 import (
    SequenceCounts,
    WatchedSequence,
    WatchedStep,
    WatchedSteps,
    WatchRequest,
    WatchResponse,
)
from ledger import CellView, Lease
from service_kit.clock import SystemClock
from service_kit.errors import Overloaded
from tests.support.answers import until

WAIT_S_MAX = 60.0


class PlayedLeader(SchedulerServiceServicer):
    """A core with one sequence, which has a token more with every view. Views come when told to;
    each brings a step.
    """

    def __init__(self) -> None:
        self.address = ""
        self.view = self.streams = self.begun = 0
        self.refuses = False
        self._changed = asyncio.Condition()

    async def next_view(self) -> None:
        async with self._changed:
            self.view += 1
            self._changed.notify_all()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[WatchResponse]:
        if self.refuses:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers")
        self.begun += 1
        self.streams += 1
        try:
            told = self.view
            yield self._said(told, told, is_snapshot=True)
            while True:
                async with self._changed:
                    while self.view == told:
                        await self._changed.wait()
                    before, told = told, self.view
                yield self._said(before, told, is_snapshot=False)
        finally:
            self.streams -= 1

    def _said(self, before: int, view: int, *, is_snapshot: bool) -> WatchResponse:
        steps = [WatchedStep(plan_id=number) for number in range(before + 1, view + 1)]
        return WatchResponse(
            is_snapshot=is_snapshot,
            epoch=7,
            seq=view,
            unix_ns=view + 1,
            sequences=[
                WatchedSequence(sequence_id=1, counts=SequenceCounts(num_tokens=100 + view))
            ],
            steps=[WatchedSteps(worker_id="w", steps=steps)] if steps else [],
        )


@asynccontextmanager
async def played() -> AsyncIterator[tuple[PlayedLeader, Operators]]:
    """A leader, and a gateway's operators who find it."""
    leader, server = PlayedLeader(), grpc.aio.server()
    add_SchedulerServiceServicer_to_server(leader, server)
    leader.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def cell() -> CellView:
        lease = Lease(
            epoch=7, nonce=1, address=leader.address, renew_seq=1, journal_seq=0, folded_seq=0
        )
        return CellView(None, lease)

    link: Any = SimpleNamespace(cell=cell)
    try:
        yield leader, Operators(link, SystemClock())
    finally:
        await server.stop(None)


class Viewer:
    """Reads when it is told to."""

    def __init__(self, operators: Operators) -> None:
        self.core, self.steps, self.skipped = LiveCore(), list[int](), 0
        self.snapshots = 0
        self.told: AsyncGenerator[Told, None] = operators.watch(WatchRequest(interval_ms=100))

    async def take(self) -> Told:
        async with asyncio.timeout(WAIT_S_MAX):
            told = await anext(self.told)
        said = WatchResponse.FromString(told.data)
        self.core.take(said)
        self.snapshots += said.is_snapshot
        for each in said.steps:
            self.skipped += each.num_skipped
            self.steps += [step.plan_id for step in each.steps]
        return told

    async def until_view(self, view: int) -> None:
        while self.core.seq < view:
            await self.take()


async def test_five_who_come_one_after_the_other_are_told_by_one_watch() -> None:
    """Whoever comes begins with a snapshot; from then on all have the very same responses."""
    async with played() as (leader, operators):
        viewers = []
        for _ in range(5):
            viewers.append(Viewer(operators))
            await viewers[-1].take()
            for _ in range(3):
                await leader.next_view()
                for viewer in viewers:
                    await viewer.until_view(leader.view)
        assert leader.begun == 5
        await until(lambda: leader.streams == 1, "one watch is left")
        await leader.next_view()
        told = [await viewer.take() for viewer in viewers]
        assert len({id(each) for each in told}) == 1
        for at, viewer in enumerate(viewers):
            assert viewer.snapshots == 1
            assert viewer.core.sequences[1].counts.num_tokens == 100 + leader.view
            assert viewer.steps == list(range(3 * at + 1, leader.view + 1))
        for viewer in viewers:
            await viewer.told.aclose()


async def test_the_first_may_leave_and_the_last_ends_the_watch() -> None:
    async with played() as (leader, operators):
        first, other = Viewer(operators), Viewer(operators)
        await first.take()
        await other.take()
        await leader.next_view()
        await other.until_view(1)
        await until(lambda: leader.streams == 1, "one watch is left")
        await first.told.aclose()
        await leader.next_view()
        await other.until_view(2)
        assert (leader.streams, other.snapshots, other.steps) == (1, 1, [1, 2])
        await other.told.aclose()
        await until(lambda: leader.streams == 0, "no watch is left")


async def test_who_reads_nothing_for_long_begins_anew_and_is_told_how_much_was_missed() -> None:
    async with played() as (leader, operators):
        slow, quick = Viewer(operators), Viewer(operators)
        await slow.take()
        await quick.take()
        for view in range(1, BEHIND_MAX + 9):
            await leader.next_view()
            await quick.until_view(view)
        await slow.take()
        assert slow.snapshots == 2
        assert (slow.core.seq, slow.skipped, slow.steps) == (leader.view, leader.view, [])
        await leader.next_view()
        for viewer in (slow, quick):
            await viewer.until_view(leader.view)
        assert slow.steps == [leader.view]
        await until(lambda: leader.streams == 1, "one watch is left")
        for viewer in (slow, quick):
            await viewer.told.aclose()


async def test_who_asks_for_another_interval_has_a_watch_of_its_own() -> None:
    async with played() as (leader, operators):
        async with aclosing(operators.watch(WatchRequest(interval_ms=500))) as other:
            await anext(other)
            viewer = Viewer(operators)
            await viewer.take()
            for view in (1, 2):
                await leader.next_view()
                await viewer.until_view(view)
            assert leader.streams == 2
            await viewer.told.aclose()
        await until(lambda: leader.streams == 0, "no watch is left")


async def test_what_the_leader_refuses_is_refused_to_each() -> None:
    async with played() as (leader, operators):
        leader.refuses = True
        for _ in range(2):
            with pytest.raises(Overloaded, match="as many watchers"):
                await Viewer(operators).take()
