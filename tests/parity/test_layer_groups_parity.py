"""Models whose layers attend to windows and to everything, with block tables for each layer group.

The whole stack says, token for token, what transformers says to each prompt alone, however many
windows a row is long, with blocks given back behind them, whether it came in chunks, was preempted
or found its prefix.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kaiten.client.results import Completion
from tests.parity import oracle
from tests.parity.oracle import CROWD_MAX_TOKENS, Answer, ragged_prompts
from tests.parity.published import SHRUNK, gemma3
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
from tests.support.once import made_once

WINDOW: Final = 12
CHUNK: Final = 7
BLOCK_SIZE: Final = 4
# Of Qwen2.5-7B-Instruct-1M and its like: the first layers see everything.
QWEN2: Final[dict[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": True,
    **SHRUNK,
    "num_hidden_layers": 4,
}
# 3 full layers and 8 of the window: one group and three, of which the last has a pad.
GEMMA3: Final = gemma3(sliding_window=WINDOW, sliding_window_pattern=3, num_hidden_layers=11)
MODELS: Final = {"gemma3": GEMMA3, "qwen2": QWEN2}
# Layer groups of the window.
SLIDING: Final = {"gemma3": 3, "qwen2": 1}
PROMPTS: Final = ragged_prompts(64, vocab_size=380, tokens_max=60, seed=29)
# Enough for three times as many rows as a worker has.
FEW: Final = 24
LONGEST: Final = max(range(FEW), key=lambda index: len(PROMPTS[index]))


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with tokenizers, and beside them the answers."""

    def write(root: Path) -> None:
        questions = [oracle.question("groups", name, PROMPTS, CROWD_MAX_TOKENS) for name in MODELS]
        oracle.answer(root, list(MODELS), MODELS, questions)

    root = made_once(tmp_path_factory, "oracle-groups", write)
    return {name: root / name for name in MODELS}


def answers_of(name: str, folders: dict[str, Path]) -> list[Answer]:
    return oracle.read(folders[name].parent / f"groups-{name}.npz", len(PROMPTS))


def assert_near(completions: list[Completion], answers: list[Answer]) -> None:
    for completion, answer in zip(completions, answers, strict=True):
        logprobs = np.array([each.logprob for each in completion.choices[0].logprobs])
        np.testing.assert_allclose(logprobs, answer.logprobs, atol=LOGPROB_ERROR_MAX)


def little(name: str) -> Flags:
    """The longest row, chunked, needs all its blocks and of each window 3 + 11 + 2 * 15 tokens.

    With those of a quarter of another: two long ones never fit together.
    """
    step_tokens = SLOTS + CHUNK
    longest = -(-(60 + CROWD_MAX_TOKENS) // BLOCK_SIZE)
    behind = -(-(BLOCK_SIZE - 1 + WINDOW - 1 + 2 * step_tokens) // BLOCK_SIZE)
    blocks = longest + SLIDING[name] * behind
    return {"step_tokens": step_tokens, "kv_blocks": blocks + blocks // 4}


@pytest.mark.parametrize("name", MODELS)
async def test_chunked_preempted_and_found_again(
    name: str, tmp_path: Path, folders: dict[str, Path]
) -> None:
    answers = answers_of(name, folders)
    prompt, answer = PROMPTS[LONGEST], answers[LONGEST]
    assert len(prompt) + len(answer.token_ids) > 3 * WINDOW
    async with standing(tmp_path, folders[name], little(name)) as (cluster, client):
        asking = [ask(client, one, logprobs=oracle.TOP) for one in PROMPTS[:FEW]]
        completions = await at_once(cluster, asking)
        first, second = [await ask(client, prompt) for _ in range(2)]
    assert_same(completions, answers[:FEW])
    assert_near(completions, answers[:FEW])
    # Where most blocks are of windows, rows hardly grow: it depends on how the steps fall.
    assert name == "gemma3" or any(each.timings.preemptions for each in completions)
    assert_same([first, second], [answer, answer])
    # All of the prompt but its last tokens: of the windows only the last one's blocks are needed.
    assert second.usage.cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
async def test_a_crowd_gets_what_each_gets_alone(
    name: str, tmp_path: Path, folders: dict[str, Path]
) -> None:
    answers = answers_of(name, folders)
    # Room for all prompts in all groups, so that the second time all are found.
    async with serving(tmp_path, folders[name], worker={"kv_blocks": 4096}) as client:
        first = await ask_all(client, PROMPTS, logprobs=oracle.TOP)
        second = await ask_all(client, PROMPTS)
    assert_same(first, answers)
    assert_near(first, answers)
    assert_same(second, answers)
    assert sum(completion.usage.cached_tokens for completion in second) > 500
