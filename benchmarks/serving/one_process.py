"""The scheduler's core beside a worker in one process: each one's words in the other's, and no
message between them. All sequences are greedy and of a forced length."""

from collections.abc import Callable
from typing import Final

from gpu_worker.batch import plans
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, Join, Leader, RowSampling, StepOutcome
from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.types import Reason, StepResult, WorkerSpec

WORKER: Final = "worker"
LEADER: Final = Leader(epoch=1, nonce=7)


def spec_of(limits: RowLimits) -> WorkerSpec:
    """What the core must know of a worker."""
    return WorkerSpec(
        fingerprint=WORKER,
        block_size=limits.block_size,
        block_count=limits.block_count,
        slots_max=limits.slots,
        step_tokens_max=limits.step_tokens,
        vocab_size=limits.vocab_size,
        context_tokens_max=limits.context_tokens,
    )


def greedy(max_tokens: int) -> RowSampling:
    """No stop token."""
    return RowSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        choice=0,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_token_ids=(),
        logprobs=-1,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        allowed_token_ids=(),
        bad_words=(),
    )


def to_worker(plan: Plan, output_of: Callable[[int], int]) -> plans.Plan:
    """The core's plan for a worker; `output_of(sequence id)` is how many tokens it is to make."""
    return plans.Plan(
        leader=LEADER,
        plan_id=plan.plan_id,
        lease_steps=plan.lease_steps,
        leaves=plan.leaves,
        joins=tuple(
            Join(
                slot=join.slot,
                sequence_id=join.sequence_id,
                token_ids=join.tokens,
                prompt_tokens=join.num_prompt_tokens,
                num_computed_tokens=join.num_computed_tokens,
                block_tables=tuple(BlockTable(blocks, left) for left, blocks in join.block_tables),
                sampling=greedy(output_of(join.sequence_id)),
                prompt_logprobs_from=join.prompt_logprobs_from,
            )
            for join in plan.joins
        ),
        appends=plan.appends,
        replacements=plan.replacements,
        swaps=plan.swaps,
        copies=plan.copies,
        chunks=plan.chunks,
        membership_checksum=plan.checksum,
    )


def to_core(plan_id: int, step: int, outcome: StepOutcome, *, is_last: bool) -> StepResult:
    """A step of a worker's for the core."""
    return StepResult(
        worker_id=WORKER,
        plan_id=plan_id,
        step=step,
        slots=outcome.slots,
        tokens=outcome.token_ids,
        finished={slot: Reason(reason.value) for slot, reason in outcome.finished},
        errors={slot: (Reason.ERROR, why) for slot, why in outcome.errors},
        is_last=is_last,
    )
