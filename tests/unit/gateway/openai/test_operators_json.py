"""What operators are told over HTTP is what gRPC says, in JSON."""

import json
from typing import Any

import msgspec
import pytest
from starlette.datastructures import QueryParams

from gateway.cell.operators import Told
from gateway.http.json_reply import to_json
from gateway.openai.operators.archive import Page, request_of
from gateway.openai.operators.watch import LiveCore, told
from kaiten.v1.archive_pb2 import ArchivedRequest, ArchiveEntry, ArchiveGap, ArchiveHeader
from kaiten.v1.common_pb2 import LayerGroup, WhyPassedOver, WorkerDescription
from kaiten.v1.ledger_pb2 import (
    ConfiguredInput,
    CoreInput,
    ExpireInput,
    JournalRecord,
    PlanInput,
    ResultInput,
    SequenceFinished,
    SubmitRecord,
    WorkerJoinedInput,
)
from kaiten.v1.watch_pb2 import (
    InFlightPlan,
    PassedOver,
    SequenceCounts,
    SequenceIdentity,
    SequencePassedOver,
    SequencePlace,
    SequenceState,
    SequenceTables,
    WatchedQueue,
    WatchedRows,
    WatchedSequence,
    WatchedStep,
    WatchedSteps,
    WatchedTable,
    WatchedWorker,
    WatchResponse,
)
from kaiten.v1.worker_service_pb2 import RowFinished, StepResult, StepTimings
from service_kit.errors import InvalidRequest

