"""Protos to core values and back. Nothing else here, and no proto goes deeper."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Final, cast

from kaiten.v1.common_pb2 import (
    FEATURE_LOGITS_PROCESSORS,
    FEATURE_LOGPROBS,
    FEATURE_PROMPT_LOGPROBS,
    FEATURE_STRUCTURED_OUTPUTS,
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE_EXCEEDED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Capabilities,
    LayerGroup,
    Leader,
    PromptLogprobs,
    TokenLogprobs,
    WhyPassedOver,
    WorkerDescription,
)
from kaiten.v1.inference_service_pb2 import Done, Timings, Usage
from kaiten.v1.ledger_pb2 import (
    ClockStep,
    FullTenant,
    SequenceFinished,
    SubmitRecord,
)
from kaiten.v1.worker_service_pb2 import BlockTable as BlockTableMessage
from kaiten.v1.worker_service_pb2 import Join as JoinMessage
from kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from kaiten.v1.worker_service_pb2 import RowSampling
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import InboxEntry
from scheduler_svc.core.outcome import Finished, Join, Plan, RequestOver, Why
from scheduler_svc.core.requests import Tenant
from scheduler_svc.core.types import (
    Feature,
    Reason,
    Request,
    ResultRejected,
    SlotIndex,
    StepResult,
    WorkerSpec,
)
from scheduler_svc.store_clock import CLOCK_STEP_NS

REASON_TO_PROTO: Final = {
    Reason.STOP: FINISH_REASON_STOP,
    Reason.LENGTH: FINISH_REASON_LENGTH,
    Reason.CANCELLED: FINISH_REASON_CANCELLED,
    Reason.DEADLINE_EXCEEDED: FINISH_REASON_DEADLINE_EXCEEDED,
    Reason.UNSERVED: FINISH_REASON_ERROR,
    Reason.UNSATISFIABLE: FINISH_REASON_ERROR,
    # The last: what FINISH_REASON_ERROR is read as.
    Reason.ERROR: FINISH_REASON_ERROR,
}
REASON_FROM_PROTO: Final = {number: reason for reason, number in REASON_TO_PROTO.items()}
FEATURE_TO_PROTO: Final = {
    Feature.LOGPROBS: FEATURE_LOGPROBS,
    Feature.PROMPT_LOGPROBS: FEATURE_PROMPT_LOGPROBS,
    Feature.LOGITS_PROCESSORS: FEATURE_LOGITS_PROCESSORS,
    Feature.STRUCTURED_OUTPUTS: FEATURE_STRUCTURED_OUTPUTS,
}
WHY_TO_PROTO: Final = {
    why: cast("WhyPassedOver", WhyPassedOver.Value(f"WHY_PASSED_OVER_{why.name}")) for why in Why
}
WHY_FROM_PROTO: Final = {number: why for why, number in WHY_TO_PROTO.items()}
# Of the plans that are written here; a worker says which it reads.
PLAN_VERSION: Final = 1
# What a worker may say of a row by itself.
ROW_REASONS: Final = {FINISH_REASON_STOP: Reason.STOP, FINISH_REASON_LENGTH: Reason.LENGTH}


# A day: no step takes longer, and spans of it fit wherever they are written.
STEP_US_MAX: Final = 86_400_000_000
ERROR_CHARS_MAX: Final = 4096
# At most 0, but for rounding.
LOGPROB_MAX: Final = 1.0
NO_STEP: Final = ClockStep()


def entry_time_ns(entry_id: str) -> int:
    """When the store took an inbox entry in, on its own clock: stream ids start with it."""
    return int(entry_id.partition("-")[0]) * 1_000_000


def arrived_ns(entry: InboxEntry, now_ns: int, step: ClockStep = NO_STEP) -> int:
    """When the store took an entry in, on the leader's clock.

    That began as the store's; if the store's was set since then, by the difference between them.
    `step`: of an entry from before this leader, if the store's was set under the one before.
    Ids of entries never go back: behind the newest one, they say nothing of the time.
    """
    taken_ns = entry_time_ns(entry.entry_id)
    if not entry.read_ns:
        return min(now_ns, taken_ns + (step.by_ns if taken_ns <= step.until_unix_ns else 0))
    ahead_ns = entry.read_ns - now_ns
    return min(now_ns, taken_ns - (ahead_ns if abs(ahead_ns) >= CLOCK_STEP_NS else 0))


def request_from_proto(
    entry: InboxEntry,
    record: SubmitRecord,
    arrived_ns: int,
    outputs: tuple[tuple[int, ...] | None, ...] = (),
    prompt_logprobs_from: int = 1,
) -> Request:
    """What the core needs of an accepted request.

    Prompt positions before `prompt_logprobs_from` are committed, if they are wanted at all.
    """
    return Request(
        id=record.id,
        sequence_id=entry.sequence_id,
        n=record.n,
        prompt=tuple(record.prompt_token_ids),
        max_tokens=record.sampling.max_tokens,
        arrived_ns=arrived_ns,
        deadline_ns=arrived_ns + record.timeout_ms * 1_000_000 if record.timeout_ms else None,
        priority=record.priority,
        tenant=record.tenant,
        tenant_tokens_max=record.tenant_tokens_max or None,
        needs=needs_of(record.sampling),
        outputs=outputs,
        prompt_logprobs_from=prompt_logprobs_from
        if record.sampling.HasField("prompt_logprobs")
        else None,
        worker_wait_ns=record.worker_wait_ms * 1_000_000 if record.worker_wait_ms else None,
    )


def needs_of(sampling: RowSampling) -> frozenset[Feature]:
    """What a worker must be able to do to sample like this."""
    rules = (
        # 0 was written by whoever did not know the field.
        sampling.repetition_penalty not in (0, 1),
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logit_bias,
        sampling.allowed_token_ids,
        sampling.bad_words,
    )
    wanted = {
        Feature.LOGPROBS: sampling.logprobs >= 0,
        Feature.PROMPT_LOGPROBS: sampling.HasField("prompt_logprobs"),
        Feature.LOGITS_PROCESSORS: any(rules),
        Feature.STRUCTURED_OUTPUTS: bool(sampling.grammar),
    }
    return frozenset(feature for feature, is_wanted in wanted.items() if is_wanted)


def spec_from_proto(worker: WorkerDescription) -> WorkerSpec:
    """What the core needs of a worker. A feature of a later version is nothing to it."""
    told = worker.capabilities
    return WorkerSpec(
        fingerprint=worker.fingerprint,
        block_size=worker.block_size,
        block_count=worker.block_count,
        slots_max=worker.slots_max,
        step_tokens_max=worker.step_tokens_max,
        mixed_tokens_max=worker.mixed_tokens_max or None,
        vocab_size=worker.vocab_size,
        context_tokens_max=worker.context_tokens_max or None,
        slot_tokens_max=told.slot_tokens_max or 1,
        features=frozenset(each for each, n in FEATURE_TO_PROTO.items() if n in told.features),
        windows=tuple(each.window_tokens or None for each in told.layer_groups) or (None,),
        host_block_count=told.host_block_count,
    )


def capabilities_to_proto(spec: WorkerSpec) -> Capabilities:
    """As `spec_from_proto` reads them."""
    return Capabilities(
        slot_tokens_max=spec.slot_tokens_max,
        features=[n for each, n in FEATURE_TO_PROTO.items() if each in spec.features],
        layer_groups=[LayerGroup(window_tokens=window or 0) for window in spec.windows],
        host_block_count=spec.host_block_count,
    )


def step_from_proto(worker_id: str, message: StepMessage) -> StepResult:
    """Raise ResultRejected when a row's end is not one a worker may give, or is given twice.

    The values of `prompt_logprobs` are not looked at: the journal has them no more.
    """
    finished = {}
    for row in message.finished:
        if row.reason not in ROW_REASONS:
            raise ResultRejected(f"slot {row.slot}: reason {row.reason} is not STOP or LENGTH")
        finished[row.slot] = ROW_REASONS[row.reason]
    errors = {
        row.slot: (Reason.UNSATISFIABLE if row.is_unsatisfiable else Reason.ERROR, row.message)
        for row in message.errors
    }
    prompt_logprobs = {row.slot: _positions(row.logprobs) for row in message.prompt_logprobs}
    if len(finished) < len(message.finished) or len(errors) < len(message.errors):
        raise ResultRejected(f"plan {message.plan_id}: a row ended or failed twice")
    if len(prompt_logprobs) < len(message.prompt_logprobs):
        raise ResultRejected(f"plan {message.plan_id}: a row has prompt log-probabilities twice")
    return StepResult(
        worker_id=worker_id,
        plan_id=message.plan_id,
        step=message.step,
        slots=tuple(message.slots),
        tokens=tuple(message.token_ids),
        token_counts=tuple(message.token_counts),
        finished=finished,
        errors=errors,
        step_us=message.timings.forward_us + message.timings.sample_us,
        is_graph=message.timings.is_graph,
        prompt_logprobs=prompt_logprobs,
        is_last=message.is_last,
    )


def _positions(run: PromptLogprobs) -> range:
    return range(run.position, run.position + run.token_count)


def check_values(message: StepMessage, *, rows_max: int, tokens_max: int) -> None:
    """Raise ResultRejected for figures and texts that no step of this worker can have.

    Nothing is decided by them, but they are stored, counted and traced.
    """
    timings = message.timings
    for field, most in (
        ("wait_us", STEP_US_MAX),
        ("forward_us", STEP_US_MAX),
        ("sample_us", STEP_US_MAX),
        ("tokens_computed", tokens_max),
        ("rows", rows_max),
    ):
        if (value := getattr(timings, field)) > most:
            raise ResultRejected(f"timings.{field}: must be at most {most}, got {value}")
    for row in message.errors:
        if len(row.message) > ERROR_CHARS_MAX:
            raise ResultRejected(
                f"slot {row.slot}: its error has {len(row.message)} characters, "
                f"{ERROR_CHARS_MAX} are allowed"
            )


def check_logprobs(
    message: StepMessage, asked: Mapping[SlotIndex, RowSampling], vocab_size: int
) -> None:
    """Raise ResultRejected unless each row comes with the log-probabilities it asked for, no other:
    one run per token.

    `asked`: by slot, of every row that is still there; what is said of others is not used.
    """
    counts = message.token_counts or repeat(1)
    told = Counter(row.slot for row in message.logprobs if row.slot in asked)
    due = {
        slot: count
        for slot, count in zip(message.slots, counts, strict=False)
        if slot in asked and asked[slot].logprobs >= 0
    }
    if told != due:
        raise ResultRejected(
            f"log-probabilities of slots {sorted(told.elements())}, expected of "
            f"{sorted(Counter(due).elements())}"
        )
    for said in message.logprobs:
        if said.slot in due:
            _check_tops(said.slot, said.logprobs, 1, asked[said.slot].logprobs, vocab_size)
            logprob = said.logprobs.logprob
            if not (math.isfinite(logprob) and logprob <= LOGPROB_MAX):
                raise ResultRejected(f"slot {said.slot}: {logprob} is no log-probability")
    for row in message.prompt_logprobs:
        if (sampling := asked.get(row.slot)) is not None:
            told_of, count = row.logprobs, row.logprobs.token_count
            _check_tops(row.slot, told_of, count, sampling.prompt_logprobs, vocab_size)
            # NaN is no lie: logits of a prompt may overflow. Its row fails where it samples.
            if len(told_of.logprobs) != count or any(v > LOGPROB_MAX for v in told_of.logprobs):
                raise ResultRejected(
                    f"slot {row.slot}: {len(told_of.logprobs)} values for {count} prompt "
                    f"positions, or one above {LOGPROB_MAX}"
                )


def _check_tops(
    slot: SlotIndex, run: TokenLogprobs | PromptLogprobs, count: int, tops: int, vocab_size: int
) -> None:
    """The likeliest tokens beside `count` positions: `tops` of each, and tokens indeed."""
    token_ids, values = run.top_token_ids, run.top_logprobs
    if not len(token_ids) == len(values) == count * tops:
        raise ResultRejected(
            f"slot {slot}: {len(token_ids)} likeliest tokens with {len(values)} log-probabilities, "
            f"expected {tops} at each of {count} positions"
        )
    if max(token_ids, default=0) >= vocab_size or any(value > LOGPROB_MAX for value in values):
        raise ResultRejected(
            f"slot {slot}: a likeliest token is not in [0, {vocab_size}), or its log-probability "
            f"is above {LOGPROB_MAX}"
        )


def plan_to_proto(
    plan: Plan,
    leader: Leader,
    samplings: Iterable[RowSampling],
    traceparent: str = "",
    *,
    slot_tokens_max: int = 1,
) -> PlanMessage:
    """`samplings` is parallel to the plan's joins; `slot_tokens_max` is what blocks were granted
    for.
    """
    return PlanMessage(
        slot_tokens_least=1 if slot_tokens_max > 1 else 0,
        slot_tokens_most=slot_tokens_max if slot_tokens_max > 1 else 0,
        leader=leader,
        plan_id=plan.plan_id,
        lease_steps=plan.lease_steps,
        leaves=plan.leaves,
        joins=map(join_to_proto, plan.joins, samplings),
        append_slots=[slot for slot, _, _ in plan.appends],
        append_blocks=[block for _, block, _ in plan.appends],
        append_groups=_groups([group for _, _, group in plan.appends]),
        replace_slots=[slot for slot, _, _, _ in plan.replacements],
        replace_indices=[index for _, index, _, _ in plan.replacements],
        replace_blocks=[block for _, _, block, _ in plan.replacements],
        replace_groups=_groups([group for _, _, _, group in plan.replacements]),
        swap_sources=[source for source, _ in plan.swaps],
        swap_targets=[target for _, target in plan.swaps],
        copy_sources=[source for source, _ in plan.copies],
        copy_targets=[target for _, target in plan.copies],
        chunk_slots=[slot for slot, _ in plan.chunks],
        chunk_tokens=[count for _, count in plan.chunks],
        membership_checksum=plan.checksum,
        traceparent=traceparent,
    )


def _groups(groups: list[int]) -> list[int]:
    """Nothing, where all are of the first."""
    return groups if any(groups) else []


def join_to_proto(join: Join, sampling: RowSampling) -> JoinMessage:
    """A member with its own sampling."""
    return JoinMessage(
        slot=join.slot,
        sequence_id=join.sequence_id,
        token_ids=join.tokens,
        prompt_tokens=join.num_prompt_tokens,
        num_computed_tokens=join.num_computed_tokens,
        block_tables=[
            BlockTableMessage(num_skipped_blocks=count, blocks=blocks)
            for count, blocks in join.block_tables
        ],
        sampling=sampling,
        prompt_logprobs_from=join.prompt_logprobs_from,
    )


def full_to_proto(tenant: Tenant) -> FullTenant:
    """A tenant that is full, as gateways tell its clients."""
    return FullTenant(
        tenant=tenant.name,
        tokens_running=tenant.tokens_running,
        tokens_max=tenant.tokens_max,
        tokens_next=tenant.queue[0][1].tokens_max,
    )


def sampling_of_choice(base: RowSampling, choice: int) -> RowSampling:
    """The request's, with the choice's own noise; prompt logprobs are the first one's only."""
    sampling = RowSampling()
    sampling.CopyFrom(base)
    sampling.choice = choice
    if choice > 0:
        sampling.ClearField("prompt_logprobs")
    return sampling


