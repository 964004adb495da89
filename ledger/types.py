"""Values that cross the ledger's boundary, and the two errors only it knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from kaiten.v1.common_pb2 import PromptLogprobs, TokenLogprobs
from kaiten.v1.ledger_pb2 import (
    CancelRecord,
    CellRecord,
    FoldedTokens,
    JournalRecord,
    RenderOptions,
    RequestResult,
    SequenceFinished,
    SubmitRecord,
)
from service_kit.errors import ConfigError, OutOfOrder, Unavailable

InboxRecordValue: TypeAlias = SubmitRecord | CancelRecord
# Ten years: the store counts expiry in 64-bit milliseconds, and refuses more half-way in a script.
RESULT_TTL_S_MAX: Final = 315_360_000
# More than any counter reaches, and still exact in Lua.
UNBOUNDED: Final = 2**53


class StoreLost(Unavailable):
    """The store is not the one we knew: flushed, replaced, or another server. Connect anew."""

    def __init__(self, reason: str = "the ledger was flushed or replaced by another store") -> None:
        super().__init__(reason)


class DamagedLedger(Unavailable):
    """Tokens are missing in the middle of a sequence: the record cannot be continued."""


class Fenced(OutOfOrder):
    """Somebody else leads, or this leader has a wrong picture of the journal: stop leading."""


def _require(is_met: bool, rule: str) -> None:
    if not is_met:
        raise ConfigError(rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBounds:
    """What one tenant may have. None: as much as the cell has room for."""

    requests_max: int | None = None
    prompt_tokens_max: int | None = None
    # Of finished results that are kept.
    results_bytes_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """Every bound of the ledger. Gateways of one cell should agree on the first three."""

    # Live choices (a request counts n) and live prompt tokens a cell accepts.
    requests_max: int = 4096
    prompt_tokens_max: int = 4_000_000
    result_ttl_s: int = 600
    # Of those with a note, if that is more, while less than half of it is taken.
    response_ttl_s: int = 24 * 3600
    # Of results that are kept for so long, and for less when more than half of it is taken; with
    # more, nothing new is accepted.
    results_bytes_max: int = 512 << 20
    # Of the files of one tenant, and how long each is kept: a day to compute, a day to fetch.
    files_bytes_max: int = 256 << 20
    files_ttl_s: int = 48 * 3600
    connections_max: int = 32
    connect_timeout_s: float = 2.0
    operation_timeout_s: float = 5.0
    # An idempotent operation is retried this long before it is Unavailable.
    retry_s: float = 5.0
    retry_wait_s_max: float = 0.25
    # Longest blocking read; asked-for waits are cut to it.
    block_ms_max: int = 5_000
    # Accept appendfsync everysec: a crash of the store may then lose what it acknowledged.
    allow_everysec: bool = False
    # On so many replicas a submit or a commit is, in memory or on disk, before it counts.
    replicas_min: int = 0
    replicas_ack: Literal["memory", "disk"] = "disk"

    def __post_init__(self) -> None:
        _require(self.requests_max >= 1, "requests_max must be at least 1")
        _require(self.prompt_tokens_max >= 1, "prompt_tokens_max must be at least 1")
        _require(self.results_bytes_max >= 1, "results_bytes_max must be at least 1")
        _require(
            1 <= self.result_ttl_s <= RESULT_TTL_S_MAX,
            f"result_ttl_s must be in [1, {RESULT_TTL_S_MAX}], got {self.result_ttl_s}",
        )
        _require(
            1 <= self.response_ttl_s <= RESULT_TTL_S_MAX,
            f"response_ttl_s must be in [1, {RESULT_TTL_S_MAX}], got {self.response_ttl_s}",
        )
        _require(self.files_bytes_max >= 1, "files_bytes_max must be at least 1")
        _require(
            1 <= self.files_ttl_s <= RESULT_TTL_S_MAX,
            f"files_ttl_s must be in [1, {RESULT_TTL_S_MAX}], got {self.files_ttl_s}",
        )
        _require(self.connections_max >= 1, "connections_max must be at least 1")
        _require(self.connect_timeout_s > 0, "connect_timeout_s must be more than 0")
        _require(self.operation_timeout_s > 0, "operation_timeout_s must be more than 0")
        _require(self.retry_s >= 0, "retry_s must not be negative")
        _require(self.retry_wait_s_max > 0, "retry_wait_s_max must be more than 0")
        _require(self.block_ms_max >= 1, "block_ms_max must be at least 1")
        _require(self.replicas_min >= 0, "replicas_min must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """What `check` found."""

    server: str
    version: str
    appendfsync: str
    # How it is reached, and how many replicas its primary had: what a failover may go to.
    kind: str
    replicas: int
    # It takes nothing new, by its `maxmemory`.
    is_full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An accepted request. Its sequence ids are [sequence id, sequence id + n)."""

    sequence_id: int
    # The journal when the request was first accepted: everything of it comes later.
    journal_seq: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """A request as any gateway can see it. journal_seq is the journal's end right now."""

    sequence_id: int
    n: int
    is_finished: bool
    prompt_tokens: int
    render: RenderOptions
    journal_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is live in the cell."""

    choices: int
    prompt_tokens: int


class History(NamedTuple):
    """A sequence from position 0."""

    output: FoldedTokens
    finished: SequenceFinished | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Who leads. nonce 0: resigned."""

    epoch: int
    nonce: int
    address: str
    renew_seq: int
    journal_seq: int
    folded_seq: int


