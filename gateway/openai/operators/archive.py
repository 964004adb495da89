"""/v1/archive: what the cell's schedulers decided, page by page, in JSON and without tokens."""

import re
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import QueryParams

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import LOOKS, Api, Operation, parameter
from gateway.openai.operators.access import check_operator
from gateway.openai.usage import Count
from kaiten.v1 import ledger_pb2
from kaiten.v1.archive_pb2 import ArchivedRequest, ArchiveEntry
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest
from service_kit.errors import InvalidRequest

RECORDS_MAX: Final = 1000
RECORDS: Final = 200
# Rows of steps in one answer: 256 slots, a thousand records.
ROWS_MAX: Final = 256_000
NUMBER: Final = re.compile(r"[0-9]{1,16}", re.ASCII)
POSITION: Final = re.compile(r"([0-9]{1,19}):([0-9]{1,19})", re.ASCII)
ID_CHARS_MAX: Final = 256
NS_PER_MS: Final = 1_000_000


class ArchivedPlan(Struct, kw_only=True):
    """Rows that left, then who joined which slot. `chunk_tokens` are of its first step."""

    worker_id: str
    plan_id: Count
    lease_steps: Count
    leave_slots: list[Count]
    join_slots: list[Count]
    admitted: list[Count]
    preempted: list[Count]
    chunk_tokens: Count
    decode_rows: Count
    blocks_free: Count
    waiting: Count


class ArchivedStep(Struct, kw_only=True, omit_defaults=True):
    """`slots` had a token each, or as many as `token_counts` says. Left out: as of that worker's
    step before on this page.
    """

    worker_id: str
    plan_id: Count
    step: Count
    step_us: Count
    slots: list[Count] | UnsetType = UNSET
    token_counts: list[Count] | UnsetType = UNSET
    finished_slots: list[Count] = []


class ArchivedWorker(Struct, kw_only=True):
    """It joined, or described itself anew."""

    worker_id: str
    slots_max: Count
    block_size: Count
    block_count: Count
    step_tokens_max: Count


class ArchivedInput(Struct, kw_only=True, omit_defaults=True):
    """What the core was told: one of these, or the name of anything else in `other`."""

    unix_ms: float
    plan: ArchivedPlan | UnsetType = UNSET
    step: ArchivedStep | UnsetType = UNSET
    submitted: Count | UnsetType = UNSET
    worker: ArchivedWorker | UnsetType = UNSET
    worker_lost: str | UnsetType = UNSET
    other: str = ""


class ArchivedEnding(Struct, kw_only=True):
    sequence_id: Count
    reason: str
    output_tokens: Count


class ArchivedRecord(Struct, kw_only=True, omit_defaults=True):
    """As committed. `sequence_ids` had a token each; left out: the same as in the record before."""

    epoch: Count
    seq: Count
    unix_ms: float
    inputs: list[ArchivedInput]
    sequence_ids: list[Count] | UnsetType = UNSET
    finished: list[ArchivedEnding] = []


class ArchivedHead(Struct, kw_only=True):
    """A segment of a leadership begins."""

    epoch: Count
    segment: Count
    policy: str
    unix_ms: float


class ArchivedSubmit(Struct, kw_only=True):
    """A request as it was taken in. Its choices have `sequence_id` and those after it."""

    id: str
    sequence_id: Count
    n: Count
    prompt_tokens: Count
    max_tokens: Count
    priority: int
    arrived_unix_ms: float


class ArchivedGap(Struct, kw_only=True):
    """Something that should stand here does not."""

    first_seq: Count
    last_seq: Count
    requests: Count
    reason: str


class Entry(Struct, kw_only=True, omit_defaults=True):
    """One of these."""

    header: ArchivedHead | UnsetType = UNSET
    request: ArchivedSubmit | UnsetType = UNSET
    record: ArchivedRecord | UnsetType = UNSET
    gap: ArchivedGap | UnsetType = UNSET


