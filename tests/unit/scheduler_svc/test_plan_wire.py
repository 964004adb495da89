"""Plans, requests, workers and endings between the core and the wire."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kaiten.v1 import common_pb2
from kaiten.v1.common_pb2 import (
    FinishReason,
    Leader,
    WorkerDescription,
)
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.worker_service_pb2 import Join as JoinMessage
from kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import InboxEntry
from scheduler_svc import wire
from scheduler_svc.core.outcome import Finished, Join, Plan, RequestOver
from scheduler_svc.core.types import Reason, WorkerSpec
from tests.support.wire_draws import NAMES, U32, U64, plans, sizes, tokens_of

LEADER = Leader(epoch=3, nonce=2**64 - 1)


def plan_from_proto(message: PlanMessage, said: Plan) -> Plan:
    """As a worker reads it; what only readers of the journal are told is taken from `said`."""
    return replace(
        said,
        plan_id=message.plan_id,
        lease_steps=message.lease_steps,
        leaves=tuple(message.leaves),
        joins=tuple(map(join_from_proto, message.joins)),
        appends=tuple(
            zip(
                message.append_slots,
                message.append_blocks,
                message.append_groups or [0] * len(message.append_slots),
                strict=True,
            )
        ),
        replacements=tuple(
            zip(
                message.replace_slots,
                message.replace_indices,
                message.replace_blocks,
                message.replace_groups or [0] * len(message.replace_slots),
                strict=True,
            )
        ),
        swaps=tuple(zip(message.swap_sources, message.swap_targets, strict=True)),
        copies=tuple(zip(message.copy_sources, message.copy_targets, strict=True)),
        chunks=tuple(zip(message.chunk_slots, message.chunk_tokens, strict=True)),
        checksum=message.membership_checksum,
    )


def join_from_proto(message: JoinMessage) -> Join:
    return Join(
        slot=message.slot,
        sequence_id=message.sequence_id,
        tokens=tuple(message.token_ids),
        num_prompt_tokens=message.prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_tables=tuple(
            (table.num_skipped_blocks, tuple(table.blocks)) for table in message.block_tables
        ),
        prompt_logprobs_from=message.prompt_logprobs_from,
    )


@given(plan=plans)
def test_a_plan_is_written_so_that_a_worker_reads_the_same(plan: Plan) -> None:
    samplings = [RowSampling(seed=index) for index in range(len(plan.joins))]
    message = wire.plan_to_proto(plan, LEADER, samplings, traceparent="00-t")
    message = PlanMessage.FromString(message.SerializeToString())
    assert plan_from_proto(message, plan) == plan
    assert message.leader == LEADER
    assert message.traceparent == "00-t"
    assert [join.sampling for join in message.joins] == samplings


@given(seed=U64, choice=st.integers(0, 127), max_tokens=U32)
def test_a_choice_differs_from_its_request_by_its_noise_only(
    seed: int, choice: int, max_tokens: int
) -> None:
    base = RowSampling(seed=seed, max_tokens=max_tokens, temperature=0.5, stop_token_ids=[2, 6])
    sampling = wire.sampling_of_choice(base, choice)
    assert sampling.choice == choice
    assert base.choice == 0, "the request's own is not written to"
    sampling.choice = 0
    assert sampling == base


@given(
    prompt=tokens_of(1),
    n=sizes(8),
    sequence_id=U64,
    max_tokens=sizes(),
    timeout_ms=st.integers(0, 10**9),
    priority=st.integers(-(2**31), 2**31 - 1),
    arrived_ms=st.integers(0, 2**42),
)
def test_a_request_keeps_what_the_core_decides_by(
    prompt: tuple[int, ...],
    n: int,
    sequence_id: int,
    max_tokens: int,
    timeout_ms: int,
    priority: int,
    arrived_ms: int,
) -> None:
    record = SubmitRecord(
        id="default:a",
        tenant="default",
        n=n,
        prompt_token_ids=prompt,
        sampling=RowSampling(max_tokens=max_tokens),
        timeout_ms=timeout_ms,
        priority=priority,
    )
    entry = InboxEntry(entry_id=f"{arrived_ms}-7", sequence_id=sequence_id, record=record)
    request = wire.request_from_proto(entry, record, arrived_ms * 1_000_000)
    assert (request.id, request.tenant, request.sequence_id, request.n) == (
        "default:a",
        "default",
        sequence_id,
        n,
    )
    assert (request.prompt, request.max_tokens, request.priority) == (prompt, max_tokens, priority)
    assert request.arrived_ns == arrived_ms * 1_000_000
    if timeout_ms:
        assert request.deadline_ns == (arrived_ms + timeout_ms) * 1_000_000
    else:
        assert request.deadline_ns is None
    assert request.outputs == ()


def test_a_resumed_request_brings_its_outputs() -> None:
    record = SubmitRecord(n=2, prompt_token_ids=[1], sampling=RowSampling(max_tokens=4))
    entry = InboxEntry(entry_id="5-0", sequence_id=9, record=record)
    assert wire.request_from_proto(entry, record, 7, ((1, 2), None)).outputs == ((1, 2), None)


def test_a_prompt_is_explained_from_where_it_was_only_if_that_is_wanted() -> None:
    wanting = RowSampling(max_tokens=4, prompt_logprobs=0)
    for sampling, right in ((wanting, (1, 3)), (RowSampling(max_tokens=4), (None, None))):
        record = SubmitRecord(n=1, prompt_token_ids=[1, 2, 3], sampling=sampling)
        entry = InboxEntry(entry_id="5-0", sequence_id=9, record=record)
        fresh = wire.request_from_proto(entry, record, 7)
        resumed = wire.request_from_proto(entry, record, 7, ((),), 3)
        assert (fresh.prompt_logprobs_from, resumed.prompt_logprobs_from) == right


def test_only_the_first_choice_explains_the_prompt() -> None:
    base = RowSampling(seed=5, prompt_logprobs=0)
    assert wire.sampling_of_choice(base, 0).HasField("prompt_logprobs")
    assert not wire.sampling_of_choice(base, 1).HasField("prompt_logprobs")


@given(
    st.fixed_dictionaries(
        {
            "fingerprint": NAMES,
            "block_size": sizes(256),
            "block_count": sizes(),
            "slots_max": sizes(1024),
            "vocab_size": sizes(),
            "context_tokens_max": sizes(),
        }
    )
)
def test_a_worker_is_taken_at_its_word(fields: dict[str, object]) -> None:
    fields |= {"step_tokens_max": 2048, "mixed_tokens_max": 1500}
    spec = wire.spec_from_proto(WorkerDescription(boot_id="b", **fields))  # type: ignore[arg-type]
    assert spec == WorkerSpec(**fields)  # type: ignore[arg-type]
    assert spec.windows == (None,)


def test_a_worker_says_which_layers_have_a_window() -> None:
    worker = WorkerDescription(block_size=1, block_count=1, slots_max=1, step_tokens_max=9)
    for window in (0, 512, 0):
        worker.capabilities.layer_groups.add(window_tokens=window)
    assert wire.spec_from_proto(worker).windows == (None, 512, None)


def test_a_worker_says_how_many_blocks_it_has_in_host_memory() -> None:
    worker = WorkerDescription(block_size=1, block_count=1, slots_max=1, step_tokens_max=9)
    worker.capabilities.host_block_count = 7
    spec = wire.spec_from_proto(worker)
    assert spec.host_block_count == wire.capabilities_to_proto(spec).host_block_count == 7


def test_a_worker_that_names_no_budget_for_mixed_steps_has_one_for_all() -> None:
    worker = WorkerDescription(block_size=1, block_count=1, slots_max=1, step_tokens_max=9)
    assert wire.spec_from_proto(worker).mixed_budget == 9


def test_every_reason_has_its_number_and_none_is_unspecified() -> None:
    assert set(wire.REASON_TO_PROTO) == set(Reason)
    numbers = set(FinishReason.values()) - {common_pb2.FINISH_REASON_UNSPECIFIED}
    assert set(wire.REASON_FROM_PROTO) == numbers


@given(sequence_id=U64, reason=st.sampled_from(Reason), output_tokens=U32, error=NAMES)
def test_an_ending_says_who_why_and_where(
    sequence_id: int, reason: Reason, output_tokens: int, error: str
) -> None:
    finished = Finished(
        sequence_id=sequence_id, reason=reason, num_output_tokens=output_tokens, error=error
    )
    message = wire.finished_to_proto(finished)
    # Who does not know the field reads an error.
    is_error = message.reason == common_pb2.FINISH_REASON_ERROR
    assert is_error or not (message.is_retryable or message.is_unsatisfiable)
    told = wire.REASON_FROM_PROTO[message.reason]
    told = Reason.UNSATISFIABLE if message.is_unsatisfiable else told
    read = Finished(
        sequence_id=message.sequence_id,
        reason=Reason.UNSERVED if message.is_retryable else told,
        num_output_tokens=message.output_tokens,
        error=message.error,
    )
    assert read == finished
    assert not message.HasField("done")


def test_done_is_in_tokens_and_microseconds() -> None:
    over = RequestOver(
        id="a",
        sequence_id=1,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        outputs=((1, 2),),
        endings=(),
        queue_ns=1_999,
        prefill_ns=2_000_000,
        decode_ns=3_000_999,
        num_preemptions=2,
    )
    done = wire.done_to_proto(over, output_tokens=7)
    assert (done.usage.prompt_tokens, done.usage.output_tokens) == (10, 7)
    assert done.usage.cached_tokens == 4
    timings = done.timings
    assert (timings.queue_us, timings.prefill_us, timings.decode_us) == (1, 2000, 3000)
    assert timings.preemptions == 2
