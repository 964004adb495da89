"""The inbox as a leader reads it: every entry once, in order, for as long as it leads."""

import asyncio
from collections.abc import AsyncIterator, Set
from typing import Final

import structlog

from kaiten.v1.ledger_pb2 import SubmitRecord
from ledger import InboxEntry, Ledger, Recovered, StoreLost
from scheduler_svc.commit_queue import CommitQueue
from scheduler_svc.core.types import SequenceId
from scheduler_svc.request_book import RequestBook
from scheduler_svc.wire import entry_time_ns
from service_kit.clock import Clock
from service_kit.errors import Unavailable

log = structlog.get_logger()

BLOCK_MS: Final = 1_000
ENTRIES_MAX: Final = 256
RETRY_S: Final = 0.2
# So long whoever takes entries in holds up plans and results; one that has a long prompt, longer.
HELD_NS_MAX: Final = 5_000_000
START: Final = "0-0"


class Inbox:
    """Of one leadership, behind what it has recovered."""

    def __init__(
        self,
        ledger: Ledger,
        recovered: Recovered,
        clock: Clock,
        requests: RequestBook,
        commits: CommitQueue,
    ) -> None:
        self._ledger, self._cursor, self._clock = ledger, recovered.cursor, clock
        self._requests, self._commits = requests, commits
        self._moved_ns = clock.monotonic_ns()
        # Submits that are not told again.
        self._taken_in: Set[SequenceId] = frozenset()
        for entry in recovered.unknown:
            _pass_over(entry)

    async def entries(self) -> AsyncIterator[InboxEntry]:
        """Without an end. Raises StoreLost; waits for a store that is away. However many there are,
        the others have the loop in between.
        """
        until_ns = 0
        while True:
            for entry in await self._read():
                self._move(entry.entry_id)
                is_submit = isinstance(entry.record, SubmitRecord)
                if not entry.is_known:
                    _pass_over(entry)
                elif not (is_submit and entry.sequence_id in self._taken_in):
                    yield entry
                if self._clock.monotonic_ns() >= until_ns:
                    await asyncio.sleep(0)
                    until_ns = self._clock.monotonic_ns() + HELD_NS_MAX

    async def _read(self) -> list[InboxEntry]:
        was_away = False
        while True:
            try:
                if was_away and await self._has_gone_back():
                    await self._start_again()
                return await self._ledger.inbox_read(
                    self._cursor, block_ms=BLOCK_MS, count=ENTRIES_MAX
                )
            except StoreLost:
                raise
            except Unavailable:
                was_away = True
                await self._clock.sleep(RETRY_S)

    async def _has_gone_back(self) -> bool:
        """The store may come back without its last second, or be a replica in its place. Where its
        clock is behind what it was, it puts what it takes in before what it lost: behind our cursor
        nothing would come.
        """
        passed_ns = self._clock.monotonic_ns() - self._moved_ns
        return await self._ledger.now_ns() < entry_time_ns(self._cursor) + passed_ns

    async def _start_again(self) -> None:
        self._taken_in = self._requests.sequence_ids()
        # Whatever was over by now has left the inbox then.
        await self._commits.acknowledged()
        self._move(START)

    def _move(self, cursor: str) -> None:
        self._cursor, self._moved_ns = cursor, self._clock.monotonic_ns()


def _pass_over(entry: InboxEntry) -> None:
    why = "of a kind that this version does not know: it stays for a leader that does"
    log.error("inbox.unknown", entry=entry.entry_id, sequence_id=entry.sequence_id, reason=why)
