"""Protobuf to the worker's words and back, and nothing else.

`*_from_proto` is where a message's shape is checked; `plan_validation` says
whether a plan fits the batch.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from gpu_worker.batch.plans import (
    BlockTable,
    Description,
    FinishReason,
    InvalidPlan,
    Join,
    Leader,
    Plan,
    RowLogprobs,
    RowPromptLogprobs,
    RowSampling,
    StepResult,
    StepTimings,
)
from kaiten.v1 import common_pb2, worker_service_pb2

_REASONS: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_PLAIN_SAMPLING: Final = tuple(
    each.name
    for each in worker_service_pb2.RowSampling.DESCRIPTOR.fields
    if isinstance(each.default_value, int | float) and not each.has_presence
)
# Of the plans that are read here.
PLAN_VERSION: Final = 1
FEATURES: Final = (
    common_pb2.FEATURE_LOGPROBS,
    common_pb2.FEATURE_PROMPT_LOGPROBS,
    common_pb2.FEATURE_LOGITS_PROCESSORS,
)
# Of a worker that has what it takes.
GRAMMARS: Final = (common_pb2.FEATURE_STRUCTURED_OUTPUTS,)


def leader_from_proto(message: common_pb2.Leader) -> Leader:
    return Leader(epoch=message.epoch, nonce=message.nonce)


def plan_from_proto(message: worker_service_pb2.Plan) -> Plan:
    """Raise InvalidPlan naming the field whose shape is wrong."""
    if (least := message.slot_tokens_least) > 1:
        raise InvalidPlan(
            f"slot_tokens_least: must be 0 or 1, got {least}: one token of a row is certain"
        )
    return Plan(
        leader=leader_from_proto(message.leader),
        plan_id=message.plan_id,
        lease_steps=message.lease_steps,
        leaves=tuple(message.leaves),
        joins=tuple(map(_join_from_proto, message.joins)),
        appends=_appends(message),
        replacements=_replacements(message),
        swaps=_pairs("swap_sources, swap_targets", message.swap_sources, message.swap_targets),
        copies=_pairs("copy_sources, copy_targets", message.copy_sources, message.copy_targets),
        chunks=_pairs("chunk_slots, chunk_tokens", message.chunk_slots, message.chunk_tokens),
        slot_tokens_most=message.slot_tokens_most or 1,
        membership_checksum=message.membership_checksum,
    )


def _pairs(names: str, left: Sequence[int], right: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if len(left) != len(right):
        raise InvalidPlan(f"{names} must be parallel, but have {len(left)} and {len(right)} items")
    return tuple(zip(left, right, strict=True))


def _appends(message: worker_service_pb2.Plan) -> tuple[tuple[int, int, int], ...]:
    pairs = _pairs("append_slots, append_blocks", message.append_slots, message.append_blocks)
    groups = _groups("append_slots, append_groups", pairs, message.append_groups)
    return tuple((slot, block, group) for (slot, block), group in zip(pairs, groups, strict=True))


def _replacements(message: worker_service_pb2.Plan) -> tuple[tuple[int, int, int, int], ...]:
    at = _pairs("replace_slots, replace_indices", message.replace_slots, message.replace_indices)
    pairs = _pairs("replace_slots, replace_blocks", message.replace_slots, message.replace_blocks)
    groups = _groups("replace_slots, replace_groups", pairs, message.replace_groups)
    columns = zip(at, message.replace_blocks, groups, strict=True)
    return tuple((slot, index, block, group) for (slot, index), block, group in columns)


def _groups(names: str, changes: Sequence[object], groups: Sequence[int]) -> Sequence[int]:
    """One layer group for each change; none said is the first."""
    if groups and len(groups) != len(changes):
        raise InvalidPlan(
            f"{names} must be parallel, but have {len(changes)} and {len(groups)} items"
        )
    return groups or [0] * len(changes)


def _join_from_proto(message: worker_service_pb2.Join) -> Join:
    return Join(
        slot=message.slot,
        sequence_id=message.sequence_id,
        token_ids=tuple(message.token_ids),
        prompt_tokens=message.prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_tables=tuple(
            BlockTable(tuple(table.blocks), table.num_skipped_blocks)
            for table in message.block_tables
        ),
        sampling=_sampling_from_proto(message.sampling),
        prompt_logprobs_from=message.prompt_logprobs_from,
    )


def _sampling_from_proto(message: worker_service_pb2.RowSampling) -> RowSampling:
    """Fields of the same name; those that are no plain value are written otherwise here."""
    values = {name: getattr(message, name) for name in _PLAIN_SAMPLING}
    # 0 was written by whoever did not know the field.
    values["repetition_penalty"] = message.repetition_penalty or 1.0
    return RowSampling(
        **values,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple((each.token_id, each.bias) for each in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        grammar=message.grammar,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def result_to_proto(result: StepResult, *, boot_id: str) -> worker_service_pb2.StepResult:
    outcome = result.outcome
    slots, token_counts = _runs(outcome.slots)
    return worker_service_pb2.StepResult(
        boot_id=boot_id,
        plan_id=result.plan_id,
        step=result.step,
        slots=slots,
        token_ids=outcome.token_ids,
        token_counts=token_counts,
        logprobs=map(_logprobs_to_proto, outcome.logprobs),
        finished=[
            worker_service_pb2.RowFinished(slot=slot, reason=_REASONS[reason])
            for slot, reason in outcome.finished
        ],
        errors=[
            worker_service_pb2.RowError(
                slot=slot, message=text, is_unsatisfiable=slot in outcome.unsatisfiable
            )
            for slot, text in outcome.errors
        ],
        is_last=result.is_last,
        timings=_timings_to_proto(result.timings),
        prompt_logprobs=map(_prompt_logprobs_to_proto, outcome.prompt_logprobs),
    )


def _runs(slots: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Each slot once, and its number of tokens; no numbers if they are one each."""
    if len(set(slots)) == len(slots):
        return slots, ()
    runs = [(slot, len(list(same))) for slot, same in groupby(slots)]
    return [slot for slot, _ in runs], [count for _, count in runs]


