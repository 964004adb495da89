"""/v1/watch: the live core of the cell, as SchedulerService.Watch tells it, in JSON."""

import re
from base64 import b64encode
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any, Final, Literal

from google.protobuf.json_format import MessageToDict
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import QueryParams

from gateway.cell.operators import Told
from gateway.http.exchange import HttpExchange
from gateway.http.json_reply import DONE, to_event
from gateway.openai.operation import LOOKS, Api, Operation, parameter
from gateway.openai.operators.access import check_operator
from gateway.openai.usage import Count
from kaiten.v1 import watch_pb2
from kaiten.v1.common_pb2 import WhyPassedOver
from kaiten.v1.ledger_pb2 import ConfiguredInput
from kaiten.v1.watch_pb2 import SequenceState, WatchRequest, WatchResponse
from service_kit.errors import InvalidRequest

INTERVAL: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
# A leader that changes says nothing for a while.
SILENT_S_MAX: Final = 5.0
NS_PER_MS: Final = 1_000_000
STATES: Final = {
    number: name.removeprefix("SEQUENCE_STATE_").lower() for name, number in SequenceState.items()
}
WHYS: Final = {
    number: name.removeprefix("WHY_PASSED_OVER_").lower() for name, number in WhyPassedOver.items()
}


class PassedOver(Struct, kw_only=True):
    """A stage of the planner, and why it passed somebody over. No worker: whichever it was."""

    worker_id: str
    stage: str
    why: str


class LivePlan(Struct, kw_only=True):
    plan_id: Count
    lease_steps: Count
    steps_answered: Count


class LiveWorker(Struct, kw_only=True):
    """In one piece. `windows`: of its layer groups; null: a token attends to all before it."""

    worker_id: str
    address: str
    slots_max: Count
    block_size: Count
    block_count: Count
    blocks_free: Count
    windows: list[Count | None]
    is_draining: bool
    is_late: bool
    plans: list[LivePlan]
    passed_over: list[PassedOver]
    # Base64 of a bit per block, the lowest of the first byte first.
    cached_blocks: str
    step_tokens_max: Count
    mixed_tokens_max: Count
    # In its host memory, for cached blocks that had to go; and those of them that hold something.
    host_block_count: Count
    host_blocks_used: Count


class LiveIdentity(Struct, kw_only=True):
    """`id`: TENANT:REQUEST. `tokens_max`: prompt and output at their longest."""

    id: str
    choice: Count
    priority: int
    arrived_unix_ms: float
    prompt_tokens: Count
    tokens_max: Count


class LivePlace(Struct, kw_only=True):
    """`slot` counts while it runs."""

    state: Literal["waiting", "running", "preempted", "retiring", "forking", "unspecified"]
    worker_id: str
    slot: Count
    preemptions: Count


class LiveCounts(Struct, kw_only=True):
    tokens: Count
    scheduled_tokens: Count
    computed_tokens: Count


class LiveTable(Struct, kw_only=True):
    """Blocks of a layer group from the front: `skipped` were given back, then as before up to
    `kept`, then these.
    """

    skipped: Count
    kept: Count
    block_ids: list[Count]


class LiveSequence(Struct, kw_only=True, omit_defaults=True):
    """What is left out is as before."""

    sequence_id: Count
    identity: LiveIdentity | UnsetType = UNSET
    place: LivePlace | UnsetType = UNSET
    counts: LiveCounts | UnsetType = UNSET
    tables: list[LiveTable] | UnsetType = UNSET
    passed_over: list[PassedOver] | UnsetType = UNSET


class LiveRows(Struct, kw_only=True, omit_defaults=True):
    """Who is on a worker, in columns, in place of `counts` and `tables` of each; what is left out
    is as before. `table_rows`: whose tables are otherwise, from 0; of each as many as the worker
    has `windows`, and `new_blocks` of `block_ids` are each table's.
    """

    worker_id: str
    sequence_ids: list[Count] = []
    tokens: list[Count] = []
    scheduled_tokens: list[Count] = []
    computed_tokens: list[Count] = []
    table_rows: list[Count] = []
    skipped: list[Count] = []
    kept: list[Count] = []
    new_blocks: list[Count] = []
    block_ids: list[Count] = []


class LiveQueue(Struct, kw_only=True):
    """In order, as far as it is told, and the length of all of it."""

    sequence_ids: list[Count]
    length: Count


