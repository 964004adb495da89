"""What crosses the wire comes out as it went in."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batch.plans import (
    BlockTable,
    FinishReason,
    InvalidPlan,
    Join,
    Leader,
    Plan,
    RowLogprobs,
    RowPromptLogprobs,
    RowSampling,
    StepOutcome,
    StepResult,
    StepTimings,
)
from gpu_worker.service import wire
from kaiten.v1 import common_pb2, worker_service_pb2
from tests.support.worker_server import LIMITS, description, outcome_from_proto, plan_to_proto

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
floats = st.floats(width=32, allow_nan=False)
ids = st.lists(u32, max_size=4).map(tuple)
pairs = st.lists(st.tuples(u32, u32), max_size=4).map(tuple)
sampling = st.builds(
    RowSampling,
    temperature=floats,
    top_k=u32,
    top_p=floats,
    min_p=floats,
    seed=u64,
    choice=u32,
    max_tokens=u32,
    min_tokens=u32,
    stop_token_ids=ids,
    logprobs=st.integers(-1, 100),
    repetition_penalty=st.floats(width=32, allow_nan=False).filter(lambda penalty: penalty != 0),
    presence_penalty=floats,
    frequency_penalty=floats,
    logit_bias=st.lists(st.tuples(u32, floats), max_size=3).map(tuple),
    allowed_token_ids=ids,
    bad_words=st.lists(ids, max_size=3).map(tuple),
    prompt_logprobs=st.none() | u32,
)
joins = st.builds(
    Join,
    slot=u32,
    sequence_id=u64,
    token_ids=ids,
    prompt_tokens=u32,
    num_computed_tokens=u32,
    block_tables=st.lists(st.builds(BlockTable, ids, u32), max_size=3).map(tuple),
    sampling=sampling,
    prompt_logprobs_from=u32,
)
plans = st.builds(
    Plan,
    leader=st.builds(Leader, epoch=u64, nonce=u64),
    plan_id=u64,
    lease_steps=u32,
    leaves=ids,
    joins=st.lists(joins, max_size=3).map(tuple),
    appends=st.lists(st.tuples(u32, u32, u32), max_size=4).map(tuple),
    replacements=st.lists(st.tuples(u32, u32, u32, u32), max_size=3).map(tuple),
    swaps=pairs,
    copies=pairs,
    chunks=pairs,
    slot_tokens_most=st.integers(1, 256),
    membership_checksum=u64,
)


@given(plans)
def test_a_plan_round_trips(plan: Plan) -> None:
    packed = plan_to_proto(plan).SerializeToString()
    assert wire.plan_from_proto(worker_service_pb2.Plan.FromString(packed)) == plan


@pytest.mark.parametrize(
    "columns",
    [
        {"append_slots": [1], "append_blocks": []},
        {"copy_sources": [1], "copy_targets": [1, 2]},
        {"swap_sources": [1, 2], "swap_targets": [1]},
        {"chunk_slots": [], "chunk_tokens": [3]},
        {"replace_slots": [1], "replace_indices": [], "replace_blocks": [1]},
        {"replace_slots": [1], "replace_indices": [2], "replace_blocks": []},
    ],
)
def test_columns_must_be_parallel(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlan, match="must be parallel"):
        wire.plan_from_proto(worker_service_pb2.Plan(**columns))


def test_one_token_of_a_row_is_certain_and_no_more() -> None:
    for count in (0, 1):
        wire.plan_from_proto(worker_service_pb2.Plan(slot_tokens_least=count))
    with pytest.raises(InvalidPlan, match=r"^slot_tokens_least: must be 0 or 1, got 2"):
        wire.plan_from_proto(worker_service_pb2.Plan(slot_tokens_least=2))


@pytest.mark.parametrize(("said", "most"), [(0, 1), (1, 1), (4, 4)])
def test_how_many_tokens_a_step_may_give_a_row(said: int, most: int) -> None:
    plan = wire.plan_from_proto(worker_service_pb2.Plan(slot_tokens_most=said))
    assert plan.slot_tokens_most == most


def test_slots_are_listed_once_with_the_count_of_their_tokens() -> None:
    timings = StepTimings(
        wait_us=0, forward_us=0, sample_us=0, tokens_computed=6, rows=3, drafted=3
    )
    outcome = StepOutcome(slots=(2, 5, 5, 5, 7), token_ids=(1, 2, 3, 4, 5))
    result = StepResult(plan_id=1, step=0, outcome=outcome, is_last=True, timings=timings)
    message = wire.result_to_proto(result, boot_id="b")
    assert message.slots == [2, 5, 7]
    assert message.token_counts == [1, 3, 1]
    assert message.token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("append", {"append_slots": [1], "append_blocks": [2]}),
        ("replace", {"replace_slots": [1], "replace_indices": [0], "replace_blocks": [2]}),
    ],
)
def test_the_first_layer_group_need_not_be_named(name: str, columns: dict[str, Any]) -> None:
    def read(groups: list[int]) -> Plan:
        fields: dict[str, Any] = columns | {f"{name}_groups": groups}
        message = worker_service_pb2.Plan(**fields)
        return wire.plan_from_proto(message)

    assert read([0]) == read([]) != read([1])
    said = f"{name}_slots, {name}_groups must be parallel, but have 1 and 2 items"
    with pytest.raises(InvalidPlan, match=said):
        read([0, 0])


tokens = st.lists(st.tuples(u32, u32), max_size=4)
logprobs = st.builds(
    lambda slot, logprob, top: RowLogprobs(
        slot=slot,
        logprob=logprob,
        top_token_ids=tuple(token for token, _ in top),
        top_logprobs=tuple(value for _, value in top),
    ),
    u32,
    floats,
    st.lists(st.tuples(u32, floats), max_size=3),
)
runs = st.builds(
    lambda slot, position, values, top: RowPromptLogprobs(
        slot=slot,
        position=position,
        logprobs=tuple(values),
        top_token_ids=(7,) * top * len(values),
        top_logprobs=(-1.5,) * top * len(values),
    ),
    u32,
    u32,
    st.lists(floats, max_size=3),
    st.integers(0, 2),
)
outcomes = st.builds(
    lambda sampled, logprobs, finished, errors, prompts: StepOutcome(
        slots=tuple(slot for slot, _ in sampled),
        token_ids=tuple(token for _, token in sampled),
        logprobs=tuple(logprobs),
        finished=tuple(finished),
        errors=tuple(errors),
        unsatisfiable=tuple(slot for slot, _ in errors if slot % 2),
        prompt_logprobs=tuple(prompts),
    ),
    tokens,
    st.lists(logprobs, max_size=2),
    st.lists(st.tuples(u32, st.sampled_from(FinishReason)), max_size=2),
    st.lists(st.tuples(u32, st.text(max_size=5)), max_size=2),
    st.lists(runs, max_size=2),
)


@given(outcomes, u64, u32, st.booleans())
def test_a_result_round_trips(outcome: StepOutcome, plan_id: int, step: int, last: bool) -> None:
    timings = StepTimings(
        wait_us=1, forward_us=2, sample_us=3, tokens_computed=4, rows=5, is_graph=last
    )
    result = StepResult(plan_id=plan_id, step=step, outcome=outcome, is_last=last, timings=timings)
    packed = wire.result_to_proto(result, boot_id="b").SerializeToString()
    message = worker_service_pb2.StepResult.FromString(packed)
    assert outcome_from_proto(message) == outcome
    assert (message.boot_id, message.plan_id, message.step) == ("b", plan_id, step)
    assert message.is_last is last
    assert message.timings == worker_service_pb2.StepTimings(
        wait_us=1, forward_us=2, sample_us=3, tokens_computed=4, rows=5, is_graph=last
    )


def test_every_field_of_the_description_is_sent() -> None:
    message = wire.description_to_proto(description(LIMITS))
    assert message.DESCRIPTOR is common_pb2.WorkerDescription.DESCRIPTOR
    assert len(message.ListFields()) == len(message.DESCRIPTOR.fields)


@pytest.mark.parametrize("count", [0, 7])
def test_host_blocks_are_announced(count: int) -> None:
    limits = replace(LIMITS, host_block_count=count)
    message = wire.description_to_proto(description(limits))
    assert message.capabilities.host_block_count == count
