"""/v1/requests/{id}/explain: where the time of a request went."""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from starlette.datastructures import QueryParams

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import LOOKS, Api, Operation, parameter
from gateway.openai.usage import Count
from gateway.requests.validation import REQUEST_ID
from gateway.values.request_ids import own_ids
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from service_kit.errors import InvalidRequest

Phase = Literal[
    "accept", "queue", "prefill", "decode", "stall", "commit", "deliver", "reader", "unknown"
]
PHASES: Final[Mapping[int, Phase]] = {
    TimelinePhase.TIMELINE_PHASE_QUEUE: "queue",
    TimelinePhase.TIMELINE_PHASE_PREFILL: "prefill",
    TimelinePhase.TIMELINE_PHASE_DECODE: "decode",
    TimelinePhase.TIMELINE_PHASE_STALL: "stall",
    TimelinePhase.TIMELINE_PHASE_ACCEPT: "accept",
    TimelinePhase.TIMELINE_PHASE_COMMIT: "commit",
    TimelinePhase.TIMELINE_PHASE_DELIVER: "deliver",
    TimelinePhase.TIMELINE_PHASE_READER: "reader",
}
NS_PER_MS: Final = 1_000_000


class LongGap(Struct, kw_only=True):
    """Between two tokens: since its request arrived, and what the step that ended it computed."""

    end_ms: float
    gap_ms: float
    rows: Count
    prompt_tokens: Count


class Interval(Struct, kw_only=True):
    """Since its request arrived, and for so long. Who stood before it, or stalled it, is told to
    operators: as a sequence, and as TENANT:REQUEST.
    """

    phase: Phase
    start_ms: float
    ms: float
    why: str
    behind_sequence_id: int | None
    behind_id: str | None
    worker_id: str | None
    cached_tokens: Count
    chunk_tokens: list[Count]
    steps: Count
    gap_p50_ms: float
    longest_gaps: list[LongGap]
    batch_mates: Count
    blocks: Count
    shared_blocks: Count
    swapped_in_blocks: Count
    stalled_by_sequence_id: int | None
    stalled_by_id: str | None


class ExplainedChoice(Struct, kw_only=True):
    index: Count
    sequence_id: Count
    ended: str | None
    preemptions: Count
    arrived_unix_ms: float
    ms: float
    latency_ms: float | None
    batch_mates: Count
    batch_mate_ids: list[str]
    intervals: list[Interval]


class Explained(Struct, kw_only=True):
    id: str
    object: Literal["request.timeline"] = "request.timeline"
    choices: list[ExplainedChoice]


async def explain(api: Api, exchange: HttpExchange, _body: None) -> None:
    """While it lives, of the last few thousand that ended, and of those that archives tell of,
    which takes some seconds."""
    public = exchange.path["id"]
    of = QueryParams(exchange.scope["query_string"]).get("tenant", "")
    if not REQUEST_ID.fullmatch(own_ids(public)[-1]):
        raise InvalidRequest("id", f"must match {REQUEST_ID.pattern}")
    choices, _ = await api.generation_service.explain(public, exchange.tenant, of)
    await exchange.send_json(200, Explained(id=public, choices=[_choice(each) for each in choices]))


def _choice(told: ChoiceTimeline) -> ExplainedChoice:
    intervals = told.intervals
    start_ns = intervals[0].start_unix_ns if intervals else 0
    end_ns = intervals[-1].end_unix_ns if intervals else 0
    return ExplainedChoice(
        index=told.choice,
        sequence_id=told.sequence_id,
        ended=told.ended or None,
        preemptions=told.num_preemptions,
        arrived_unix_ms=start_ns / NS_PER_MS,
        ms=(end_ns - start_ns) / NS_PER_MS,
        latency_ms=told.latency_ns / NS_PER_MS if told.latency_ns else None,
        batch_mates=told.num_batch_mates,
        batch_mate_ids=list(told.batch_mate_ids),
        intervals=[_interval(each, start_ns) for each in intervals],
    )


def _interval(told: TimelineInterval, since_ns: int) -> Interval:
    has_behind = told.HasField("behind_sequence_id")
    return Interval(
        phase=PHASES.get(told.phase, "unknown"),
        start_ms=(told.start_unix_ns - since_ns) / NS_PER_MS,
        ms=(told.end_unix_ns - told.start_unix_ns) / NS_PER_MS,
        why=told.why,
        behind_sequence_id=told.behind_sequence_id if has_behind else None,
        behind_id=told.behind_id or None,
        worker_id=told.worker_id or None,
        cached_tokens=told.num_cached_tokens,
        chunk_tokens=list(told.chunk_tokens),
        steps=told.num_steps,
        gap_p50_ms=told.gap_p50_ns / NS_PER_MS,
        longest_gaps=[
            LongGap(
                end_ms=(gap.end_unix_ns - since_ns) / NS_PER_MS,
                gap_ms=gap.gap_ns / NS_PER_MS,
                rows=gap.rows,
                prompt_tokens=gap.prompt_tokens,
            )
            for gap in told.longest_gaps
        ],
        batch_mates=told.batch_mates,
        blocks=told.num_blocks,
        shared_blocks=told.num_shared_blocks,
        swapped_in_blocks=told.num_swapped_in_blocks,
        stalled_by_sequence_id=told.stalled_by_sequence_id
        if told.HasField("stalled_by_sequence_id")
        else None,
        stalled_by_id=told.stalled_by_id or None,
    )


ID: Final = parameter("path", "id", "", "as its answer has it")
TENANT: Final = parameter("query", "tenant", "", "whose it is, for operators; else the caller's")
OPERATIONS: Final = (
    Operation(
        "GET",
        "/v1/requests/{id}/explain",
        "explainRequest",
        explain,
        LOOKS,
        (Explained,),
        (ID, TENANT),
    ),
)