class LiveStep(Struct, kw_only=True, omit_defaults=True):
    """One iteration. Leaves and joins are against the step before in the same list; of the first
    one, all of the batch joins, or as `is_diff` says. Who is in it and not in `tokenless_slots` had
    a token. What its plan decided is told with `step` 0; blocks are those since the worker's plan
    before.
    """

    plan_id: Count
    step: Count
    answered_unix_ms: float
    step_us: Count
    leave_slots: list[Count] = []
    join_slots: list[Count] = []
    join_sequence_ids: list[Count] = []
    chunk_slots: list[Count] = []
    chunk_tokens: list[Count] = []
    tokenless_slots: list[Count] = []
    tokens: Count
    finished_slots: list[Count] = []
    preempted_sequence_ids: list[Count] = []
    preempted_whys: list[str] = []
    blocks_free: Count = 0
    waiting: Count = 0
    lease_steps: Count = 0
    budget_tokens: Count = 0
    cached_tokens: Count = 0
    blocks_allocated: Count = 0
    blocks_evicted: Count = 0
    blocks_shared: Count = 0
    blocks_freed: Count = 0
    blocks_swapped_out: Count = 0
    blocks_swapped_in: Count = 0
    # By the cost model when it was planned; left out: it knew nothing yet.
    expected_us: Count = 0
    is_graph: bool = False


class LiveSteps(Struct, kw_only=True):
    """Of a worker, since the event before; `skipped` before these are not told. With `is_diff` the
    first is told against who was running there as of the event before.
    """

    worker_id: str
    skipped: Count
    steps: list[LiveStep]
    is_diff: bool = False


class LiveCore(Struct, kw_only=True, omit_defaults=True):
    """What is otherwise than in the event before; the first, and one with `is_snapshot`, begins
    from nothing. Workers stand in place of what was said of them, sequences part by part.
    """

    object: Literal["core"] = "core"
    is_snapshot: bool = False
    epoch: Count
    seq: Count
    committed_seq: Count
    unix_ms: float
    configured: dict[str, Any] | UnsetType = UNSET
    workers: list[LiveWorker] = []
    worker_ids_gone: list[str] = []
    sequences: list[LiveSequence] = []
    sequence_ids_gone: list[Count] = []
    queue: LiveQueue | UnsetType = UNSET
    steps: list[LiveSteps] = []
    # Identities of those who are in `steps`, came and went.
    passed: list[LiveSequence] = []
    # With `rows=true`.
    rows: list[LiveRows] = []


async def watch(api: Api, exchange: HttpExchange, _body: None) -> None:
    """For as long as it is read. Who reads slowly is told less often: nothing is kept for them."""
    check_operator(exchange)
    asked = QueryParams(exchange.scope["query_string"])
    interval, rows = asked.get("interval_ms", "0"), asked.get("rows", "false")
    if not INTERVAL.fullmatch(interval) or int(interval) > 60_000:
        raise InvalidRequest("interval_ms", f"must be in [0, 60000], got {interval[:64]!r}")
    if rows not in ("true", "false"):
        raise InvalidRequest("rows", f"must be true or false, got {rows[:64]!r}")
    request = WatchRequest(interval_ms=int(interval), takes_rows=rows == "true")
    async with aclosing(api.operators.watch(request)) as responses:
        # Whoever is refused is told so by the answer's status.
        first = await anext(responses)
        await exchange.start_events()
        if exchange.scope["method"] == "HEAD":
            return await exchange.end_events(b"")
        async with exchange.pinged(SILENT_S_MAX):
            await exchange.send_events(told(first))
            async for response in responses:
                exchange.ask_key_again()
                check_operator(exchange)
                await exchange.send_events(told(response))
    await exchange.end_events(DONE)


def told(response: Told) -> bytes:
    """An event of what a leader said; made once for all who are told it."""
    if not response.event:
        response.event = to_event(core_of(response.said))
    return response.event


def core_of(said: WatchResponse) -> LiveCore:
    """Field by field: what protobuf itself writes takes ten times as long."""
    return LiveCore(
        is_snapshot=said.is_snapshot,
        epoch=said.epoch,
        seq=said.seq,
        committed_seq=said.committed_seq,
        unix_ms=said.unix_ns / NS_PER_MS,
        configured=configured_of(said.configured) if said.HasField("configured") else UNSET,
        workers=[_worker(each) for each in said.workers],
        worker_ids_gone=list(said.worker_ids_gone),
        sequences=[_sequence(each) for each in said.sequences],
        sequence_ids_gone=list(said.sequence_ids_gone),
        queue=LiveQueue(sequence_ids=list(said.queue.sequence_ids), length=said.queue.length)
        if said.HasField("queue")
        else UNSET,
        steps=[steps_of(each) for each in said.steps],
        passed=[_sequence(each) for each in said.passed],
        rows=[_rows(each) for each in said.rows],
    )


def configured_of(said: ConfiguredInput) -> dict[str, Any]:
    """What is decided by, as far as it is set."""
    return MessageToDict(said, preserving_proto_field_name=True)


def _worker(said: watch_pb2.WatchedWorker) -> LiveWorker:
    return LiveWorker(
        worker_id=said.worker_id,
        address=said.address,
        slots_max=said.slots_max,
        block_size=said.block_size,
        block_count=said.block_count,
        blocks_free=said.blocks_free,
        windows=[group.window_tokens or None for group in said.layer_groups],
        is_draining=said.is_draining,
        is_late=said.is_late,
        plans=[
            LivePlan(
                plan_id=plan.plan_id,
                lease_steps=plan.lease_steps,
                steps_answered=plan.steps_answered,
            )
            for plan in said.plans
        ],
        passed_over=_passed(said.passed_over),
        cached_blocks=b64encode(said.cached_blocks).decode(),
        step_tokens_max=said.step_tokens_max,
        mixed_tokens_max=said.mixed_tokens_max,
        host_block_count=said.host_block_count,
        host_blocks_used=said.host_blocks_used,
    )


