"""The leadership, kept as long as its leader decides; each renewal says what the cell is like."""

import asyncio
from collections.abc import Awaitable, Callable

from kaiten.v1.ledger_pb2 import CellRecord, ClockStep
from ledger import Leader, Ledger, StoreLost
from scheduler_svc.store_clock import stepped
from service_kit.clock import Clock
from service_kit.errors import Unavailable
from service_kit.outages import Outage

RETRY_S = 0.2
RENEWALS_PER_TTL = 6
# However long the TTL is: a renewal says what the cell is like, too.
RENEW_S_MAX = 0.5


class Renewal:
    """Of one leadership. `cell`: what gateways and the next leader are told; `now_ns`: the leader's
    clock.
    """

    def __init__(
        self,
        ledger: Ledger,
        leader: Leader,
        clock: Clock,
        ttl_s: float,
        cell: Callable[[], CellRecord],
        now_ns: Callable[[], int],
    ) -> None:
        self._ledger, self._leader, self._clock, self._cell = ledger, leader, clock, cell
        self._now_ns = now_ns
        # Of the store's clock, under this leader or those before.
        self.clock_step = ClockStep()
        # Told after each renewal why the store did not take it; empty: it did.
        self.on_store_problem: Callable[[str], None] = lambda _: None
        self._outage = Outage("lease.not_renewed", over="lease.renewed")
        # Of the workers' weights, as the ledger has it.
        self.told_digest = ""
        self._every_s = min(ttl_s / RENEWALS_PER_TTL, RENEW_S_MAX)
        self._telling, self._renewed_ns = asyncio.Lock(), clock.monotonic_ns()

    async def run(self, decided: Callable[[], Awaitable[None]]) -> None:
        """Renew, each time after something was decided. Raises OutOfOrder, StoreLost."""
        try:
            while True:
                await decided()
                await self._tell_cell()
                await self._clock.sleep(self._every_s)
        finally:
            self._outage.given_up(self._clock.monotonic_ns())

    async def if_due(self) -> None:
        """Between two steps of a recovery, which may take longer than the time to live."""
        if self._clock.monotonic_ns() >= self._renewed_ns + int(self._every_s * 1e9):
            await self._renew(None)
            self._renewed_ns = self._clock.monotonic_ns()

    async def is_known(self, weights_digest: str) -> None:
        """Return when a successor of this leader would know these weights."""
        while self.told_digest != weights_digest and not await self._tell_cell():
            await self._clock.sleep(RETRY_S)

    async def _tell_cell(self) -> bool:
        """One at a time: an older record must not come last."""
        async with self._telling:
            record = self._cell()
            record.clock_step.CopyFrom(self.clock_step)
            if not await self._renew(record):
                return False
            self.told_digest = record.weights_digest
        return True

    async def _renew(self, record: CellRecord | None) -> bool:
        try:
            store_ns = await self._ledger.renew(self._leader, record)
        except StoreLost:
            raise
        except Unavailable as error:
            self.on_store_problem(str(error))
            self._outage.failed(self._clock.monotonic_ns(), reason=str(error))
            return False
        self._outage.ended(self._clock.monotonic_ns())
        self.clock_step = stepped(self.clock_step, store_ns, self._now_ns())
        self.on_store_problem("")
        return True
