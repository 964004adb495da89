"""Protos to core values and back: nothing is lost, nothing is invented, and lies are refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiten.v1 import common_pb2, worker_service_pb2
from kaiten.v1.common_pb2 import (
    FinishReason,
    Leader,
    PromptLogprobs,
    TokenBias,
    TokenLogprobs,
    TokenSequence,
    WorkerDescription,
)
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.worker_service_pb2 import Join as JoinMessage
from kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from kaiten.v1.worker_service_pb2 import RowLogprobs, RowSampling
from ledger import InboxEntry
from scheduler_svc import wire
from scheduler_svc.core.outcome import Finished, Join, Plan, RequestOver
from scheduler_svc.core.types import Feature, Reason, ResultRejected, StepResult, WorkerSpec

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SLOT = st.integers(0, 1023)
TOKEN = st.integers(0, 200_000)
NAMES = st.text(max_size=12)
ROW_REASON = st.sampled_from([Reason.STOP, Reason.LENGTH])
ROW_FAULT = st.sampled_from([Reason.ERROR, Reason.UNSATISFIABLE])

LEADER = Leader(epoch=3, nonce=2**64 - 1)


def sizes(maximum: int = 2**31) -> st.SearchStrategy[int]:
    return st.integers(1, maximum)


def pairs(
    left: st.SearchStrategy[int], right: st.SearchStrategy[int] = U32
) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    return st.lists(st.tuples(left, right), max_size=4).map(tuple)


def tokens_of(minimum: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(TOKEN, min_size=minimum, max_size=6).map(tuple)


joins = st.builds(
    Join,
    slot=SLOT,
    sequence_id=U64,
    tokens=tokens_of(1),
    num_prompt_tokens=U32,
    num_computed_tokens=U32,
    block_tables=st.lists(
        st.tuples(U32, st.lists(U32, max_size=4).map(tuple)), min_size=1, max_size=3
    ).map(tuple),
    prompt_logprobs_from=U32,
)
GROUP = st.sampled_from([0, 0, 1, 2])
plans = st.builds(
    Plan,
    worker_id=NAMES,
    plan_id=U64,
    lease_steps=sizes(64),
    leaves=st.lists(SLOT, max_size=4).map(tuple),
    joins=st.lists(joins, max_size=3).map(tuple),
    appends=st.lists(st.tuples(SLOT, U32, GROUP), max_size=4).map(tuple),
    replacements=st.lists(st.tuples(SLOT, U32, U32, GROUP), max_size=4).map(tuple),
    copies=pairs(U32),
    chunks=pairs(SLOT, sizes(65536)),
    checksum=U64,
    preempted=st.lists(U64, max_size=3).map(tuple),
    decode_rows=U32,
    blocks_free=U32,
    waiting=U32,
)


@st.composite
def steps(draw: st.DrawFn) -> StepResult:
    rows = draw(st.dictionaries(SLOT, TOKEN, max_size=8))
    counts = draw(st.just(()) | st.just(tuple(1 + slot % 3 for slot in rows)))
    return StepResult(
        worker_id=draw(NAMES),
        plan_id=draw(U64),
        step=draw(U32),
        slots=tuple(rows),
        tokens=tuple(
            chain.from_iterable(map(repeat, rows.values(), counts or repeat(1, len(rows))))
        ),
        token_counts=counts,
        finished=draw(st.dictionaries(st.sampled_from(sorted(rows) or [0]), ROW_REASON)),
        errors=draw(st.dictionaries(SLOT, st.tuples(ROW_FAULT, NAMES), max_size=3)),
        prompt_logprobs=draw(
            st.dictionaries(SLOT, st.builds(range, U32, U32).filter(len), max_size=3)
        ),
        is_last=draw(st.booleans()),
    )


def step_to_proto(step: StepResult) -> worker_service_pb2.StepResult:
    """As a worker writes it."""
    return worker_service_pb2.StepResult(
        boot_id=step.worker_id,
        plan_id=step.plan_id,
        step=step.step,
        slots=step.slots,
        token_ids=step.tokens,
        token_counts=step.token_counts,
        finished=[
            worker_service_pb2.RowFinished(slot=slot, reason=wire.REASON_TO_PROTO[reason])
            for slot, reason in step.finished.items()
        ],
        errors=[
            worker_service_pb2.RowError(
                slot=slot, message=text, is_unsatisfiable=why is Reason.UNSATISFIABLE
            )
            for slot, (why, text) in step.errors.items()
        ],
        prompt_logprobs=[
            worker_service_pb2.RowPromptLogprobs(slot=slot, logprobs=run_of(positions))
            for slot, positions in step.prompt_logprobs.items()
        ],
        is_last=step.is_last,
    )


def run_of(positions: range) -> PromptLogprobs:
    """As the journal keeps it: counted."""
    return PromptLogprobs(position=positions.start, token_count=len(positions))


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


# Steps


@given(step=steps())
def test_a_step_is_read_as_it_was_written(step: StepResult) -> None:
    assert wire.step_from_proto(step.worker_id, step_to_proto(step)) == step


def test_a_row_is_explained_once() -> None:
    row = worker_service_pb2.RowPromptLogprobs(slot=3, logprobs=run_of(range(1, 4)))
    message = worker_service_pb2.StepResult(prompt_logprobs=[row, row])
    with pytest.raises(ResultRejected, match="log-probabilities twice"):
        wire.step_from_proto("w", message)


NAN, INF = float("nan"), float("inf")


def told(slot: int = 3, own: float = -1.0, **tops: list[Any]) -> RowLogprobs:
    """Of a row that asked for one token beside its own."""
    beside: dict[str, Any] = {"top_token_ids": [5], "top_logprobs": [-1.0], **tops}
    return RowLogprobs(slot=slot, logprobs=TokenLogprobs(logprob=own, **beside))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([told()], ""),
        ([told(own=1e-6)], ""),
        ([told(top_logprobs=[-INF])], ""),
        # Nobody is there any more who would be told.
        ([told(), told(slot=9, own=NAN)], ""),
        ([], r"of slots \[\], expected of \[3\]"),
        ([told(), told()], r"of slots \[3, 3\], expected"),
        ([told(), told(slot=4)], r"of slots \[3, 4\], expected of \[3\]"),
        ([told(), told(slot=6)], r"of slots \[3, 6\], expected of \[3\]"),
        ([told(slot=4)], "expected"),
        ([told(own=NAN)], "nan is no log-probability"),
        ([told(own=INF)], "inf is no log-probability"),
        ([told(own=-INF)], "-inf is no log-probability"),
        ([told(own=3e38)], "is no log-probability"),
        ([told(top_logprobs=[INF])], "above 1"),
        ([told(top_logprobs=[])], "1 likeliest tokens with 0"),
        ([told(top_token_ids=[])], "0 likeliest tokens with 1"),
        ([told(top_token_ids=[5, 6], top_logprobs=[-1, -2])], "expected 1 at each of 1"),
        ([told(top_token_ids=[300])], r"not in \[0, 300\)"),
        ([told(top_token_ids=[2**32 - 1])], "not in"),
    ],
)
def test_each_row_has_the_log_probabilities_it_asked_for(
    rows: list[RowLogprobs], match: str
) -> None:
    """Slot 3 asked for one beside its own and slot 4 for none; 6 did not sample, 9 has left."""
    asked = {slot: RowSampling(logprobs=count) for slot, count in ((3, 1), (4, -1), (6, 1))}
    message = worker_service_pb2.StepResult(slots=[3, 4, 9], token_ids=[1, 1, 1], logprobs=rows)
    judge(lambda: wire.check_logprobs(message, asked, 300), match)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([told(), told(own=-2.0)], ""),
        ([told()], r"of slots \[3\], expected of \[3, 3\]"),
        ([told(), told(), told()], r"of slots \[3, 3, 3\], expected of \[3, 3\]"),
        ([told(), told(own=NAN)], "nan is no log-probability"),
    ],
)
def test_each_token_of_a_row_has_its_log_probabilities(rows: list[RowLogprobs], match: str) -> None:
    asked = {slot: RowSampling(logprobs=count) for slot, count in ((3, 1), (4, -1))}
    message = worker_service_pb2.StepResult(
        slots=[3, 4], token_ids=[1, 1, 1], token_counts=[2, 1], logprobs=rows
    )
    judge(lambda: wire.check_logprobs(message, asked, 300), match)


@pytest.mark.parametrize(
    ("sampling", "needs"),
    [
        (RowSampling(logprobs=-1), []),
        (RowSampling(logprobs=-1, repetition_penalty=1, top_k=3, stop_token_ids=[1]), []),
        (RowSampling(logprobs=0), [Feature.LOGPROBS]),
        (RowSampling(logprobs=-1, prompt_logprobs=0), [Feature.PROMPT_LOGPROBS]),
        (RowSampling(logprobs=-1, repetition_penalty=1.5), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, presence_penalty=-1), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, frequency_penalty=1), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, logit_bias=[TokenBias()]), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, allowed_token_ids=[0]), [Feature.LOGITS_PROCESSORS]),
        (
            RowSampling(logprobs=2, bad_words=[TokenSequence()]),
            [Feature.LOGPROBS, Feature.LOGITS_PROCESSORS],
        ),
    ],
)
def test_what_a_request_needs_follows_from_its_sampling(
    sampling: RowSampling, needs: list[Feature]
) -> None:
    assert wire.needs_of(sampling) == frozenset(needs)


def test_an_older_worker_can_do_nothing_else_and_a_later_feature_is_nothing_to_us() -> None:
    worker = WorkerDescription(block_size=1, block_count=1, slots_max=1, step_tokens_max=2)
    plain = wire.spec_from_proto(worker)
    assert (plain.features, plain.slot_tokens_max) == (frozenset(), 1)
    worker.capabilities.features.extend([common_pb2.FEATURE_LOGPROBS, 77])  # type: ignore[list-item]
    assert wire.spec_from_proto(worker).features == {Feature.LOGPROBS}


@pytest.mark.parametrize(
    ("count", "own", "tops", "beside", "match"),
    [
        (2, [-1, NAN], [5, 5], [-1, NAN], ""),
        (2, [-1], [5, 5], [-1, -1], "1 values for 2 prompt positions"),
        (2, [-1, INF], [5, 5], [-1, -1], "or one above 1"),
        (2, [-1, -1], [5, 5], [-1], "2 likeliest tokens with 1"),
        (2, [-1, -1], [], [], "expected 1 at each of 2 positions"),
        (2, [-1, -1], [5] * 4, [-1] * 4, "expected 1 at each of 2 positions"),
        (2, [-1, -1], [5, 300], [-1, -1], "not in"),
        (2, [-1, -1], [5, 5], [-1, INF], "above 1"),
        (0, [-1], [], [], "1 values for 0"),
        (2**32 - 1, [], [], [], "expected 1 at each of 4294967295"),
    ],
)
def test_explained_positions_come_with_their_values(
    count: int, own: list[float], tops: list[int], beside: list[float], match: str
) -> None:
    run = PromptLogprobs(
        position=1, token_count=count, logprobs=own, top_token_ids=tops, top_logprobs=beside
    )
    row = worker_service_pb2.RowPromptLogprobs(slot=3, logprobs=run)
    message = worker_service_pb2.StepResult(prompt_logprobs=[row])
    asked = {3: RowSampling(logprobs=-1, prompt_logprobs=1)}
    judge(lambda: wire.check_logprobs(message, asked, 300), match)
    wire.check_logprobs(message, {}, 300)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("wait_us", 86_400_000_000),
        ("forward_us", 86_400_000_000),
        ("sample_us", 86_400_000_000),
        ("tokens_computed", 64),
        ("rows", 8),
    ],
)
def test_a_step_computes_and_takes_what_a_step_can(field: str, most: int) -> None:
    message = worker_service_pb2.StepResult()
    for value, match in ((most, ""), (most + 1, f"timings.{field}: must be at most {most}, got")):
        setattr(message.timings, field, value)
        judge(partial(wire.check_values, message, rows_max=8, tokens_max=64), match)


def test_an_error_is_told_in_a_few_words() -> None:
    for count, match in ((4096, ""), (4097, "slot 2: its error has 4097 characters, 4096")):
        row = worker_service_pb2.RowError(slot=2, message="x" * count)
        message = worker_service_pb2.StepResult(errors=[row])
        judge(partial(wire.check_values, message, rows_max=8, tokens_max=64), match)


def judge(check: Callable[[], None], match: str) -> None:
    """It passes, or is refused with these words."""
    if match:
        with pytest.raises(ResultRejected, match=match):
            check()
    else:
        check()


def test_the_worker_of_a_step_is_who_we_dialled_whatever_it_says() -> None:
    message = worker_service_pb2.StepResult(boot_id="liar")
    assert wire.step_from_proto("w", message).worker_id == "w"


@pytest.mark.parametrize("reason", sorted({*FinishReason.values(), 77} - {*wire.ROW_REASONS}))
def test_a_row_ends_for_no_other_reason_than_stop_and_length(reason: int) -> None:
    message = worker_service_pb2.StepResult(slots=[4], token_ids=[1])
    message.finished.add(slot=4, reason=reason)
    with pytest.raises(ResultRejected, match=f"slot 4: reason {reason} is not STOP or LENGTH"):
        wire.step_from_proto("w", message)


def test_a_row_ends_or_fails_once() -> None:
    message = worker_service_pb2.StepResult(slots=[4], token_ids=[1])
    for _ in range(2):
        message.finished.add(slot=4, reason=common_pb2.FINISH_REASON_STOP)
    with pytest.raises(ResultRejected, match="a row ended or failed twice"):
        wire.step_from_proto("w", message)
    message.ClearField("finished")
    for text in ("one", "another"):
        message.errors.add(slot=4, message=text)
    with pytest.raises(ResultRejected, match="a row ended or failed twice"):
        wire.step_from_proto("w", message)


# Plans


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


# Requests


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


# Workers


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


def test_a_worker_that_names_no_budget_for_mixed_steps_has_one_for_all() -> None:
    worker = WorkerDescription(block_size=1, block_count=1, slots_max=1, step_tokens_max=9)
    assert wire.spec_from_proto(worker).mixed_budget == 9


# Endings


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