class CellView(NamedTuple):
    """The leader's last word, None before its first renewal, and its lease, None before the first
    election. The lease's renew_seq moving is the sign of life.
    """

    record: CellRecord | None
    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """A won election: the fencing token. The first commit has seq journal_seq + 1; the record
    before it is after_seq.
    """

    epoch: int
    nonce: int
    journal_seq: int
    after_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxEntry:
    """A submit or a cancel, and the first sequence id of its request."""

    entry_id: str
    sequence_id: int
    record: InboxRecordValue
    # False: it is of a kind that only another version knows, or no record at all, and reads as
    # empty. It stays for a leader that knows it.
    is_known: bool = True
    # The store's clock when the entry was read; 0: not asked. The entry's id has it as it was then.
    read_ns: int = 0


class Commit(NamedTuple):
    """One record, and what becomes true with it: all or nothing."""

    record: JournalRecord
    # Of the requests whose last choice has finished.
    endings: Sequence[RequestResult] = ()
    # The next positions of prompts, by the request's first sequence id.
    prompt_logprobs: Mapping[int, PromptLogprobs] = MappingProxyType({})
    # The record serialized, for all who write it; empty: nobody has done it yet.
    data: bytes = b""


class FoldPart(NamedTuple):
    """Which part of a fold, from 0, of how many."""

    number: int
    of: int


WHOLE: Final = FoldPart(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Everything a new leader needs: each live request with its committed tokens."""

    entries: tuple[InboxEntry, ...]
    # Not among them.
    unknown: tuple[InboxEntry, ...] = ()
    tokens: Mapping[int, FoldedTokens]
    # How many of them are folded already; the rest is only in the journal.
    folded_counts: Mapping[int, int]
    finished: Mapping[int, SequenceFinished]
    # Prompt positions before this one have theirs; by first sequence id, of requests that want any.
    prompt_logprobs_from: Mapping[int, int]
    journal_seq: int
    # When the newest record was decided that is not folded, on the ledger's clock; 0: all are.
    decided_ns: int
    # inbox_read goes on from here.
    cursor: str
    # Sequences whose record has a hole: what is lost. Their requests cannot be continued.
    damaged: Mapping[int, str]


class Update(NamedTuple):
    """New output of one sequence: tokens [position, position + len(token_ids)), and its end if it
    ended.

    logprobs is parallel to token_ids, or empty when the request did not ask for any. A named tuple,
    because one is made per token where the output is slow: a frozen dataclass costs 1 µs more.
    """

    sequence_id: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finished: SequenceFinished | None
