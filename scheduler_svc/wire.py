"""Protos to core values and back. Nothing else here, and no proto goes deeper."""

from collections.abc import Iterable
from typing import Final, TypedDict

from ledger import InboxEntry
from protos.kaiten.v1.common_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE_EXCEEDED,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Leader,
    PromptLogprobs,
    WorkerDescription,
)
from protos.kaiten.v1.inference_service_pb2 import Done, Timings, Usage
from protos.kaiten.v1.ledger_pb2 import (
    CancelRecord,
    FullTenant,
    PlanInput,
    SequenceFinished,
    SubmitRecord,
)
from protos.kaiten.v1.worker_service_pb2 import Join as JoinMessage
from protos.kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from protos.kaiten.v1.worker_service_pb2 import RowSampling
from protos.kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from scheduler_svc.core.types import (
    Finished,
    Join,
    Plan,
    Reason,
    Request,
    RequestOver,
    ResultRejected,
    StepResult,
    WorkerSpec,
)
from scheduler_svc.core.waiting import Tenant

REASON_TO_PROTO: Final = {
    Reason.STOP: FINISH_REASON_STOP,
    Reason.LENGTH: FINISH_REASON_LENGTH,
    Reason.CANCELLED: FINISH_REASON_CANCELLED,
    Reason.DEADLINE_EXCEEDED: FINISH_REASON_DEADLINE_EXCEEDED,
    Reason.ERROR: FINISH_REASON_ERROR,
}
REASON_FROM_PROTO: Final = {number: reason for reason, number in REASON_TO_PROTO.items()}
# What a worker may say of a row by itself.
ROW_REASONS: Final = {FINISH_REASON_STOP: Reason.STOP, FINISH_REASON_LENGTH: Reason.LENGTH}


def entry_time_ns(entry_id: str) -> int:
    """When the store took an inbox entry in, on its own clock: stream ids start with it."""
    return int(entry_id.partition("-")[0]) * 1_000_000


def request_from_proto(
    entry: InboxEntry,
    record: SubmitRecord,
    outputs: tuple[tuple[int, ...] | None, ...] = (),
    explained: int = 1,
) -> Request:
    """What the core needs of an accepted request.

    Prompt positions before `explained` are committed, if they are wanted at all.
    """
    arrived_ns = entry_time_ns(entry.entry_id)
    return Request(
        id=record.id,
        serial=entry.serial,
        n=record.n,
        prompt=tuple(record.prompt_token_ids),
        max_tokens=record.sampling.max_tokens,
        arrived_ns=arrived_ns,
        deadline_ns=arrived_ns + record.timeout_ms * 1_000_000 if record.timeout_ms else None,
        priority=record.priority,
        tenant=record.tenant,
        tenant_tokens_max=record.tenant_tokens_max or None,
        outputs=outputs,
        explain_from=explained if record.sampling.HasField("prompt_logprobs") else None,
    )


