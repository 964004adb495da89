"""Checkpoints and oracle answers, made once per run and shared by every parity test."""

from pathlib import Path

import pytest

from tests.parity import oracle

CROWD_MAX_TOKENS = 24
CROWD = oracle.ragged_prompts(64, vocab_size=380, tokens_max=60, seed=11)
ONE_PER_FAMILY = ("llama-rope-llama3", "mistral-wide-head", "qwen2-gqa-tied", "qwen3-gqa-tied")
# Three times the rows that a worker has here, so that all but the first join rows that go on.
_FEW = 24


def crowd_of(name: str) -> list[list[int]]:
    """Of a model whose family the whole crowd asks another model, fewer ask."""
    return CROWD if name in ONE_PER_FAMILY else CROWD[:_FEW]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> checkpoint folder with a tokenizer."""
    return oracle.write_checkpoints(tmp_path_factory)


@pytest.fixture(scope="session")
def crowd_answers(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[oracle.Answer]]:
    """What transformers says to each prompt of the model's crowd, one by one."""
    asked = {folder: crowd_of(name) for name, folder in folders.items()}
    answers = oracle.answers("crowd", asked, max_tokens=CROWD_MAX_TOKENS, factory=tmp_path_factory)
    return {name: answers[folder] for name, folder in folders.items()}
