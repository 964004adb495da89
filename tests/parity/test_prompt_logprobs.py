"""The prompt's own log-probabilities through the whole stack are those of transformers.

Chunks, preemptions, prefix hits that must not be taken, forks and a crowd: the values are the same.
"""

from pathlib import Path

import numpy as np
import pytest

from kaiten.client.results import Completion
from tests.parity import oracle
from tests.parity.test_stack_parity import LOGPROB_ERROR_MAX, ask, at_once, serving, standing


def assert_explained(completion: Completion, prompt: list[int], right: oracle.Explained) -> None:
    told = completion.prompt
    assert told is not None
    assert list(told.token_ids) == prompt
    assert len(told.logprobs) == len(right.logprobs) == len(prompt) - 1
    if len(prompt) == 1:
        return
    own = np.array([each.logprob for each in told.logprobs])
    assert np.abs(own - right.logprobs).max() < LOGPROB_ERROR_MAX
    tops = np.array([[logprob for _, logprob in each.top] for each in told.logprobs])
    assert np.abs(tops - right.top_logprobs).max() < LOGPROB_ERROR_MAX
    # Ids may swap only where their log-probabilities agree within the bound.
    ids = np.array([[token_id for token_id, _ in each.top] for each in told.logprobs])
    clear = oracle.is_clear(right.top_logprobs, LOGPROB_ERROR_MAX)
    assert (ids == right.top_token_ids)[clear].all()


@pytest.mark.parametrize("name", oracle.each(oracle.EXPLAINING))
async def test_a_crowd_of_prompts_is_explained_as_the_oracle_does(
    name: str,
    tmp_path: Path,
    told: oracle.Told,
) -> None:
    """Steps of 40 tokens cut the prompts; too few blocks for eight rows preempt some."""
    # 40 blocks hold the longest; within a window of 12 tokens a row needs four or five.
    kv_blocks = 24 if name == "mistral-window" else 50
    worker = {"step_tokens": 40, "kv_blocks": kv_blocks, "context_tokens": 160}
    async with standing(tmp_path, told.folders[name], worker) as (cluster, client):
        options = {"prompt_logprobs": oracle.TOP, "max_tokens": 40}
        done = await at_once(
            cluster, [ask(client, prompt, **options) for prompt in oracle.EXPLAINED]
        )
        for prompt, completion, right in zip(
            oracle.EXPLAINED, done, told.explained[name], strict=True
        ):
            assert_explained(completion, prompt, right)
        preemptions = sum(completion.timings.preemptions for completion in done)
        # Within a window a row hardly grows: whether one must go depends on how the steps fall.
        assert preemptions >= 5 or name == "mistral-window"


async def test_without_output_and_with_several_choices_the_values_are_the_same(
    tmp_path: Path, told: oracle.Told
) -> None:
    name = oracle.EXPLAINING[0]
    async with serving(tmp_path, told.folders[name], worker={"step_tokens": 40}) as client:
        for changes in ({"max_tokens": 0}, {"n": 3, "max_tokens": 5}):
            options = {"prompt_logprobs": oracle.TOP, **changes}
            completion = await ask(client, oracle.EXPLAINED[1], **options)
            assert_explained(completion, oracle.EXPLAINED[1], told.explained[name][1])
            count = sum(choice.output_tokens for choice in completion.choices)
            assert count == completion.usage.output_tokens
            assert (count == 0) == (changes["max_tokens"] == 0)