class Entries(Struct, kw_only=True):
    """`last`: of its newest record, EPOCH:SEQ, for `after` of the next page."""

    object: str = "list"
    data: list[Entry]
    last: str | None
    has_more: bool


async def read_archive(api: Api, exchange: HttpExchange, _body: None) -> None:
    """Oldest first, as many records as are asked for."""
    check_operator(exchange)
    query = QueryParams(exchange.scope["query_string"])
    records_max = _number(query, "limit", RECORDS, 1, RECORDS_MAX)
    page = Page()
    # Behind the last record of a page nothing but another record is more.
    async with aclosing(api.operators.read_archive(request_of(query))) as parts:
        async for entries in parts:
            if not all(page.take(entry, records_max) for entry in entries):
                break
    await exchange.send_json(200, page.reply())


def request_of(query: QueryParams) -> ReadArchiveRequest:
    """InvalidRequest names the parameter."""
    request = ReadArchiveRequest(id=query.get("id", ""))
    if len(request.id) > ID_CHARS_MAX:
        raise InvalidRequest("id", f"must have at most {ID_CHARS_MAX} characters")
    if after := query.get("after", ""):
        position = POSITION.fullmatch(after)
        if position is None or max(map(int, position.groups())) >= 1 << 63:
            raise InvalidRequest("after", f"must be EPOCH:SEQ, got {after[:64]!r}")
        request.after_epoch, request.after_seq = map(int, position.groups())
    most_ms = (1 << 63) // NS_PER_MS
    request.since_unix_ns = _number(query, "since_ms", 0, 0, most_ms) * NS_PER_MS
    request.until_unix_ns = _number(query, "until_ms", 0, 0, most_ms) * NS_PER_MS
    return request


def _number(query: QueryParams, name: str, default: int, least: int, most: int) -> int:
    given = query.get(name, str(default))
    if not NUMBER.fullmatch(given) or not least <= int(given) <= most:
        raise InvalidRequest(name, f"must be in [{least}, {most}], got {given[:64]!r}")
    return int(given)


