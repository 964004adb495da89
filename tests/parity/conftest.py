"""Checkpoints and oracle answers, made once per session and shared by every parity test."""

from pathlib import Path

import pytest

from tests.parity import oracle

CROWD_MAX_TOKENS = 24
CROWD = oracle.ragged_prompts(64, vocab_size=380, tokens_max=60, seed=11)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> checkpoint folder with a tokenizer."""
    return oracle.write_checkpoints(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def crowd_answers(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[oracle.Answer]]:
    """What transformers says to each prompt of the crowd, one by one."""
    answers = oracle.answers(
        dict.fromkeys(folders.values(), CROWD),
        max_tokens=CROWD_MAX_TOKENS,
        scratch=tmp_path_factory.mktemp("crowd"),
    )
    return {name: answers[folder] for name, folder in folders.items()}
