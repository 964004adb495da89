"""Edits too many to be sent at once: in parts they do what they do in one, and nothing else."""

from collections.abc import Iterator

import pytest

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import LogitEdits
from gpu_worker.runner.logits_processors import edits_bytes, in_parts, row_edits_bytes
from kernels import dispatch
from tests.support.ahead import Model, play
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

DEVICE = "gpu_worker.runner.graph_runner"
LIMITS = RowLimits(
    slots=24, context_tokens=60, step_tokens=200, block_size=4, block_count=300, vocab_size=97
)


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    dispatch.force("torch")
    yield Model(write_random_model(tmp_path_factory.mktemp("model") / "tiny", seed=3), LIMITS)
    dispatch.force(None)


def asked() -> MiniScheduler:
    """Every row allows nearly all tokens, which is as much as a row can send."""
    scheduler = MiniScheduler(LIMITS)
    for index in range(LIMITS.slots):
        scheduler.submit(
            [5, 6, 7 + index, 8],
            sampling(
                max_tokens=5,
                temperature=0.9,
                seed=index,
                logprobs=2,
                repetition_penalty=1.2,
                allowed_token_ids=tuple(range(index, 97)),
                logit_bias=tuple((token, 0.1) for token in range(97)),
            ),
        )
    return scheduler


def test_more_parts_than_there_are_buffers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = asked(), asked()
    play(model.in_turns(), expected, lambda: 1 << 30)
    monkeypatch.setattr(f"{DEVICE}.edits_bytes", lambda limits: 97 * 36 + 600)
    parts: list[int] = []

    def counted(edits: LogitEdits, size_bytes: int) -> list[LogitEdits]:
        made = list(in_parts(edits, size_bytes))
        parts.append(len(made))
        return made

    monkeypatch.setattr(f"{DEVICE}.in_parts", counted)
    play(model.one_ahead(), found, lambda: 1 << 30)
    assert max(parts) == LIMITS.slots
    assert not found.errors
    assert found.outputs == expected.outputs
    assert found.logprobs == expected.logprobs


def test_a_row_fits(model: Model) -> None:
    assert edits_bytes(LIMITS) >= row_edits_bytes(LIMITS)
