"""What operators are told when schedulers are away, keep no archive, or nobody leads."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from gateway.cell import operators
from gateway.cell.archives import Part
from gateway.cell.explaining import Explainer, scrub
from gateway.cell.operators import Operators
from gateway.cell.replays import Caller
from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveHeader
from kaiten.v1.ledger_pb2 import CellRecord
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest, RehearseRequest
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval
from kaiten.v1.watch_pb2 import WatchRequest
from ledger import CellView, Lease
from service_kit.errors import NotFound, Unavailable
from service_kit.peers import Peers
from tests.support.slept_clock import SleptClock


class FakeLink:
    def __init__(self, address: str | None, *standbys: str, nonce: int = 1) -> None:
        self._address, self._standbys, self._nonce = address, standbys, nonce
        self.looks = 0

    async def cell(self) -> CellView:
        self.looks += 1
        if self._address is None:
            return CellView(None, None)
        lease = Lease(
            epoch=5,
            nonce=self._nonce,
            address=self._address,
            renew_seq=1,
            journal_seq=0,
            folded_seq=0,
        )
        return CellView(CellRecord(standby_addresses=self._standbys), lease)


class FakeArchive:
    """By address: the epoch that it has, or why nothing came of it."""

    HOLDS: dict[str, int | str] = {}  # noqa: RUF012 - each test sets its own

    def __init__(self, address: str, _request: object, _peers: object) -> None:
        self._held = self.HOLDS[address]
        self.is_kept = self._held != "NOT_FOUND"
        self.problem = self._held if isinstance(self._held, str) else ""

    async def parts(self) -> AsyncGenerator[Part, None]:
        if isinstance(self._held, int):
            header = ArchiveHeader(epoch=self._held)
            yield Part(self._held, 0, [ArchiveEntry(header=header)])


def asked(link: FakeLink, clock: SleptClock | None = None) -> Operators:
    played: Any = link
    return Operators(played, clock or SleptClock())


async def watched(link: FakeLink, clock: SleptClock) -> object:
    return await anext(asked(link, clock).watch(WatchRequest()))


async def rehearsed(link: FakeLink, clock: SleptClock) -> object:
    return await asked(link, clock).rehearse(RehearseRequest())


async def explained(link: FakeLink, clock: SleptClock) -> object:
    played: Any = link
    explainer = Explainer(played, clock, Peers())
    return await explainer.timelines(["default:x"], Caller("default", is_operator=True))


async def read(
    monkeypatch: pytest.MonkeyPatch, link: FakeLink, **holds: int | str
) -> list[ArchiveEntry]:
    monkeypatch.setattr(FakeArchive, "HOLDS", holds)
    monkeypatch.setattr(operators, "Archive", FakeArchive)
    answers = asked(link).read_archive(ReadArchiveRequest())
    return [entry async for answer in answers for entry in answer]


async def test_the_leader_and_who_stands_by_are_asked_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = await read(monkeypatch, FakeLink("a", "b", "a"), a=3, b=2)
    assert [entry.header.epoch for entry in told] == [2, 3]


@pytest.mark.parametrize("why", ["UNAVAILABLE", "NOT_FOUND"])
async def test_who_says_nothing_is_a_gap_at_the_end(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    told = await read(monkeypatch, FakeLink("a", "b"), a=why, b=2)
    assert [entry.WhichOneof("entry") for entry in told] == ["header", "gap"]
    assert told[-1].gap.reason == why


async def test_where_nobody_keeps_an_archive_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NotFound, match="--archive-dir"):
        await read(monkeypatch, FakeLink("a", "b"), a="NOT_FOUND", b="NOT_FOUND")


async def test_a_cell_that_nobody_has_led_has_no_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Unavailable, match="no scheduler has led"):
        await read(monkeypatch, FakeLink(None))


@pytest.mark.parametrize("question", [watched, rehearsed, explained])
@pytest.mark.parametrize("link", [FakeLink(None), FakeLink("a", nonce=0)])
async def test_a_leader_is_waited_for_and_then_not_any_more(
    link: FakeLink, question: Callable[[FakeLink, SleptClock], Awaitable[object]]
) -> None:
    clock, link.looks = SleptClock(), 0
    with pytest.raises(Unavailable, match="no scheduler leads"):
        await question(link, clock)
    assert clock.now_ns == pytest.approx(10e9, rel=0.1)
    assert link.looks > 10


def test_a_tenant_is_told_of_others_as_counts() -> None:
    told = ChoiceTimeline(num_batch_mates=2, batch_mate_ids=["b:x", "b:y"])
    others = {"behind_sequence_id": 1, "behind_id": "b:x", "stalled_by_id": "b:y"}
    others |= {"stalled_by_sequence_id": 2, "worker_id": "w"}
    told.intervals.add(why="every slot is taken", batch_mates=3, **others)
    left = TimelineInterval(why="every slot is taken", batch_mates=3)
    scrub(told)
    assert told == ChoiceTimeline(num_batch_mates=2, intervals=[left])
