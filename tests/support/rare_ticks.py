"""A scheduler that goes on by what it hears alone; started as a scheduler is.

It ticks once an hour, and renews its lease as rarely as its settings say.
"""

from collections.abc import Sequence

from scheduler_svc import leader_session, renewal
from scheduler_svc import main as scheduler


def main(argv: Sequence[str] | None = None) -> int:
    """As `scheduler_svc.main.main`."""
    leader_session.TICK_S_MAX = renewal.RENEW_S_MAX = 3600.0
    return scheduler.main(argv)
