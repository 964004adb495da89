"""What the oracle says, asked once per run and shared by every parity test."""

from pathlib import Path

import pytest

from tests.parity import oracle


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> oracle.Told:
    return oracle.ask(tmp_path_factory)


@pytest.fixture(scope="session")
def folders(told: oracle.Told) -> dict[str, Path]:
    """name -> checkpoint folder with a tokenizer."""
    return told.folders


@pytest.fixture(scope="session")
def crowd_answers(told: oracle.Told) -> dict[str, list[oracle.Answer]]:
    """What transformers says to each prompt of the model's crowd, one by one."""
    return told.crowd
