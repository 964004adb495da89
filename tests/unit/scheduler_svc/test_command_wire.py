"""Every command is written into the journal and read from it as the same value."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiten.v1 import common_pb2
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.ledger_pb2 import CancelRecord, CoreInput, SubmitInput
from scheduler_svc import command_wire, wire
from scheduler_svc.core.commands import (
    Cancel,
    Command,
    Configured,
    Expire,
    HandedOver,
    MakePlan,
    StepDone,
    StoreBehind,
    Submit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLate,
    WorkerLost,
)
from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.types import (
    Config,
    Feature,
    Handover,
    Reason,
    Request,
    Rules,
    SequencePast,
    WorkerSpec,
)
from tests.support.wire_draws import NAMES, U32, U64, plans, sizes, steps

cancels = st.builds(
    Cancel,
    sequence_id=U64,
    choice=st.none() | U32,
    reason=st.sampled_from([Reason.CANCELLED, Reason.ERROR]),
    error=NAMES,
) | st.builds(Cancel, sequence_id=U64, reason=st.just(Reason.STOP), num_output_tokens=U32)
weights = st.dictionaries(NAMES, st.integers(1, 1000), max_size=3)
configs = st.builds(
    Config,
    **{f.name: sizes() for f in dataclasses.fields(Config) if f.name != "tenant_weights"},
    tenant_weights=weights.map(lambda of: tuple(sorted(of.items()))),
) | st.just(Config())
rules = st.builds(Rules, **{field.name: NAMES for field in dataclasses.fields(Rules)})
specs = st.builds(
    WorkerSpec,
    fingerprint=NAMES,
    block_size=sizes(),
    block_count=sizes(),
    slots_max=sizes(100),
    step_tokens_max=st.integers(1000, 2000),
    mixed_tokens_max=st.none() | st.integers(901, 1000),
    vocab_size=U32,
    context_tokens_max=st.none() | sizes(),
    slot_tokens_max=sizes(9),
    features=st.frozensets(st.sampled_from(Feature)),
    windows=st.lists(st.none() | sizes(), min_size=1, max_size=3).map(tuple),
)
pasts = st.builds(SequencePast, sequence_id=U64, num_preemptions=U32, deaths=U32, furthest=U32)
handovers = st.builds(
    Handover,
    sequences=st.lists(pasts, max_size=3).map(tuple),
    tenants=st.lists(st.tuples(NAMES, U64), max_size=3).map(tuple),
)
COMMANDS: dict[type, st.SearchStrategy[Command]] = {
    Configured: st.builds(Configured, config=configs, policy=NAMES, rules=rules),
    Cancel: cancels,
    HandedOver: st.builds(HandedOver, handover=handovers),
    Expire: st.just(Expire()),
    WorkerJoined: st.builds(WorkerJoined, worker_id=NAMES, spec=specs),
    WorkerChanged: st.builds(WorkerChanged, worker_id=NAMES, spec=specs),
    WorkerDraining: st.builds(WorkerDraining, worker_id=NAMES),
    WorkerLost: st.builds(
        WorkerLost, worker_id=NAMES, is_crash=st.none() | st.booleans(), reason=NAMES
    ),
    WorkerLate: st.builds(WorkerLate, worker_id=NAMES),
    StoreBehind: st.builds(StoreBehind, is_behind=st.booleans()),
    StepDone: st.builds(StepDone, result=steps()),
    MakePlan: st.builds(MakePlan, worker_id=NAMES),
}


def never(submit: SubmitInput) -> Request:
    raise AssertionError("no Submit was written")


@given(command=st.one_of(*COMMANDS.values()), now_ns=U64)
def test_what_is_written_is_read(command: Command, now_ns: int) -> None:
    item = CoreInput.FromString(command_wire.input_to_proto(command, now_ns).SerializeToString())
    assert item.now_ns == now_ns
    assert command_wire.command_from_proto(item, never) == command


@given(command=COMMANDS[StepDone])
def test_tokens_that_are_the_records_are_taken_from_there(command: StepDone) -> None:
    item = command_wire.input_to_proto(command, 1)
    item.result.step.ClearField("token_ids")
    read = command_wire.command_from_proto(item, never, command.result.tokens)
    assert read == command or not command.result.slots


def test_every_command_is_tried() -> None:
    assert {*COMMANDS, Submit} == set(Command.__args__)


@pytest.mark.parametrize("outputs", [(), ((5, 6), None)])
def test_a_submit_names_its_request_and_what_was_committed_of_it(
    outputs: tuple[tuple[int, ...] | None, ...],
) -> None:
    request = Request(
        id="a:r", sequence_id=9, n=2, prompt=(1,), max_tokens=5, arrived_ns=0, outputs=outputs
    )
    item = command_wire.input_to_proto(Submit(request=request), 3)
    assert item.submit == SubmitInput(
        id="a:r", sequence_id=9, committed_tokens=[2, 0] if outputs else []
    )
    assert command_wire.command_from_proto(item, lambda submit: request) == Submit(request=request)


@given(plan=plans, digest=U64)
def test_the_journal_is_told_the_decision_in_its_own_words(plan: Plan, digest: int) -> None:
    item = command_wire.input_to_proto(MakePlan(worker_id=plan.worker_id), 7)
    said = item.plan
    command_wire.describe_plan(said, plan, (), digest)
    assert (said.worker_id, said.plan_id, said.digest) == (plan.worker_id, plan.plan_id, digest)
    assert said.lease_steps == plan.lease_steps
    assert tuple(said.leave_slots) == plan.leaves
    admitted = zip(said.admitted, said.join_slots, strict=True)
    assert list(admitted) == [(join.sequence_id, join.slot) for join in plan.joins]
    assert tuple(said.preempted) == plan.preempted
    assert said.chunk_tokens == sum(count for _, count in plan.chunks)
    assert (said.decode_rows, said.blocks_free, said.waiting) == (
        plan.decode_rows,
        plan.blocks_free,
        plan.waiting,
    )


@pytest.mark.parametrize("reason", [*FinishReason.values(), 77])
@pytest.mark.parametrize("choice", [None, 0, 3])
def test_a_cancel_cuts_only_for_a_stop_string(reason: int, choice: int | None) -> None:
    record = CancelRecord(sequence_id=5, output_tokens=3, choice=choice)
    record.reason = reason  # type: ignore[assignment]
    cut = command_wire.cancel_from_proto(record)
    assert cut.choice == choice
    assert cut.num_output_tokens == (3 if reason == common_pb2.FINISH_REASON_STOP else None)
    assert cut.reason == wire.REASON_FROM_PROTO.get(record.reason, Reason.CANCELLED)
