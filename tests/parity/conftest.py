"""What the oracle says, asked once per run and shared by every parity test."""

from pathlib import Path

import pytest

from tests.parity import oracle


@pytest.fixture
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> oracle.Told:
    """Of the models beside the one that the test is about."""
    parameters = getattr(request.node, "callspec", None)
    name = parameters.params.get("name") if parameters else None
    return oracle.ask(tmp_path_factory, name)


@pytest.fixture
def folders(told: oracle.Told) -> dict[str, Path]:
    """name -> checkpoint folder with a tokenizer."""
    return told.folders


@pytest.fixture
def crowd_answers(told: oracle.Told) -> dict[str, list[oracle.Answer]]:
    """What transformers says to each prompt of the model's crowd, one by one."""
    return told.crowd
