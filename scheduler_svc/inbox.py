"""The inbox as a leader reads it: every entry once, in order, for as long as it leads."""

from collections.abc import AsyncIterator
from typing import Final

from ledger import InboxEntry, Ledger, StoreLost
from service_kit.clock import Clock
from service_kit.errors import Unavailable

BLOCK_MS: Final = 1_000
ENTRIES_MAX: Final = 256
RETRY_S: Final = 0.2


async def entries_behind(ledger: Ledger, cursor: str, clock: Clock) -> AsyncIterator[InboxEntry]:
    """Entries behind that one, without an end. Raises StoreLost; waits for a store that is away."""
    while True:
        try:
            entries = await ledger.inbox_read(cursor, block_ms=BLOCK_MS, count=ENTRIES_MAX)
        except StoreLost:
            raise
        except Unavailable:
            await clock.sleep(RETRY_S)
            continue
        for entry in entries:
            cursor = entry.entry_id
            yield entry
