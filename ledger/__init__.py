"""The durable record in Redis or Valkey that gateways and the leader meet in: inbox, journal,
results, lease.
"""

from ledger.follow import Follower
from ledger.leadership import Candidate
from ledger.ledger import Ledger
from ledger.servers.urls import first_address
from ledger.subscription import Subscription
from ledger.tokens import pieces_of
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
