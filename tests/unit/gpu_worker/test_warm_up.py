"""How many tokens a step may have in which somebody decodes."""

import pytest

from gpu_worker.device import StepInputs
from gpu_worker.draft import RowLimits
from gpu_worker.settings import MIXED_STEP_MS, WorkerSettings
from gpu_worker.warm_up import mixed_tokens, tokens_within

LIMITS = RowLimits(
    slots=4, context_tokens=64, step_tokens=40, block_size=4, block_count=32, vocab_size=97
)


@pytest.mark.parametrize(
    ("limit_s", "found", "ran"),
    [
        (0.1, 8, [8]),  # slower than it may be from the least on
        (0.29, 16, [8, 16, 32]),  # as many as end in time: 0.29 = 0.13 + 16 * 0.01
        (0.37, 24, [8, 16, 32]),
        (0.46, 33, [8, 16, 32, 64]),
        (10.0, 100, [8, 16, 32, 64, 100]),  # a fast device: the most
    ],
)
def test_as_many_tokens_as_end_in_time(limit_s: float, found: int, ran: list[int]) -> None:
    asked: list[int] = []

    def seconds_of(tokens: int) -> float:
        asked.append(tokens)
        return 0.1301 + tokens * 0.00999

    assert tokens_within(limit_s, seconds_of, least=8, most=100) == found
    assert asked == ran


def test_it_is_measured_with_full_batches_that_touch_nobody() -> None:
    steps: list[StepInputs] = []
    assert mixed_tokens(steps.append, LIMITS, 1e-9) == 2 * LIMITS.slots
    assert mixed_tokens(steps.append, LIMITS, 1e9) == LIMITS.step_tokens
    assert {step.token_count for step in steps} == {8, 16, 32, 40}
    assert all(step.row_count == LIMITS.slots for step in steps)
    assert all((step.kv_slots == -1).all() for step in steps)


def test_without_a_limit_or_without_others_nothing_is_measured() -> None:
    steps: list[StepInputs] = []
    assert mixed_tokens(steps.append, LIMITS, None) == LIMITS.step_tokens
    alone = RowLimits(
        slots=1, context_tokens=64, step_tokens=40, block_size=4, block_count=32, vocab_size=97
    )
    assert mixed_tokens(steps.append, alone, 1e-9) == 40
    assert not steps


def test_step_tokens_that_are_given_are_exact_unless_a_time_is_given_too() -> None:
    assert WorkerSettings(model="m").mixed_step_s == MIXED_STEP_MS / 1000
    assert WorkerSettings(model="m", step_tokens=512).mixed_step_s is None
    assert WorkerSettings(model="m", mixed_step_ms=50).mixed_step_s == 0.05
    assert WorkerSettings(model="m", step_tokens=512, mixed_step_ms=50).mixed_step_s == 0.05
