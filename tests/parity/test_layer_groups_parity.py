"""Models whose layers attend to windows and to everything, with block tables for each layer group.

The whole stack says, token for token, what transformers says to each prompt alone, however many
windows a row is long, with blocks given back behind them, whether it came in chunks, was preempted
or found its prefix. What a worker alone says of these models is in `test_model_parity`.
"""

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kaiten.client.results import Completion
from tests.parity import oracle
from tests.parity.oracle import CROWD, CROWD_MAX_TOKENS, WINDOWED, Answer
from tests.parity.published import PUBLISHED
from tests.parity.test_stack_parity import (
    LOGPROB_ERROR_MAX,
    SLOTS,
    ask,
    ask_all,
    assert_same,
    at_once,
    serving,
    standing,
)
from tests.support.cluster import Flags

WINDOW: Final = 12
CHUNK: Final = 7
BLOCK_SIZE: Final = 4
# Layer groups of the window; there is one of full layers.
SLIDING: Final = {"gemma3-windows": 3, "qwen2-windows": 1}
LONGEST: Final = max(range(len(CROWD)), key=lambda index: len(CROWD[index]))
# Three times as many rows as a worker has; one thrice, whose equal blocks give way to each other.
FEW: Final = (*range(24), LONGEST, LONGEST)
# 64 at once.
MANY: Final = (*range(len(CROWD)), *range(len(CROWD)), *range(16))


def assert_near(completions: list[Completion], answers: list[Answer]) -> None:
    for completion, answer in zip(completions, answers, strict=True):
        logprobs = np.array([each.logprob for each in completion.choices[0].logprobs])
        np.testing.assert_allclose(logprobs, answer.logprobs, atol=LOGPROB_ERROR_MAX)


def little(name: str) -> Flags:
    """The longest row, chunked, needs all its blocks and of each window 3 + 11 + 2 * 15 tokens.

    There is little more: two long ones never fit together.
    """
    step_tokens = SLOTS + CHUNK
    longest = -(-(len(CROWD[LONGEST]) + CROWD_MAX_TOKENS) // BLOCK_SIZE)
    behind = -(-(BLOCK_SIZE - 1 + WINDOW - 1 + 2 * step_tokens) // BLOCK_SIZE)
    blocks = longest + SLIDING[name] * behind
    return {"step_tokens": step_tokens, "kv_blocks": blocks + blocks // 8}


@pytest.mark.parametrize("name", WINDOWED)
async def test_chunked_preempted_and_found_again(
    name: str,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[Answer]],
) -> None:
    assert PUBLISHED[name]["sliding_window"] == WINDOW
    prompt, answers = CROWD[LONGEST], crowd_answers[name]
    expected = [answers[index] for index in FEW]
    assert len(prompt) + len(answers[LONGEST].token_ids) > 3 * WINDOW
    async with standing(tmp_path, folders[name], little(name)) as (cluster, client):
        asking = [ask(client, CROWD[index], logprobs=oracle.TOP) for index in FEW]
        completions = await at_once(cluster, asking)
        alone = await ask(client, prompt)
        # The second choice begins with a copy of what the first has of the last block.
        found = await ask(client, prompt, n=2)
    assert_same(completions, expected)
    assert_near(completions, expected)
    assert any(completion.timings.preemptions for completion in completions)
    assert_same([alone, found], [answers[LONGEST]] * 2)
    assert found.choices[1].token_ids == answers[LONGEST].token_ids
    # All of the prompt but its last tokens: of the windows only the last one's blocks are needed.
    assert found.usage.cached_tokens >= (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWED)
async def test_a_crowd_gets_what_each_gets_alone(
    name: str,
    tmp_path: Path,
    folders: dict[str, Path],
    crowd_answers: dict[str, list[Answer]],
) -> None:
    prompts = [CROWD[index] for index in MANY]
    expected = [crowd_answers[name][index] for index in MANY]
    # Room for all prompts in all groups, so that the second time all are found.
    async with serving(tmp_path, folders[name], worker={"kv_blocks": 4096}) as client:
        first = await ask_all(client, prompts, logprobs=oracle.TOP)
        second = await ask_all(client, prompts)
    assert_same(first, expected)
    assert_near(first, expected)
    assert_same(second, expected)
    assert sum(completion.usage.cached_tokens for completion in second) > 500