OVER = PassedOver(worker_id="w", stage="admit", why=WhyPassedOver.WHY_PASSED_OVER_BLOCKS)
SEQUENCE = WatchedSequence(
    sequence_id=1763830000000001,
    identity=SequenceIdentity(
        id="a:x", choice=1, priority=-3, arrived_ns=2_500_000, num_prompt_tokens=4, tokens_max=9
    ),
    place=SequencePlace(
        state=SequenceState.SEQUENCE_STATE_PREEMPTED, worker_id="w", slot=2, num_preemptions=1
    ),
    counts=SequenceCounts(num_tokens=6, num_scheduled_tokens=5, num_computed_tokens=4),
    tables=SequenceTables(
        groups=[WatchedTable(num_skipped_blocks=1, num_kept_blocks=2, block_ids=[7, 8])]
    ),
    passed_over=SequencePassedOver(by=[OVER]),
)
WORKER = WatchedWorker(
    worker_id="w",
    address="h:1",
    slots_max=2,
    block_size=16,
    block_count=9,
    blocks_free=8,
    layer_groups=[LayerGroup(), LayerGroup(window_tokens=64)],
    is_late=True,
    plans=[InFlightPlan(plan_id=3, lease_steps=8, steps_answered=2)],
    passed_over=[OVER],
    cached_blocks=b"\x05",
    step_tokens_max=64,
    mixed_tokens_max=32,
    host_block_count=20,
    host_blocks_used=6,
)
STEP = WatchedStep(
    plan_id=3,
    step=0,
    answered_ns=6_000_000,
    step_us=900,
    join_slots=[1],
    join_sequence_ids=[4],
    chunk_slots=[1],
    chunk_tokens=[9],
    tokenless_slots=[1],
    preempted_sequence_ids=[5],
    preempted_whys=[WhyPassedOver.WHY_PASSED_OVER_BLOCKS],
    waiting=2,
    lease_steps=4,
    budget_tokens=32,
    num_cached_tokens=16,
    blocks_allocated=3,
    blocks_evicted=2,
    blocks_shared=1,
    blocks_freed=6,
    blocks_swapped_out=2,
    blocks_swapped_in=1,
    expected_us=950,
    is_graph=True,
)
ROWS = WatchedRows(
    worker_id="w",
    sequence_ids=[1763830000000001, 4],
    num_tokens=[6, 9],
    num_scheduled_tokens=[5, 9],
    num_computed_tokens=[4, 0],
    table_rows=[1],
    num_skipped_blocks=[0, 2],
    num_kept_blocks=[1, 3],
    num_new_blocks=[2, 0],
    block_ids=[4, 5],
)
WENT = WatchedSequence(sequence_id=4, identity=SequenceIdentity(id="a:y"))
PASSED = {"worker_id": "w", "stage": "admit", "why": "blocks"}
SAID = WatchResponse(
    is_snapshot=True,
    epoch=5,
    seq=12,
    committed_seq=11,
    unix_ns=7_000_000,
    configured=ConfiguredInput(policy="fair", lease_steps_max=8),
    workers=[WORKER],
    worker_ids_gone=["v"],
    sequences=[SEQUENCE],
    sequence_ids_gone=[3],
    queue=WatchedQueue(sequence_ids=[9, 8], length=40),
    steps=[WatchedSteps(worker_id="w", num_skipped=1, steps=[STEP], is_diff=True)],
    passed=[WENT],
    rows=[ROWS, WatchedRows(worker_id="v")],
)
TOLD = {
    "is_snapshot": True,
    "epoch": 5,
    "seq": 12,
    "committed_seq": 11,
    "unix_ms": 7.0,
    "configured": {"policy": "fair", "lease_steps_max": 8},
    "workers": [
        {
            "worker_id": "w",
            "address": "h:1",
            "slots_max": 2,
            "block_size": 16,
            "block_count": 9,
            "blocks_free": 8,
            "windows": [None, 64],
            "is_draining": False,
            "is_late": True,
            "plans": [{"plan_id": 3, "lease_steps": 8, "steps_answered": 2}],
            "passed_over": [PASSED],
            "cached_blocks": "BQ==",
            "step_tokens_max": 64,
            "mixed_tokens_max": 32,
            "host_block_count": 20,
            "host_blocks_used": 6,
        }
    ],
    "worker_ids_gone": ["v"],
    "sequences": [
        {
            "sequence_id": 1763830000000001,
            "identity": {
                "id": "a:x",
                "choice": 1,
                "priority": -3,
                "arrived_unix_ms": 2.5,
                "prompt_tokens": 4,
                "tokens_max": 9,
            },
            "place": {"state": "preempted", "worker_id": "w", "slot": 2, "preemptions": 1},
            "counts": {"tokens": 6, "scheduled_tokens": 5, "computed_tokens": 4},
            "tables": [{"skipped": 1, "kept": 2, "block_ids": [7, 8]}],
            "passed_over": [PASSED],
        }
    ],
    "sequence_ids_gone": [3],
    "queue": {"sequence_ids": [9, 8], "length": 40},
    "steps": [
        {
            "worker_id": "w",
            "skipped": 1,
            "steps": [
                {
                    "plan_id": 3,
                    "step": 0,
                    "answered_unix_ms": 6.0,
                    "step_us": 900,
                    "join_slots": [1],
                    "join_sequence_ids": [4],
                    "chunk_slots": [1],
                    "chunk_tokens": [9],
                    "tokenless_slots": [1],
                    "tokens": 0,
                    "preempted_sequence_ids": [5],
                    "preempted_whys": ["blocks"],
                    "waiting": 2,
                    "lease_steps": 4,
                    "budget_tokens": 32,
                    "cached_tokens": 16,
                    "blocks_allocated": 3,
                    "blocks_evicted": 2,
                    "blocks_shared": 1,
                    "blocks_freed": 6,
                    "blocks_swapped_out": 2,
                    "blocks_swapped_in": 1,
                    "expected_us": 950,
                    "is_graph": True,
                }
            ],
            "is_diff": True,
        }
    ],
    "passed": [
        {
            "sequence_id": 4,
            "identity": {
                "id": "a:y",
                "choice": 0,
                "priority": 0,
                "arrived_unix_ms": 0.0,
                "prompt_tokens": 0,
                "tokens_max": 0,
            },
        }
    ],
    "rows": [
        {
            "worker_id": "w",
            "sequence_ids": [1763830000000001, 4],
            "tokens": [6, 9],
            "scheduled_tokens": [5, 9],
            "computed_tokens": [4, 0],
            "table_rows": [1],
            "skipped": [0, 2],
            "kept": [1, 3],
            "new_blocks": [2, 0],
            "block_ids": [4, 5],
        },
        {"worker_id": "v"},
    ],
}


def event(response: WatchResponse) -> dict[str, Any]:
    said = Told(response.SerializeToString())
    raw = told(said)
    assert told(said) is raw, "made once, for whoever is told it"
    assert raw.startswith(b"data: ")
    # It is what the document says.
    msgspec.json.decode(raw[6:], type=LiveCore)
    found: dict[str, Any] = json.loads(raw[6:])
    return found


def test_what_is_told_is_all_that_was_said() -> None:
    assert event(SAID) == TOLD


def test_what_is_as_before_is_not_told_again() -> None:
    counts = SequenceCounts(num_tokens=1)
    told_of = event(
        WatchResponse(epoch=5, sequences=[WatchedSequence(sequence_id=1, counts=counts)])
    )
    assert told_of.keys() == {"epoch", "seq", "committed_seq", "unix_ms", "sequences"}
    assert told_of["sequences"] == [
        {"sequence_id": 1, "counts": {"tokens": 1, "scheduled_tokens": 0, "computed_tokens": 0}}
    ]