def _logprobs_to_proto(row: RowLogprobs) -> worker_service_pb2.RowLogprobs:
    return worker_service_pb2.RowLogprobs(
        slot=row.slot,
        logprobs=common_pb2.TokenLogprobs(
            logprob=row.logprob, top_token_ids=row.top_token_ids, top_logprobs=row.top_logprobs
        ),
    )


def _prompt_logprobs_to_proto(row: RowPromptLogprobs) -> worker_service_pb2.RowPromptLogprobs:
    return worker_service_pb2.RowPromptLogprobs(
        slot=row.slot,
        logprobs=common_pb2.PromptLogprobs(
            position=row.position,
            token_count=len(row.logprobs),
            logprobs=row.logprobs,
            top_token_ids=row.top_token_ids,
            top_logprobs=row.top_logprobs,
        ),
    )


def _timings_to_proto(timings: StepTimings) -> worker_service_pb2.StepTimings:
    return worker_service_pb2.StepTimings(
        wait_us=timings.wait_us,
        forward_us=timings.forward_us,
        sample_us=timings.sample_us,
        tokens_computed=timings.tokens_computed,
        rows=timings.rows,
        is_graph=timings.is_graph,
    )


def description_to_proto(description: Description) -> common_pb2.WorkerDescription:
    return common_pb2.WorkerDescription(
        boot_id=description.boot_id,
        model=description.model,
        fingerprint=description.fingerprint,
        architecture=description.architecture,
        dtype=description.dtype,
        kv_dtype=description.kv_dtype,
        device=description.device,
        vocab_size=description.vocab_size,
        context_tokens_max=description.context_tokens_max,
        block_size=description.block_size,
        block_count=description.block_count,
        slots_max=description.slots_max,
        step_tokens_max=description.step_tokens_max,
        mixed_tokens_max=description.mixed_tokens_max,
        weights_digest=description.weights_digest,
        tokenizer_digest=description.tokenizer_digest,
        capabilities=common_pb2.Capabilities(
            plan_version=PLAN_VERSION,
            slot_tokens_max=description.slot_tokens_max,
            host_block_count=description.host_block_count,
            features=[*FEATURES, *GRAMMARS] if description.reads_grammars else FEATURES,
            layer_groups=[
                common_pb2.LayerGroup(
                    window_tokens=group.window_tokens or 0,
                    layer_count=group.layer_count,
                    blocks_max=group.blocks_max,
                )
                for group in description.layer_groups
            ],
        ),
    )
