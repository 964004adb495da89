"""A worker on the device says, token for token, what transformers says on a CPU, in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gpu_worker.batch.rows import Rows
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.runner.stepping import InTurns, OneAhead, Stepper
from gpu_worker.service.loading import Loaded, load
from gpu_worker.settings import WorkerSettings
from tests.parity import oracle
from tests.support.ahead import play
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.on_device import DEVICE

pytestmark = [
    pytest.mark.gpu,
    # Torch leaves a process that compiles behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# As in tests/parity/test_model_parity, of more operations: sums of tensor tiles in another order.
LOGPROB_ERROR_MAX: Final = 1e-4
NAMES: Final = (
    "llama-gqa-tied",
    "qwen3-gqa-tied",
    "qwen2-windows",
    "gemma2-tight",
    "gemma3-windows",
    "olmo2-7b",
)
# Chunk and lease: in one piece, and in chunks that split blocks with leases over their borders.
RUNS: Final = ((1000, 1), (7, 5))
NEVER_CUT: Final = 1 << 30


@pytest.fixture
def told(tmp_path_factory: pytest.TempPathFactory) -> oracle.Told:
    return oracle.ask_ragged(tmp_path_factory, "oracle-gpu", NAMES)


def loaded_from(folder: Path) -> Loaded:
    return load(
        WorkerSettings(
            device=str(DEVICE), model=str(folder), dtype="fp32", slots=8, step_tokens=256,
            block_size=8, kv_blocks=320, threads=1, native="off",
        )
    )  # fmt: skip


def stepper_of(loaded: Loaded) -> Stepper:
    rows = Rows(loaded.limits, loaded.grammars)
    runner: Any = loaded.runner
    if isinstance(runner, EagerRunner):
        return InTurns(rows, runner)
    stepper = OneAhead(rows, runner)
    stepper.clear()
    return stepper


def runs(loaded: Loaded) -> Iterator[MiniScheduler]:
    """Every prompt to its end, eight rows at a time; the second finds the KV of the first."""
    for chunk_tokens, lease_steps in RUNS:
        scheduler = MiniScheduler(loaded.limits, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
        for prompt in oracle.RAGGED:
            params = sampling(
                max_tokens=oracle.RAGGED_MAX_TOKENS,
                stop_token_ids=(oracle.EOS,),
                logprobs=oracle.TOP,
            )
            scheduler.submit(prompt, params)
        play(stepper_of(loaded), scheduler, lambda: NEVER_CUT)
        yield scheduler


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_and_logprobs_equal_the_oracle(name: str, told: oracle.Told) -> None:
    for scheduler in runs(loaded_from(told.folders[name])):
        assert not scheduler.errors
        for index, answer in enumerate(told.ragged[name]):
            assert tuple(scheduler.outputs[index]) == answer.token_ids
            rows = scheduler.logprobs[index]
            own = np.array([row.logprob for row in rows])
            tops = np.array([row.top_logprobs for row in rows])
            np.testing.assert_allclose(own, answer.logprobs, atol=LOGPROB_ERROR_MAX)
            np.testing.assert_allclose(tops, answer.top_logprobs, atol=LOGPROB_ERROR_MAX)