class Page:
    """Entries in order, each told against those before it."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._records = self._rows = 0
        self._last: str | None = None
        self._has_more = False
        self._sequence_ids: list[int] = []
        # By worker, of its newest step.
        self._slots: dict[str, tuple[list[int], list[int]]] = {}

    def take(self, entry: ArchiveEntry, records_max: int) -> bool:
        """False: there is no room for it."""
        kind = entry.WhichOneof("entry")
        if kind == "record":
            if self._records == records_max or self._rows >= ROWS_MAX:
                self._has_more = True
                return False
            self._entries.append(Entry(record=self._record(entry.record)))
        elif kind == "header":
            head = entry.header
            self._sequence_ids, self._slots = [], {}
            self._entries.append(
                Entry(
                    header=ArchivedHead(
                        epoch=head.epoch,
                        segment=head.segment,
                        policy=head.configured.policy,
                        unix_ms=head.unix_ns / NS_PER_MS,
                    )
                )
            )
        elif kind == "request":
            self._entries.append(Entry(request=_submit(entry.request)))
        elif kind == "gap":
            told = {name: getattr(entry.gap, name) for name in ArchivedGap.__struct_fields__}
            self._entries.append(Entry(gap=ArchivedGap(**told)))
        return True

    def reply(self) -> Entries:
        return Entries(data=self._entries, last=self._last, has_more=self._has_more)

    def _record(self, record: ledger_pb2.JournalRecord) -> ArchivedRecord:
        self._records += 1
        self._rows += len(record.sequence_ids)
        self._last = f"{record.epoch}:{record.seq}"
        told = ArchivedRecord(
            epoch=record.epoch,
            seq=record.seq,
            unix_ms=record.unix_ns / NS_PER_MS,
            inputs=[self._input(item) for item in record.inputs],
            finished=[
                ArchivedEnding(
                    sequence_id=each.sequence_id,
                    reason=REASONS.get(each.reason, "unknown"),
                    output_tokens=each.output_tokens,
                )
                for each in record.finished
            ],
        )
        if (sequence_ids := list(record.sequence_ids)) != self._sequence_ids:
            told.sequence_ids = self._sequence_ids = sequence_ids
        return told

    def _input(self, item: ledger_pb2.CoreInput) -> ArchivedInput:
        kind = item.WhichOneof("input") or ""
        told = ArchivedInput(unix_ms=item.now_ns / NS_PER_MS)
        if kind == "plan":
            told.plan = _plan(item.plan)
        elif kind == "result":
            told.step = self._step(item.result)
        elif kind == "submit":
            told.submitted = item.submit.sequence_id
        elif kind in ("worker_joined", "worker_changed"):
            joined = item.worker_joined if kind == "worker_joined" else item.worker_changed
            told.worker = _worker(joined)
        elif kind == "worker_lost":
            told.worker_lost = item.worker_lost.worker_id
        else:
            told.other = kind
        return told

    def _step(self, result: ledger_pb2.ResultInput) -> ArchivedStep:
        step = result.step
        told = ArchivedStep(
            worker_id=result.worker_id,
            plan_id=step.plan_id,
            step=step.step,
            step_us=step.timings.forward_us + step.timings.sample_us,
            finished_slots=[
                *(row.slot for row in step.finished),
                *(row.slot for row in step.errors),
            ],
        )
        rows = list(step.slots), list(step.token_counts)
        if rows != self._slots.get(result.worker_id):
            told.slots, told.token_counts = self._slots[result.worker_id] = rows
            self._rows += len(rows[0])
        return told


REASONS: Final[Mapping[int, str]] = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in FinishReason.items()
}


def _plan(plan: ledger_pb2.PlanInput) -> ArchivedPlan:
    return ArchivedPlan(
        worker_id=plan.worker_id,
        plan_id=plan.plan_id,
        lease_steps=plan.lease_steps,
        leave_slots=list(plan.leave_slots),
        join_slots=list(plan.join_slots),
        admitted=list(plan.admitted),
        preempted=list(plan.preempted),
        chunk_tokens=plan.chunk_tokens,
        decode_rows=plan.decode_rows,
        blocks_free=plan.blocks_free,
        waiting=plan.waiting,
    )


def _worker(
    joined: ledger_pb2.WorkerJoinedInput | ledger_pb2.WorkerChangedInput,
) -> ArchivedWorker:
    worker = joined.worker
    return ArchivedWorker(
        worker_id=joined.worker_id,
        slots_max=worker.slots_max,
        block_size=worker.block_size,
        block_count=worker.block_count,
        step_tokens_max=worker.step_tokens_max,
    )


def _submit(request: ArchivedRequest) -> ArchivedSubmit:
    submit = request.submit
    return ArchivedSubmit(
        id=submit.id,
        sequence_id=request.sequence_id,
        n=submit.n,
        prompt_tokens=request.prompt_tokens or len(submit.prompt_token_ids),
        max_tokens=submit.sampling.max_tokens,
        priority=submit.priority,
        # The entry's id begins with the ledger's milliseconds.
        arrived_unix_ms=float(request.entry_id.partition("-")[0] or 0),
    )


PARAMETERS: Final = (
    parameter("query", "after", f"({POSITION.pattern})?", "behind this record: EPOCH:SEQ"),
    parameter("query", "since_ms", "", "records from then on; Unix time, by the ledger's clock"),
    parameter("query", "until_ms", "", "records before then"),
    parameter("query", "id", "", "TENANT:REQUEST: it alone, and records that tell of it"),
    parameter("query", "limit", "", f"records, 1 to {RECORDS_MAX}, {RECORDS} if left out"),
)
OPERATIONS: Final = (
    Operation("GET", "/v1/archive", "readArchive", read_archive, LOOKS, (Entries,), PARAMETERS),
)
