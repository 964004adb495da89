"""One read of the ledger's history at a time, for everybody who has a hole by then.

A gateway that fell behind, and a thousand clients that come back at once, cost the store a few
reads of the journal's tail, not one each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

from ledger.types import History, StoreLost
from service_kit.errors import Unavailable

# Of one read: their folded output comes along.
SEQUENCES_MAX: Final = 512
# Clients that lost their gateway do not come in one moment: whoever comes so soon after a read
# waits for the next one, with all others.
READS_APART_S: Final = 0.2
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
        apart_s: float = READS_APART_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._journal = journal
        self._passed_seq = passed_seq
        self._apart_s, self._sleep = apart_s, sleep
        # On the loop's clock: before that nobody reads.
        self._next_s = 0.0
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
                found = await self._read(tuple(some))
                for sequence_id, future in some.items():
                    future.set_result(found[sequence_id])
        finally:
            self._reading = None

    async def _stay_apart(self) -> None:
        now_s = asyncio.get_running_loop().time
        if (wait_s := self._next_s - now_s()) > 0:
            await self._sleep(wait_s)
        self._next_s = now_s() + self._apart_s

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
