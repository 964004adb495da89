"""A scheduler whose archive has a snapshot every few records; started as a scheduler is."""

from collections.abc import Sequence
from typing import Final

from ledger.archive import writer
from scheduler_svc import main as scheduler

RECORDS: Final = 40


def main(argv: Sequence[str] | None = None) -> int:
    """As `scheduler_svc.main.main`."""
    writer.SNAPSHOT_RECORDS = RECORDS  # type: ignore[misc]
    return scheduler.main(argv)