def spec_from_proto(worker: WorkerDescription) -> WorkerSpec:
    """What the core needs of a worker."""
    return WorkerSpec(
        fingerprint=worker.fingerprint,
        block_size=worker.block_size,
        block_count=worker.block_count,
        slots_max=worker.slots_max,
        step_tokens_max=worker.step_tokens_max,
        mixed_tokens_max=worker.mixed_tokens_max or None,
        vocab_size=worker.vocab_size,
        context_tokens_max=worker.context_tokens_max,
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
    errors = {row.slot: row.message for row in message.errors}
    explained = {row.slot: _positions(row.logprobs) for row in message.prompt_logprobs}
    if len(finished) < len(message.finished) or len(errors) < len(message.errors):
        raise ResultRejected(f"plan {message.plan_id}: a row ended or failed twice")
    if len(explained) < len(message.prompt_logprobs):
        raise ResultRejected(f"plan {message.plan_id}: a row was explained twice")
    return StepResult(
        worker_id=worker_id,
        plan_id=message.plan_id,
        step=message.step,
        slots=tuple(message.slots),
        tokens=tuple(message.token_ids),
        finished=finished,
        errors=errors,
        explained=explained,
        is_last=message.is_last,
    )


def _positions(run: PromptLogprobs) -> range:
    return range(run.position, run.position + run.token_count)


def check_values(message: StepMessage) -> None:
    """Raise ResultRejected when explained positions do not come with their values."""
    for row in message.prompt_logprobs:
        run = row.logprobs
        tops = len(run.top_token_ids)
        if (
            len(run.logprobs) != run.token_count
            or tops != len(run.top_logprobs)
            or tops % max(1, run.token_count)
        ):
            raise ResultRejected(
                f"slot {row.slot}: {run.token_count} prompt positions with {len(run.logprobs)} "
                f"log-probabilities, {tops} tokens and {len(run.top_logprobs)} log-probabilities "
                "beside them"
            )


def plan_to_proto(
    plan: Plan, leader: Leader, samplings: Iterable[RowSampling], traceparent: str = ""
) -> PlanMessage:
    """`samplings` is parallel to the plan's joins."""
    return PlanMessage(
        leader=leader,
        plan_id=plan.plan_id,
        lease_steps=plan.lease_steps,
        leaves=plan.leaves,
        joins=map(join_to_proto, plan.joins, samplings),
        append_slots=[slot for slot, _ in plan.appends],
        append_blocks=[block for _, block in plan.appends],
        copy_sources=[source for source, _ in plan.copies],
        copy_targets=[target for _, target in plan.copies],
        chunk_slots=[slot for slot, _ in plan.chunks],
        chunk_tokens=[count for _, count in plan.chunks],
        membership_checksum=plan.checksum,
        traceparent=traceparent,
    )


def join_to_proto(join: Join, sampling: RowSampling) -> JoinMessage:
    """A member with its own sampling."""
    return JoinMessage(
        slot=join.slot,
        serial=join.serial,
        token_ids=join.tokens,
        prompt_tokens=join.prompt_tokens,
        tokens_done=join.tokens_done,
        blocks=join.blocks,
        sampling=sampling,
        explain_from=join.explain_from,
    )


def plan_input_to_proto(plan: Plan, digest: int) -> PlanInput:
    """A plan as the journal tells it."""
    return PlanInput(
        worker_id=plan.worker_id,
        plan_id=plan.plan_id,
        lease_steps=plan.lease_steps,
        leave_slots=plan.leaves,
        admitted=plan.admitted,
        join_slots=[join.slot for join in plan.joins],
        preempted=plan.preempted,
        chunk_tokens=plan.chunk_tokens,
        decode_rows=plan.decode_rows,
        blocks_free=plan.blocks_free,
        waiting=plan.waiting,
        digest=digest,
    )


def full_to_proto(tenant: Tenant) -> FullTenant:
    """A tenant that is full, as gateways tell its clients."""
    return FullTenant(
        tenant=tenant.name,
        tokens_running=tenant.tokens_running,
        tokens_max=tenant.tokens_max,
        tokens_next=tenant.line[0][1].tokens_max,
    )


def sampling_of_choice(base: RowSampling, choice: int) -> RowSampling:
    """The request's sampling with the choice's own noise; only the first explains the prompt."""
    sampling = RowSampling()
    sampling.CopyFrom(base)
    sampling.choice = choice
    if choice > 0:
        sampling.ClearField("prompt_logprobs")
    return sampling


def finished_to_proto(finished: Finished) -> SequenceFinished:
    """The terminal event of one choice."""
    return SequenceFinished(
        serial=finished.serial,
        reason=REASON_TO_PROTO[finished.reason],
        output_tokens=finished.output_tokens,
        error=finished.error,
    )


def done_to_proto(over: RequestOver, output_tokens: int) -> Done:
    """The end of a request. `output_tokens` also counts choices that ended under another leader."""
    return Done(
        usage=Usage(
            prompt_tokens=over.prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=over.cached_tokens,
        ),
        timings=Timings(
            queue_us=over.queue_ns // 1000,
            prefill_us=over.prefill_ns // 1000,
            decode_us=over.decode_ns // 1000,
            preemptions=over.preemptions,
        ),
    )


class Cut(TypedDict):
    """How `Scheduler.cancel` is to end a request."""

    choice: int | None
    reason: Reason
    output_tokens: int | None
    error: str


def cut_from_proto(record: CancelRecord) -> Cut:
    """An unset reason is a plain cancel; only a stop string cuts the output to a length."""
    reason = REASON_FROM_PROTO.get(record.reason, Reason.CANCELLED)
    return Cut(
        choice=record.choice if record.HasField("choice") else None,
        reason=reason,
        output_tokens=record.output_tokens if reason is Reason.STOP else None,
        error=record.error,
    )
