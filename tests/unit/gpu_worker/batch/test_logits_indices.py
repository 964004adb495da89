"""Which tokens of a step have logits, and that the last layer computes just them, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.batch.logits_indices import logits_indices
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import PromptLogprobTokens, StepInputs, StepTables
from gpu_worker.model.decoder import States
from gpu_worker.runner.dummy_steps import step_of
from gpu_worker.runner.eager_runner import EagerRunner
from kernels import native
from tests.support.ahead import Model
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=8, context_tokens=64, step_tokens=64, block_size=4, block_count=64, vocab_size=97
)
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def step(counts: Sequence[int], sampled: Sequence[int]) -> StepInputs:
    """Every row in blocks of its own, from its first token on."""
    whole = step_of(counts, LIMITS)
    shape = whole.tables().block_tables.shape
    tables = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    rows = np.repeat(np.arange(len(counts)), counts)
    blocks = tables[:, rows, whole.positions // LIMITS.block_size].astype(np.int64)
    return replace(
        whole,
        token_ids=np.arange(5, 5 + whole.token_count) % LIMITS.vocab_size,
        tables=lambda: StepTables(
            block_tables=tables,
            slot_mapping=blocks * LIMITS.block_size + whole.positions % LIMITS.block_size,
        ),
        sampled_rows=np.array(sampled, np.int64),
        sampled_tokens=whole.query_starts[1:][list(sampled)].astype(np.int64) - 1,
    )


def tokens_of(rows: Sequence[int], computed: Sequence[int]) -> PromptLogprobTokens:
    zeros = np.zeros(len(rows), np.int64)
    return PromptLogprobTokens(
        rows=np.array(rows),
        positions=zeros,
        computed=np.array(computed),
        token_ids=zeros,
        tops=zeros,
    )


def test_of_each_row_the_last_few() -> None:
    #             |0 1 2 3|4|5 6 7|8 9 10 11|
    inputs = replace(
        step([4, 1, 3, 4], sampled=[1, 2]),
        prompt_logprobs=tokens_of([2, 3, 3, 3], [6, 8, 9, 10]),
    )
    indices = logits_indices(inputs)
    ends = inputs.query_starts[1:]
    tokens = (ends[indices.rows] - indices.before_end).tolist()
    assert tokens == [4, 6, 7, 8, 9, 10, 11]
    assert indices.starts.tolist() == [0, 0, 1, 3, 7]
    assert indices.row_max == 4
    assert [tokens[at] for at in indices.sampled] == inputs.sampled_tokens.tolist() == [4, 7]
    assert [tokens[at] for at in indices.prompt] == [6, 8, 9, 10]


def test_nobody_looks_in_mid_prompt() -> None:
    indices = logits_indices(step([5], sampled=[]))
    assert (len(indices.rows), indices.row_max, indices.starts.tolist()) == (0, 0, [0, 0])


def test_what_logits_a_row_has_follows_from_the_row() -> None:
    """Else a neighbour that wants prompt logprobs would change how this one is computed."""
    alone = logits_indices(step([4, 6], sampled=[0, 1]))
    beside = logits_indices(
        replace(step([4, 6], sampled=[0, 1]), prompt_logprobs=tokens_of([1] * 5, [4, 5, 6, 7, 8]))
    )
    assert alone.before_end[alone.rows == 0].tolist() == [1]
    assert beside.before_end[beside.rows == 0].tolist() == [1]


def states_of(model: Model, inputs: StepInputs, *, is_whole: bool) -> tuple[States, torch.Tensor]:
    """Of the tokens with logits, and the pages afterwards."""
    decoder, pages = model.decoder()
    indices = logits_indices(inputs)
    tensors = EagerRunner(decoder, pages)._on_device(inputs, indices)
    assert tensors.logits_indices is not None
    tokens = tensors.logits_indices[0]
    with torch.inference_mode():
        if not is_whole:
            return decoder.forward(tensors), pages
        states = decoder.forward(replace(tensors, logits_indices=None))
        return States(hidden=states.hidden[tokens], residual=states.residual[tokens]), pages


@pytest.mark.parametrize("sampled", [[0, 2, 3], [1], []])
@pytest.mark.parametrize("changes", [{}, QWEN3], ids=["llama", "qwen3"])
def test_the_last_layer_trimmed_is_the_whole_one(
    changes: dict[str, Any], sampled: list[int], tmp_path: Path
) -> None:
    if not native.build():
        pytest.skip(f"torch's own attention sums otherwise for a single query: {native.reason()}")
    model = Model(write_random_model(tmp_path / "model", **changes), LIMITS)
    inputs = step([7, 1, 13, 9], sampled)
    if 3 in sampled:
        inputs = replace(inputs, prompt_logprobs=tokens_of([3] * 4, [24, 25, 26, 27]))
    trimmed, pages = states_of(model, inputs, is_whole=False)
    whole, pages_whole = states_of(model, inputs, is_whole=True)
    assert torch.equal(trimmed.hidden, whole.hidden)
    assert torch.equal(trimmed.residual, whole.residual)
    assert torch.equal(pages, pages_whole)
    assert bool(pages[-1].any())
