"""Commands to the journal's inputs and back: every command is written down here, once.

Not all of a command stands in its input. A `Submit` names the request, whose body is the inbox
entry, and how much of its output was committed; what `MakePlan` decided stands beside it, so that a
reader needs no replay to see it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from kaiten.v1.common_pb2 import (
    WHY_PASSED_OVER_UNSPECIFIED,
    PromptLogprobs,
    WorkerDescription,
)
from kaiten.v1.ledger_pb2 import (
    CancelRecord,
    CellHandover,
    ConfiguredInput,
    CoreInput,
    ExpireInput,
    PlanInput,
    ResultInput,
    StoreBehindInput,
    SubmitInput,
    TenantServed,
    ThrottledChange,
    WorkerChangedInput,
    WorkerDrainingInput,
    WorkerJoinedInput,
    WorkerLateInput,
    WorkerLostInput,
)
from kaiten.v1.ledger_pb2 import SequencePast as PastMessage
from kaiten.v1.worker_service_pb2 import (
    RowError,
    RowFinished,
    RowPromptLogprobs,
    StepTimings,
)
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from scheduler_svc import wire
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
from scheduler_svc.core.outcome import PassedOver, Plan
from scheduler_svc.core.types import (
    Config,
    Handover,
    Reason,
    Request,
    Rules,
    SequencePast,
    StepResult,
    WorkerSpec,
)
from scheduler_svc.decisions import whys_of
from scheduler_svc.timeline_track import QUEUE_STAGES, blocks_of

# How a replay finds the request that a Submit names.
RequestOf = Callable[[SubmitInput], Request]


def input_to_proto(command: Command, now_ns: int, record_tokens: Sequence[int] = ()) -> CoreInput:
    """A command as the journal has it: each token stands once in a record, whose are given."""
    if isinstance(command, StepDone):
        return CoreInput(now_ns=now_ns, result=_step_done(command.result, record_tokens))
    name, write = _WRITERS[type(command)]
    return CoreInput(now_ns=now_ns, **{name: write(command)})


def command_from_proto(
    item: CoreInput, request_of: RequestOf, record_tokens: Sequence[int] = ()
) -> Command:
    """`record_tokens`: of the record that the input stands in.

    ValueError for an input that only a later version knows.
    """
    name = item.WhichOneof("input")
    if name == "submit":
        return Submit(request=request_of(item.submit))
    if name == "result":
        return _step_done_from(item.result, record_tokens)
    if name not in _READERS:
        raise ValueError(f"the journal has an input this version does not know: {name}")
    return _READERS[name](getattr(item, name))


def describe_plan(
    message: PlanInput, plan: Plan, passed_over: Sequence[PassedOver], digest: int
) -> None:
    """Put beside a MakePlan what came of it."""
    message.plan_id = plan.plan_id
    message.lease_steps = plan.lease_steps
    message.leave_slots.extend(plan.leaves)
    message.admitted.extend(plan.admitted)
    message.join_slots.extend(join.slot for join in plan.joins)
    message.preempted.extend(plan.preempted)
    message.chunk_tokens = plan.chunk_tokens
    message.decode_rows = plan.decode_rows
    message.blocks_free = plan.blocks_free
    message.waiting = plan.waiting
    message.digest = digest
    for join in plan.joins:
        message.join_tokens.append(len(join.tokens))
        message.join_computed_tokens.append(join.num_computed_tokens)
        for num_skipped, blocks in join.block_tables:
            message.join_skipped_blocks.append(num_skipped)
            message.join_blocks.append(len(blocks))
    if plan.swaps:
        of_joins = (blocks_of(join, 1, plan.swaps) for join in plan.joins)
        message.join_swapped_in_blocks.extend(blocks.swapped_in for blocks in of_joins)
    for slot, count in plan.chunks:
        message.chunk_slots.append(slot)
        message.chunk_slot_tokens.append(count)
    if plan.preempted and any(whys := [*whys_of(plan, passed_over)]):
        message.preempted_whys.extend(
            wire.WHY_TO_PROTO[why] if why else WHY_PASSED_OVER_UNSPECIFIED for why in whys
        )
    for over in passed_over:
        if over.stage in QUEUE_STAGES:
            message.passed_over.append(over.sequence_id or 0)
            message.passed_over_whys.append(wire.WHY_TO_PROTO[over.why])


def throttled_change(before: frozenset[str], now: frozenset[str]) -> ThrottledChange:
    """From the tenants that were throttled to those that are."""
    return ThrottledChange(begun=sorted(now - before), over=sorted(before - now))


def cancel_from_proto(record: CancelRecord) -> Cancel:
    """An unset reason is a plain cancel; only a stop string cuts the output to a length."""
    reason = wire.REASON_FROM_PROTO.get(record.reason, Reason.CANCELLED)
    return Cancel(
        sequence_id=record.sequence_id,
        choice=record.choice if record.HasField("choice") else None,
        reason=reason,
        num_output_tokens=record.output_tokens if reason is Reason.STOP else None,
        error=record.error,
    )


def _submit(command: Submit) -> SubmitInput:
    request = command.request
    return SubmitInput(
        id=request.id,
        sequence_id=request.sequence_id,
        committed_tokens=[len(output or ()) for output in request.outputs],
        prompt_logprobs_from=request.prompt_logprobs_from or 0,
        arrived_ns=request.arrived_ns,
    )


def _cancel(command: Cancel) -> CancelRecord:
    return CancelRecord(
        sequence_id=command.sequence_id,
        choice=command.choice,
        reason=wire.REASON_TO_PROTO[command.reason],
        output_tokens=command.num_output_tokens or 0,
        error=command.error,
    )


def _said(values: Config | Rules | WorkerSpec | SequencePast) -> dict[str, Any]:
    """Field by field; what is None stays unset."""
    named = ((field.name, getattr(values, field.name)) for field in fields(values))
    return {name: value for name, value in named if value is not None}


def handover_to_proto(handover: Handover) -> CellHandover:
    """What one leader leaves to the next."""
    return CellHandover(
        sequences=[PastMessage(**_said(past)) for past in handover.sequences],
        tenants=[
            TenantServed(tenant=name, tokens_ahead=tokens) for name, tokens in handover.tenants
        ],
    )


def handed_over_from_proto(message: CellHandover) -> HandedOver:
    """What the leader before left."""
    names = [field.name for field in fields(SequencePast)]
    pasts = (SequencePast(**{n: getattr(past, n) for n in names}) for past in message.sequences)
    tenants = tuple((told.tenant, told.tokens_ahead) for told in message.tenants)
    return HandedOver(handover=Handover(sequences=tuple(pasts), tenants=tenants))


def configured_to_proto(command: Configured) -> ConfiguredInput:
    """Every knob, and the rules that are named."""
    said = _said(command.config) | _said(command.rules)
    said["tenant_weights"] = dict(command.config.tenant_weights)
    return ConfiguredInput(policy=command.policy, **said)


def _configured_from(message: ConfiguredInput) -> Configured:
    """What is not there is as by default: no value of a setting is 0."""
    values = {field.name: getattr(message, field.name) for field in fields(Config)}
    values["tenant_weights"] = tuple(sorted(message.tenant_weights.items()))
    rules = Rules(**{field.name: getattr(message, field.name) for field in fields(Rules)})
    config = Config(**{name: value for name, value in values.items() if value})
    return Configured(config=config, policy=message.policy, rules=rules)


def _worker_joined(command: WorkerJoined) -> WorkerJoinedInput:
    return WorkerJoinedInput(worker_id=command.worker_id, worker=described(command.spec))


def _worker_joined_from(message: WorkerJoinedInput) -> WorkerJoined:
    return WorkerJoined(worker_id=message.worker_id, spec=wire.spec_from_proto(message.worker))


def _worker_changed(command: WorkerChanged) -> WorkerChangedInput:
    return WorkerChangedInput(worker_id=command.worker_id, worker=described(command.spec))


def _worker_changed_from(message: WorkerChangedInput) -> WorkerChanged:
    return WorkerChanged(worker_id=message.worker_id, spec=wire.spec_from_proto(message.worker))


def described(spec: WorkerSpec) -> WorkerDescription:
    """Of a worker, what the core decides by."""
    told = _said(spec)
    for capability in ("slot_tokens_max", "features", "windows", "host_block_count"):
        del told[capability]
    return WorkerDescription(**told, capabilities=wire.capabilities_to_proto(spec))


def _worker_lost(command: WorkerLost) -> WorkerLostInput:
    lost = WorkerLostInput(worker_id=command.worker_id, reason=command.reason)
    if command.is_crash is not None:
        lost.is_crash = command.is_crash
    return lost


def _worker_lost_from(message: WorkerLostInput) -> WorkerLost:
    is_crash = message.is_crash if message.HasField("is_crash") else None
    return WorkerLost(worker_id=message.worker_id, is_crash=is_crash, reason=message.reason)


def _step_done(result: StepResult, record_tokens: Sequence[int]) -> ResultInput:
    """A result as the core sees it, without what only readers of the output want."""
    finished = result.finished.items()
    step = StepMessage(
        boot_id=result.worker_id,
        plan_id=result.plan_id,
        step=result.step,
        slots=result.slots,
        token_ids=() if result.tokens == tuple(record_tokens) else result.tokens,
        token_counts=result.token_counts,
        finished=[RowFinished(slot=s, reason=wire.REASON_TO_PROTO[why]) for s, why in finished],
        errors=[
            RowError(slot=s, message=error, is_unsatisfiable=why is Reason.UNSATISFIABLE)
            for s, (why, error) in result.errors.items()
        ],
        prompt_logprobs=[
            RowPromptLogprobs(slot=s, logprobs=_positions(run))
            for s, run in result.prompt_logprobs.items()
        ],
        is_last=result.is_last,
        timings=StepTimings(forward_us=result.step_us, is_graph=result.is_graph)
        if result.step_us
        else None,
    )
    return ResultInput(worker_id=result.worker_id, step=step)


def _positions(run: range) -> PromptLogprobs:
    return PromptLogprobs(position=run.start, token_count=len(run))


def _step_done_from(message: ResultInput, record_tokens: Sequence[int]) -> StepDone:
    result: StepResult = wire.step_from_proto(message.worker_id, message.step)
    if result.slots and not result.tokens:
        result = replace(result, tokens=tuple(record_tokens))
    return StepDone(result=result)


_WRITERS: Final[Mapping[type, tuple[str, Callable[[Any], Any]]]] = {
    Configured: ("configured", configured_to_proto),
    Submit: ("submit", _submit),
    Cancel: ("cancel", _cancel),
    HandedOver: ("handed_over", lambda command: handover_to_proto(command.handover)),
    Expire: ("expire", lambda command: ExpireInput()),
    WorkerJoined: ("worker_joined", _worker_joined),
    WorkerChanged: ("worker_changed", _worker_changed),
    WorkerDraining: (
        "worker_draining",
        lambda command: WorkerDrainingInput(worker_id=command.worker_id),
    ),
    WorkerLate: (
        "worker_late",
        lambda command: WorkerLateInput(worker_id=command.worker_id),
    ),
    WorkerLost: ("worker_lost", _worker_lost),
    StoreBehind: (
        "store_behind",
        lambda command: StoreBehindInput(is_behind=command.is_behind),
    ),
    MakePlan: ("plan", lambda command: PlanInput(worker_id=command.worker_id)),
}
_READERS: Final[Mapping[str | None, Callable[[Any], Command]]] = {
    "configured": _configured_from,
    "cancel": cancel_from_proto,
    "handed_over": handed_over_from_proto,
    "expire": lambda message: Expire(),
    "worker_joined": _worker_joined_from,
    "worker_changed": _worker_changed_from,
    "worker_draining": lambda message: WorkerDraining(worker_id=message.worker_id),
    "worker_late": lambda message: WorkerLate(worker_id=message.worker_id),
    "worker_lost": _worker_lost_from,
    "store_behind": lambda message: StoreBehind(is_behind=message.is_behind),
    "plan": lambda message: MakePlan(worker_id=message.worker_id),
}
