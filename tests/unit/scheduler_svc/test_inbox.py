"""The inbox as a leader reads it, of a ledger that is played."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from ledger import InboxEntry, Ledger, Recovered
from scheduler_svc.commit_queue import CommitQueue
from scheduler_svc.inbox import HELD_NS_MAX, Inbox
from scheduler_svc.request_book import RequestBook
from service_kit.clock import SystemClock
from tests.support.play_leader import submit_record


class CountedClock(SystemClock):
    """Moves by a quarter of what is allowed, and only when it is looked at."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += HELD_NS_MAX // 4
        return self.now_ns


class Crowded:
    """Everything there is at once, and then nothing."""

    def __init__(self, count: int) -> None:
        self._entries = [
            InboxEntry(entry_id=f"1-{number}", sequence_id=number, record=submit_record("r"))
            for number in range(1, count + 1)
        ]

    async def inbox_read(self, *_: Any, **__: Any) -> list[InboxEntry]:
        if not self._entries:
            await asyncio.Event().wait()
        entries, self._entries = self._entries, []
        return entries


async def test_thousands_that_come_at_once_leave_the_loop_to_those_who_run() -> None:
    ledger, clock = cast("Ledger", Crowded(4096)), CountedClock()
    requests = RequestBook()
    nothing = cast("Recovered", SimpleNamespace(cursor="0-0", unknown=()))
    inbox = Inbox(ledger, nothing, clock, requests, cast("CommitQueue", None))
    taken: list[int] = []

    async def take_in() -> None:
        async for entry in inbox.entries():
            taken.append(entry.sequence_id)  # noqa: PERF401 - it never ends

    taking, most, before = asyncio.create_task(take_in()), 0, 0
    while len(taken) < 4096:
        await asyncio.sleep(0)
        most, before = max(most, len(taken) - before), len(taken)
    taking.cancel()
    assert taken == [*range(1, 4097)]
    assert most <= 4
