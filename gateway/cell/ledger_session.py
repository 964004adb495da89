"""The gateway's hold on its cell: a Ledger and its Follower, replaced together when it is lost."""

import asyncio
from contextlib import suppress
from typing import Final

import structlog

from ledger import CellView, Follower, Ledger, LedgerLimits, StoreLost
from service_kit.errors import ConfigError, Unavailable

log = structlog.get_logger()

RETRY_WAIT_S: Final = 0.5
FULL: Final = "the store is full, by its maxmemory: it takes nothing new, and what runs goes on"


class LedgerLink:
    """`ledger` and `follower` are current; hold them no longer than one request."""

    def __init__(self, url: str, *, cell: str, limits: LedgerLimits | None = None) -> None:
        self._url = url
        self._cell = cell
        self._limits = limits or LedgerLimits()
        self.ledger: Ledger
        self.follower: Follower
        self._is_open = False
        self._seen: CellView | None = None
        # Why the store is not to be trusted with requests now; empty when it is.
        self.problem = "the store has not been checked yet"
        # The rule that it breaks: what it took in now it might lose. Empty: none, as of the last
        # check that it answered.
        self.broken_rule = ""

    @property
    def limits(self) -> LedgerLimits:
        return self._limits

    async def open(self) -> None:
        """Connect. A store that is away is waited for later; a wrong one raises ConfigError now."""
        await self._connect()
        with suppress(Unavailable):
            await self.check()

    async def check(self) -> None:
        """Look whether the store still keeps the rules, and note the answer in `problem`."""
        try:
            store = await self.ledger.check()
        except (ConfigError, Unavailable) as error:
            self.fails(error)
            if isinstance(error, ConfigError):
                self.broken_rule = self.problem
            raise
        self.problem = FULL if store.is_full else ""
        self.broken_rule = ""

    def fails(self, error: ConfigError | Unavailable) -> None:
        """Note why in `problem`, which anybody may read; where the store is only the log says."""
        if isinstance(error, Unavailable) and error.told != self.problem:
            log.warning("ledger.away", reason=error.reason)
        self.problem = error.told

    async def look(self) -> CellView:
        """The cell, as the store has it."""
        self._seen = await self.ledger.cell()
        return self._seen

    async def cell(self) -> CellView:
        """As the store has it; while that is in trouble, as it was seen last, for a leader answers
        whoever finds it, with or without a store.
        """
        return self._seen if self.problem and self._seen else await self.look()

    async def run(self) -> None:
        """Follow the journal; after a lost store start over with the new one, for ever."""
        while True:
            try:
                await self.follower.run()
            except StoreLost as error:
                log.error("ledger.lost", reason=error.reason)
                self.problem = str(error)
                await asyncio.sleep(RETRY_WAIT_S)
                await self.ledger.close()
                await self._connect()

    async def close(self) -> None:
        if self._is_open:
            await self.ledger.close()

    async def _connect(self) -> None:
        self.ledger = await Ledger.connect(self._url, cell=self._cell, limits=self._limits)
        self.follower = Follower(self.ledger)
        self._is_open = True