def steps_of(said: watch_pb2.WatchedSteps) -> LiveSteps:
    """Times in milliseconds."""
    return LiveSteps(
        worker_id=said.worker_id,
        skipped=said.num_skipped,
        steps=[_step(step) for step in said.steps],
        is_diff=said.is_diff,
    )


def _step(said: watch_pb2.WatchedStep) -> LiveStep:
    return LiveStep(
        plan_id=said.plan_id,
        step=said.step,
        answered_unix_ms=said.answered_ns / NS_PER_MS,
        step_us=said.step_us,
        leave_slots=list(said.leave_slots),
        join_slots=list(said.join_slots),
        join_sequence_ids=list(said.join_sequence_ids),
        chunk_slots=list(said.chunk_slots),
        chunk_tokens=list(said.chunk_tokens),
        tokenless_slots=list(said.tokenless_slots),
        tokens=said.num_tokens,
        finished_slots=list(said.finished_slots),
        preempted_sequence_ids=list(said.preempted_sequence_ids),
        preempted_whys=[WHYS.get(why, str(why)) for why in said.preempted_whys],
        blocks_free=said.blocks_free,
        waiting=said.waiting,
        lease_steps=said.lease_steps,
        budget_tokens=said.budget_tokens,
        cached_tokens=said.num_cached_tokens,
        blocks_allocated=said.blocks_allocated,
        blocks_evicted=said.blocks_evicted,
        blocks_shared=said.blocks_shared,
        blocks_freed=said.blocks_freed,
        blocks_swapped_out=said.blocks_swapped_out,
        blocks_swapped_in=said.blocks_swapped_in,
        expected_us=said.expected_us,
        is_graph=said.is_graph,
    )


def _sequence(said: watch_pb2.WatchedSequence) -> LiveSequence:
    """Most have new counts, and nothing else."""
    sequence, has = LiveSequence(sequence_id=said.sequence_id), said.HasField
    if has("counts"):
        counts = said.counts
        sequence.counts = LiveCounts(
            tokens=counts.num_tokens,
            scheduled_tokens=counts.num_scheduled_tokens,
            computed_tokens=counts.num_computed_tokens,
        )
    if has("tables"):
        sequence.tables = [
            LiveTable(
                skipped=group.num_skipped_blocks,
                kept=group.num_kept_blocks,
                block_ids=list(group.block_ids),
            )
            for group in said.tables.groups
        ]
    if has("identity"):
        sequence.identity = _identity(said.identity)
    if has("place"):
        place = said.place
        sequence.place = LivePlace(
            state=STATES[place.state],  # type: ignore[arg-type]
            worker_id=place.worker_id,
            slot=place.slot,
            preemptions=place.num_preemptions,
        )
    if has("passed_over"):
        sequence.passed_over = _passed(said.passed_over.by)
    return sequence


def _rows(said: watch_pb2.WatchedRows) -> LiveRows:
    return LiveRows(
        worker_id=said.worker_id,
        sequence_ids=list(said.sequence_ids),
        tokens=list(said.num_tokens),
        scheduled_tokens=list(said.num_scheduled_tokens),
        computed_tokens=list(said.num_computed_tokens),
        table_rows=list(said.table_rows),
        skipped=list(said.num_skipped_blocks),
        kept=list(said.num_kept_blocks),
        new_blocks=list(said.num_new_blocks),
        block_ids=list(said.block_ids),
    )


def _identity(said: watch_pb2.SequenceIdentity) -> LiveIdentity:
    return LiveIdentity(
        id=said.id,
        choice=said.choice,
        priority=said.priority,
        arrived_unix_ms=said.arrived_ns / NS_PER_MS,
        prompt_tokens=said.num_prompt_tokens,
        tokens_max=said.tokens_max,
    )


def _passed(said: Iterable[watch_pb2.PassedOver]) -> list[PassedOver]:
    return [
        # A newer leader may know reasons that this gateway does not.
        PassedOver(worker_id=o.worker_id, stage=o.stage, why=WHYS.get(o.why, str(o.why)))
        for o in said
    ]


INTERVAL_MS: Final = parameter(
    "query", "interval_ms", "", "between two events, at least; 100 to 60000, 250 if left out"
)
ROWS: Final = parameter(
    "query",
    "rows",
    "",
    "true: who is on a worker is told in columns, and batches as differences: a fifth of the bytes",
)
OPERATIONS: Final = (
    Operation(
        "GET", "/v1/watch", "watch", watch, LOOKS, (), (INTERVAL_MS, ROWS), events=(LiveCore,)
    ),
)
