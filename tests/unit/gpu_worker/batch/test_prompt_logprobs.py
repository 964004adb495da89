"""Which prompt logprobs a chunk brings, and how they are told."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, Join
from gpu_worker.batch.prompt_logprobs import PromptLogprobsRequest
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import PromptTokenLogprobs, StepInputs, StepSamples
from tests.support.mini_scheduler import checksum, plan, sampling

LIMITS = RowLimits(
    slots=4, context_tokens=32, step_tokens=24, block_size=4, block_count=32, vocab_size=100
)


@pytest.mark.parametrize(
    ("prompt_logprobs_from", "done", "count", "span"),
    [
        (1, 0, 1, range(1, 2)),
        (1, 0, 9, range(1, 10)),
        (1, 0, 10, range(1, 10)),
        (1, 0, 12, range(1, 10)),
        (1, 4, 3, range(5, 8)),
        (6, 4, 3, range(6, 8)),
        (8, 4, 3, range(8, 8)),
        (1, 9, 1, range(10, 10)),
        (1, 9, 3, range(10, 10)),
    ],
)
def test_the_span_of_a_chunk(prompt_logprobs_from: int, done: int, count: int, span: range) -> None:
    request = PromptLogprobsRequest(
        prompt=np.arange(10), prompt_logprobs_from=prompt_logprobs_from, top=2
    )
    assert list(request.span(done, count)) == list(span)


def rows_of(*rows: tuple[Sequence[int], int | None, int]) -> Rows:
    """A batch of (prompt, prompt_logprobs, prompt_logprobs_from), one row per slot from 0."""
    mirror = Rows(LIMITS)
    joins = tuple(
        Join(
            slot=slot,
            sequence_id=slot,
            token_ids=tuple(prompt),
            prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_tables=(BlockTable(tuple(range(slot * 8, slot * 8 + 8))),),
            sampling=sampling(prompt_logprobs=top),
            prompt_logprobs_from=prompt_logprobs_from,
        )
        for slot, (prompt, top, prompt_logprobs_from) in enumerate(rows)
    )
    chunks = tuple((slot, 1) for slot in range(len(rows)))
    members = [(slot, slot) for slot in range(len(rows))]
    mirror.apply(plan(1, joins=joins, chunks=chunks, membership_checksum=checksum(members)))
    return mirror


def samples_of(inputs: StepInputs, token: int = 9) -> StepSamples:
    """A device that says -position, and of the likeliest their place."""
    count = len(inputs.sampled_rows)
    prompt_logprobs = None
    if (wanted := inputs.prompt_logprobs) is not None:
        k = int(wanted.tops.max())
        shape = (len(wanted.rows), k)
        prompt_logprobs = PromptTokenLogprobs(
            logprob=-wanted.positions.astype(np.float32),
            top_token_ids=np.broadcast_to(np.arange(k), shape),
            top_logprobs=np.full(shape, -0.5, np.float32),
        )
    return StepSamples(
        token_ids=np.full(count, token),
        is_ok=np.ones(count, np.bool_),
        logprob_rows=np.zeros(0, np.int64),
        logprob=np.zeros(0, np.float32),
        top_token_ids=np.zeros((0, 0), np.int64),
        top_logprobs=np.zeros((0, 0), np.float32),
        forward_us=0,
        sample_us=0,
        prompt_logprobs=prompt_logprobs,
    )


def test_each_row_has_its_own_wish_and_the_tokens_are_those_after_the_computed_ones() -> None:
    rows = rows_of((range(10, 18), 2, 1), (range(20, 28), None, 1), (range(30, 38), 0, 4))
    inputs = rows.step_inputs(np.array([5, 5, 5, 0]))
    wanted = inputs.prompt_logprobs
    assert wanted is not None
    assert wanted.rows.tolist() == [0] * 5 + [2] * 2
    assert wanted.positions.tolist() == [1, 2, 3, 4, 5, 4, 5]
    assert wanted.token_ids.tolist() == [11, 12, 13, 14, 15, 34, 35]
    assert inputs.token_ids[wanted.computed].tolist() == [10, 11, 12, 13, 14, 33, 34]
    told = rows.advance(inputs, samples_of(inputs)).prompt_logprobs
    assert [(row.slot, row.position, row.logprobs) for row in told] == [
        (0, 1, (-1.0, -2.0, -3.0, -4.0, -5.0)),
        (2, 4, (-4.0, -5.0)),
    ]
    assert [row.top_token_ids for row in told] == [(0, 1) * 5, ()]


def test_the_last_chunk_brings_the_rest_and_samples() -> None:
    rows = rows_of((range(10, 18), 1, 1))
    rows.advance(first := rows.step_inputs(np.array([5, 0, 0, 0])), samples_of(first))
    last = rows.step_inputs(np.array([3, 0, 0, 0]))
    outcome = rows.advance(last, samples_of(last))
    assert [(row.position, row.logprobs) for row in outcome.prompt_logprobs] == [(6, (-6.0, -7.0))]
    assert outcome.token_ids == (9,)
    assert rows.step_inputs(rows.steady_counts()).prompt_logprobs is None


def test_a_broken_row_has_no_prompt_logprobs() -> None:
    rows = rows_of((range(10, 18), 1, 1), (range(20, 28), 1, 1))
    inputs = rows.step_inputs(np.array([8, 8, 0, 0]))
    samples = replace(samples_of(inputs), is_ok=np.array([False, True]))
    outcome = rows.advance(inputs, samples)
    assert [slot for slot, _ in outcome.errors] == [0]
    assert [row.slot for row in outcome.prompt_logprobs] == [1]


def test_a_wish_leaves_with_its_row() -> None:
    rows = rows_of((range(10, 18), 1, 1))
    join = Join(
        slot=0,
        sequence_id=5,
        token_ids=(1, 2, 3),
        prompt_tokens=3,
        num_computed_tokens=0,
        block_tables=(BlockTable((0,)),),
        sampling=sampling(),
    )
    members = checksum([(0, 5)])
    rows.apply(plan(2, leaves=(0,), joins=(join,), chunks=((0, 3),), membership_checksum=members))
    assert rows.step_inputs(np.array([3, 0, 0, 0])).prompt_logprobs is None