def result(plan_id: int, step: int, slots: list[int], **more: Any) -> CoreInput:
    of_step = StepResult(plan_id=plan_id, step=step, slots=slots, **more)
    return CoreInput(now_ns=3_000_000, result=ResultInput(worker_id="w", step=of_step))


def entries() -> list[ArchiveEntry]:
    plan = PlanInput(worker_id="w", plan_id=1, admitted=[70, 71], join_slots=[0, 1], chunk_tokens=5)
    joined = WorkerJoinedInput(worker_id="w", worker=WorkerDescription(slots_max=2, block_count=9))
    ends = RowFinished(slot=1)
    records = [
        JournalRecord(
            epoch=5,
            seq=2,
            sequence_ids=[70, 71],
            inputs=[
                CoreInput(worker_joined=joined),
                CoreInput(now_ns=2_000_000, plan=plan),
                result(1, 0, [0, 1], timings=StepTimings(forward_us=850, sample_us=50)),
            ],
        ),
        JournalRecord(epoch=5, seq=3, sequence_ids=[70, 71], inputs=[result(1, 1, [0, 1])]),
        JournalRecord(
            epoch=5,
            seq=4,
            sequence_ids=[71],
            inputs=[CoreInput(expire=ExpireInput()), result(1, 2, [1], finished=[ends])],
            finished=[
                SequenceFinished(sequence_id=71, reason="FINISH_REASON_LENGTH", output_tokens=3)
            ],
        ),
    ]
    submit = SubmitRecord(id="a:x", n=2, prompt_token_ids=[1, 2, 3])
    return [
        ArchiveEntry(header=ArchiveHeader(epoch=5, configured=ConfiguredInput(policy="fair"))),
        ArchiveEntry(request=ArchivedRequest(entry_id="1700-0", sequence_id=70, submit=submit)),
        *(ArchiveEntry(record=record) for record in records),
        ArchiveEntry(gap=ArchiveGap(first_seq=5, last_seq=9, reason="full")),
    ]


def test_a_page_tells_each_step_against_the_one_before_and_no_tokens() -> None:
    page = Page()
    assert all(page.take(entry, 3) for entry in entries())
    raw = to_json(page.reply())
    assert b"token_ids" not in raw
    said = json.loads(raw)
    assert (said["last"], said["has_more"]) == ("5:4", False)
    header, request, first, second, third, gap = said["data"]
    assert header["header"]["policy"] == "fair"
    asked = request["request"]
    assert (asked["id"], asked["prompt_tokens"], asked["arrived_unix_ms"]) == ("a:x", 3, 1700.0)
    worker, plan, step = first["record"]["inputs"]
    assert worker["worker"]["slots_max"] == 2
    assert (plan["unix_ms"], plan["plan"]["join_slots"]) == (2.0, [0, 1])
    assert (step["step"]["step_us"], step["step"]["slots"]) == (900, [0, 1])
    assert first["record"]["sequence_ids"] == [70, 71]
    assert "sequence_ids" not in second["record"]
    assert "slots" not in second["record"]["inputs"][0]["step"]
    expired, last = third["record"]["inputs"]
    assert expired["other"] == "expire"
    assert (last["step"]["slots"], last["step"]["finished_slots"]) == ([1], [1])
    ending = {"sequence_id": 71, "reason": "length", "output_tokens": 3}
    assert (third["record"]["sequence_ids"], third["record"]["finished"]) == ([71], [ending])
    assert gap["gap"] == {"first_seq": 5, "last_seq": 9, "requests": 0, "reason": "full"}


def test_a_page_is_full_and_says_where_the_next_begins() -> None:
    page = Page()
    assert [page.take(entry, 2) for entry in entries()[:5]] == [True] * 4 + [False]
    assert (page.reply().last, page.reply().has_more) == ("5:3", True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("after", "5"), ("after", f"5:{1 << 63}"), ("since_ms", "-1"), ("id", "x" * 300)],
)
def test_what_is_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request_of(QueryParams({name: value}))
    assert refused.value.field == name


def test_what_is_asked_for_is_asked_of_the_schedulers() -> None:
    request = request_of(QueryParams("after=5:12&since_ms=7&until_ms=9&id=a:x"))
    assert (request.after_epoch, request.after_seq, request.id) == (5, 12, "a:x")
    assert (request.since_unix_ns, request.until_unix_ns) == (7_000_000, 9_000_000)