def finished_to_proto(finished: Finished) -> SequenceFinished:
    """The terminal event of one choice."""
    return SequenceFinished(
        sequence_id=finished.sequence_id,
        reason=REASON_TO_PROTO[finished.reason],
        output_tokens=finished.num_output_tokens,
        error=finished.error,
        is_retryable=finished.reason is Reason.UNSERVED,
        is_unsatisfiable=finished.reason is Reason.UNSATISFIABLE,
    )


def finished_from_proto(ending: SequenceFinished) -> Finished:
    """As it was before `finished_to_proto`; a reason of a later version is an error."""
    reason = REASON_FROM_PROTO.get(ending.reason, Reason.ERROR)
    if ending.is_retryable:
        reason = Reason.UNSERVED
    elif ending.is_unsatisfiable:
        reason = Reason.UNSATISFIABLE
    return Finished(
        sequence_id=ending.sequence_id,
        reason=reason,
        num_output_tokens=ending.output_tokens,
        error=ending.error,
    )


def done_to_proto(over: RequestOver, output_tokens: int) -> Done:
    """The end of a request. `output_tokens` also counts choices that ended under another leader."""
    return Done(
        usage=Usage(
            prompt_tokens=over.num_prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=over.num_cached_tokens,
        ),
        timings=Timings(
            queue_us=over.queue_ns // 1000,
            prefill_us=over.prefill_ns // 1000,
            decode_us=over.decode_ns // 1000,
            preemptions=over.num_preemptions,
        ),
    )
