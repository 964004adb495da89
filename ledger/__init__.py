"""The durable record in Redis or Valkey that gateways and the leader meet in: inbox, journal,
results, lease.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ledger.types import (
    CellView,
    Commit,
    DamagedLedger,
    Fenced,
    FoldPart,
    History,
    InboxEntry,
    Leader,
    Lease,
    LedgerLimits,
    Load,
    Recovered,
    RequestInfo,
    StoreInfo,
    StoreLost,
    Submitted,
    TenantBounds,
    Update,
)

if TYPE_CHECKING:
    from ledger.follow import Follower
    from ledger.leadership import Candidate
    from ledger.ledger import Ledger
    from ledger.servers.urls import first_address
    from ledger.subscription import Subscription
    from ledger.tokens import pieces_of

# What knows a store's client, and what is beside it.
_OF_A_STORE: Final = {
    "Candidate": "ledger.leadership",
    "Follower": "ledger.follow",
    "Ledger": "ledger.ledger",
    "Subscription": "ledger.subscription",
    "first_address": "ledger.servers.urls",
    "pieces_of": "ledger.tokens",
}

__all__ = [
    "Candidate",
    "CellView",
    "Commit",
    "DamagedLedger",
    "Fenced",
    "FoldPart",
    "Follower",
    "History",
    "InboxEntry",
    "Leader",
    "Lease",
    "Ledger",
    "LedgerLimits",
    "Load",
    "Recovered",
    "RequestInfo",
    "StoreInfo",
    "StoreLost",
    "Submitted",
    "Subscription",
    "TenantBounds",
    "Update",
    "first_address",
    "pieces_of",
]


def __getattr__(name: str) -> Any:
    """Who reads archives, or replays them, pays for no client of a store."""
    if name in _OF_A_STORE:
        return getattr(import_module(_OF_A_STORE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
