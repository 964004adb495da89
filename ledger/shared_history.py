"""One read of the ledger's history at a time, for everybody who has a hole by then.

A gateway that fell behind, and a thousand clients that come back at once, cost the store a few
reads of the journal's tail, not one each.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

from ledger.types import History, StoreLost
from service_kit.clock import Clock, SystemClock
from service_kit.errors import Unavailable

# Of one read: their folded output comes along.
SEQUENCES_MAX: Final = 512
# Clients that lost their gateway do not come in one moment: whoever comes soon after a read waits
# for the next one, with all others. Reads take a tenth of the time, and a slow one no more.
READS_APART_TIMES: Final = 10
READS_APART_S_MAX: Final = 0.2
RETRY_WAIT_S_FIRST: Final = 0.02
RETRY_WAIT_S_MAX: Final = 1.0


class Histories(Protocol):
    """What is needed of the ledger."""

    async def histories(
        self, sequence_ids: Sequence[int], *, through_seq: int
    ) -> Mapping[int, History | Exception]: ...


class SharedHistory:
    """`passed_seq` says up to where somebody who asks now must be given everything."""

    def __init__(
        self,
        journal: Histories,
        passed_seq: Callable[[], int],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._journal = journal
        self._passed_seq = passed_seq
        self._clock = clock or SystemClock()
        # Before that nobody reads.
        self._next_ns = 0
        self._asked: dict[int, asyncio.Future[History | Exception]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def of(self, sequence_ids: Sequence[int]) -> list[History]:
        """Raises what is wrong with one of them, or with the store. Waits for one that is away."""
        futures = [self._ask(sequence_id) for sequence_id in sequence_ids]
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_all())
        histories = []
        for future in futures:
            # Whoever gives up must not take it from the others.
            found = await asyncio.shield(future)
            if isinstance(found, Exception):
                raise found
            histories.append(found)
        return histories

    def _ask(self, sequence_id: int) -> asyncio.Future[History | Exception]:
        future = self._asked.get(sequence_id)
        if future is None:
            future = self._asked[sequence_id] = asyncio.get_running_loop().create_future()
        return future

    async def _read_all(self) -> None:
        try:
            while self._asked:
                await self._stay_apart()
                some = dict(islice(self._asked.items(), SEQUENCES_MAX))
                for sequence_id in some:
                    # Who asks from here on may have missed what this read does not bring.
                    del self._asked[sequence_id]
                found = await self._read_timed(tuple(some))
                for sequence_id, future in some.items():
                    future.set_result(found[sequence_id])
        finally:
            self._reading = None

    async def _stay_apart(self) -> None:
        if (wait_ns := self._next_ns - self._clock.monotonic_ns()) > 0:
            await self._clock.sleep(wait_ns / 1e9)

    async def _read_timed(self, sequence_ids: Sequence[int]) -> Mapping[int, History | Exception]:
        started_ns = self._clock.monotonic_ns()
        found = await self._read(sequence_ids)
        ended_ns = self._clock.monotonic_ns()
        apart_ns = READS_APART_TIMES * (ended_ns - started_ns)
        self._next_ns = ended_ns + min(apart_ns, round(READS_APART_S_MAX * 1e9))
        return found

    async def _read(self, sequence_ids: Sequence[int]) -> Mapping[int, History | Exception]:
        wait_s = RETRY_WAIT_S_FIRST
        while True:
            try:
                return await self._journal.histories(sequence_ids, through_seq=self._passed_seq())
            except Exception as error:
                if not isinstance(error, Unavailable) or isinstance(error, StoreLost):
                    return dict.fromkeys(sequence_ids, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_WAIT_S_MAX)
