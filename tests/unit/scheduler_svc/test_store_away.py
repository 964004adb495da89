"""A store that is away for an hour, as the log tells it: a page, and not a line for each try."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from kaiten.v1.ledger_pb2 import CellRecord, JournalRecord
from ledger import Commit, Fenced, Leader
from scheduler_svc.commit_queue import CommitQueue
from scheduler_svc.renewal import Renewal
from scheduler_svc.servicer import Servicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.standby import Standby
from service_kit.errors import Unavailable
from tests.support.slept_clock import SleptClock

HOUR_NS = 3600 * 10**9
LINES_MAX = 70
LEADER = Leader(epoch=1, nonce=1, journal_seq=0)


class AwayLedger:
    """For an hour of this clock; then somebody else may lead."""

    def __init__(self, clock: SleptClock, *, fences: bool = False) -> None:
        self._clock, self._fences = clock, fences
        self.tries = 0

    def _ask(self) -> None:
        self.tries += 1
        if self._clock.now_ns < HOUR_NS:
            raise Unavailable("away")
        if self._fences:
            raise Fenced("another leads")

    async def renew(self, _leader: Leader, _cell: CellRecord | None) -> int:
        self._ask()
        if self._clock.now_ns > 2 * HOUR_NS:
            raise Fenced("an end")
        return 0

    async def commit_many(self, _leader: Leader, _commits: Sequence[Commit]) -> None:
        self._ask()


async def decided() -> None:
    """At once."""


def assert_told(lines: Sequence[Mapping[str, Any]], event: str, over: str, tries: int) -> None:
    """Its begin, a little of what it was, and its end."""
    told = [line for line in lines if line["event"] == event]
    assert told[0]["reason"] == "unavailable: away"
    assert 10 < len(told) < LINES_MAX < tries
    (ended,) = (line for line in lines if line["event"] == over)
    assert ended["tries"] == tries
    assert ended["lasted_s"] == pytest.approx(3600, rel=0.01)


async def test_a_lease_that_is_not_renewed() -> None:
    clock = SleptClock()
    ledger: Any = AwayLedger(clock)
    renewal = Renewal(ledger, LEADER, clock, 3.0, CellRecord, clock.monotonic_ns)
    with capture_logs() as lines, pytest.raises(Fenced):
        await renewal.run(decided)
    assert_told(lines, "lease.not_renewed", "lease.renewed", 2 * 3600)


async def test_commits_that_wait() -> None:
    clock = SleptClock()
    ledger: Any = AwayLedger(clock)
    queue = CommitQueue(ledger, LEADER, SchedulerSettings(), clock, lambda _commits: None)
    queue.put(Commit(JournalRecord(seq=1)))
    with capture_logs() as lines:
        committing = asyncio.create_task(queue.run())
        await queue.flushed()
    assert_told(lines, "commit.waiting", "commit.goes_on", ledger.tries - 1)
    committing.cancel()


async def test_a_leadership_that_is_over_when_the_store_is_back() -> None:
    """What has begun in the log ends there: nobody waits for it any more."""
    clock = SleptClock()
    ledger: Any = AwayLedger(clock, fences=True)
    renewal = Renewal(ledger, LEADER, clock, 3.0, CellRecord, clock.monotonic_ns)
    with capture_logs() as lines, pytest.raises(Fenced):
        await renewal.run(decided)
    assert_told(lines, "lease.not_renewed", "lease.given_up", ledger.tries - 1)
    clock = SleptClock()
    ledger = AwayLedger(clock, fences=True)
    queue = CommitQueue(ledger, LEADER, SchedulerSettings(), clock, lambda _commits: None)
    queue.put(Commit(JournalRecord(seq=1)))
    with capture_logs() as lines, pytest.raises(Fenced):
        await queue.run()
    assert_told(lines, "commit.waiting", "commit.given_up", ledger.tries - 1)


async def test_a_standby_that_finds_no_store() -> None:
    clock = SleptClock()
    ledger: Any = AwayLedger(clock)
    standby = Standby(ledger, clock, Servicer(SchedulerSettings()), ttl_s=3.0, address="here:1")
    with capture_logs() as lines:
        while clock.now_ns < HOUR_NS:
            standby.missed(Unavailable("away"))
            await clock.sleep(0.375)
        standby.saw(None)
        standby.saw(None)
    assert_told(lines, "store.waiting", "store.answers", 9600)
