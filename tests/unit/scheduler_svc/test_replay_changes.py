"""A worker that changed is in the journal: without it the replay would make other plans."""

from kaiten.v1.common_pb2 import Leader
from kaiten.v1.ledger_pb2 import CoreInput, JournalRecord, SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import InboxEntry
from scheduler_svc import wire
from scheduler_svc.command_wire import describe_plan, input_to_proto
from scheduler_svc.core.commands import (
    Command,
    Configured,
    MakePlan,
    Submit,
    WorkerChanged,
    WorkerJoined,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config
from scheduler_svc.journal import plan_digest
from scheduler_svc.replay import Replay
from tests.support.cell import spec

SAMPLING = RowSampling(max_tokens=9, logprobs=-1)
ENTRY = InboxEntry(
    entry_id="5-0",
    sequence_id=1,
    record=SubmitRecord(id="t:r", n=1, prompt_token_ids=range(1, 41), sampling=SAMPLING),
)


def journal(*commands: Command) -> JournalRecord:
    """What a leader writes of these."""
    core, inputs = Scheduler(), list[CoreInput]()
    for command in commands:
        outcome = core.apply(command, 7)
        inputs.append(input_to_proto(command, 7))
        if (plan := outcome.plan) is not None:
            message = wire.plan_to_proto(plan, Leader(epoch=3), [SAMPLING], "trace")
            message.expected_step_us = 1234
            describe_plan(inputs[-1].plan, plan, outcome.passed_over, plan_digest(message))
    return JournalRecord(seq=1, epoch=1, inputs=inputs)


def test_a_changed_worker_is_replayed() -> None:
    assert isinstance(ENTRY.record, SubmitRecord)
    record = journal(
        Configured(config=Config(), policy="fcfs"),
        WorkerJoined(worker_id="w", spec=spec(slots=4, step_tokens=64)),
        Submit(request=wire.request_from_proto(ENTRY, ENTRY.record, 7)),
        WorkerChanged(worker_id="w", spec=spec(slots=4, step_tokens=16)),
        MakePlan(worker_id="w"),
    )
    compared = list(Replay([ENTRY]).feed(record))
    assert [each.what for each in compared] == ["plan 1 of w", "tokens", "endings"]
    assert all(each.is_equal for each in compared)
    assert record.inputs[-1].plan.chunk_tokens == 16
    del record.inputs[3]
    assert not next(Replay([ENTRY]).feed(record)).is_equal
