"""The worker's own device on a model that is a table: the logits after a token are a row of it.

    outputs = run(TableDevice(table), limits(table, slots=8), [(prompt, sampling(...)), ...])

Everything but the decoder is real: rows, edits, sampler, log-probabilities.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import RowSampling
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import AheadRunner, ModelRunner
from gpu_worker.model.decoder import Decoder, StepTensors
from gpu_worker.runner.eager_runner import EagerRunner
from tests.support.mini_scheduler import MiniScheduler

BLOCK_SIZE = 16


class _Table:
    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.vocab_size = len(table)

    def forward(self, step: StepTensors) -> Tensor:
        return (
            step.token_ids
            if step.logits_indices is None
            else step.token_ids[step.logits_indices[0]]
        )

    def logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        return self._table[states[tokens]]


def table_device(table: Tensor) -> EagerRunner:
    """`table` is [vocab, vocab] float32."""
    return EagerRunner(cast(Decoder, _Table(table)), torch.zeros(1))


def limits(*, vocab_size: int, slots: int, context_tokens: int = 64) -> RowLimits:
    blocks_per_row = -(-context_tokens // BLOCK_SIZE)
    return RowLimits(
        slots=slots,
        context_tokens=context_tokens,
        step_tokens=4096,
        block_size=BLOCK_SIZE,
        block_count=slots * blocks_per_row,
        vocab_size=vocab_size,
    )


def run(
    device: ModelRunner | AheadRunner,
    row_limits: RowLimits,
    asked: Iterable[tuple[Sequence[int], RowSampling]],
    *,
    lease_steps: int = 1,
) -> MiniScheduler:
    """Everything to its end; rows join as others leave."""
    scheduler = MiniScheduler(row_limits, lease_steps=lease_steps)
    for prompt, params in asked:
        scheduler.submit(prompt, params)
    return drive(device, scheduler)


def drive(device: ModelRunner | AheadRunner, scheduler: MiniScheduler) -> MiniScheduler:
    """What is submitted, to its end."""
    assert not isinstance(device, AheadRunner)
    rows = Rows(scheduler.limits)
    while (plan := scheduler.next_plan()) is not None:
        counts = rows.apply(plan)
        for step in range(plan.lease_steps):
            inputs = rows.step_inputs(counts)
            scheduler.on_outcome(plan, step, rows.advance(inputs, device.execute(inputs)))
            counts = rows.steady_counts()
            if not counts.any():
                break
    return scheduler
