"""Every family and shape of model says, token for token, what transformers says.

Float32, greedy, with log-probabilities. Rows and device are driven directly, all prompts at once:
in one piece, in chunks that split blocks, and with leases that run over block boundaries.
"""

from pathlib import Path
from typing import Final, Literal

import numpy as np
import pytest

from gpu_worker.loading import Loaded, load
from gpu_worker.rows import Rows
from gpu_worker.settings import WorkerSettings
from gpu_worker.torch_device import TorchDevice
from tests.parity import oracle
from tests.support.mini_scheduler import MiniScheduler, sampling

# Chunk, lease, and the compiled kernels where this machine has them, or torch's.
RUNS: Final[tuple[tuple[int, int, Literal["auto", "off"]], ...]] = (
    (1000, 1, "off"),
    (7, 5, "off"),
    (1000, 1, "auto"),
    (7, 5, "auto"),
)
# Of logits of size 1 to 10 after two or three layers in float32: each layer is about ten operations
# one upon another, of sums of up to 128 terms whose errors, of random sign, grow with the root of
# their number: sqrt(128) * 10 * 3 * 2^-24 * 3 ~ 6e-5 of a logit of 3, were all of them to add up.
LOGPROB_ERROR_MAX = 1e-4


def load_model(folder: Path, path: Literal["auto", "off"]) -> Loaded:
    settings = WorkerSettings(
        native=path,
        model=str(folder),
        dtype="fp32",
        slots=8,
        step_tokens=256,
        block_size=8,
        kv_blocks=160,
        threads=1,
    )
    return load(settings)


def run(loaded: Loaded, *, chunk_tokens: int, lease_steps: int) -> MiniScheduler:
    """Everything to its end, eight rows at a time."""
    assert isinstance(loaded.device, TorchDevice)
    rows = Rows(loaded.limits)
    scheduler = MiniScheduler(loaded.limits, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
    for prompt in oracle.RAGGED:
        params = sampling(
            max_tokens=oracle.RAGGED_MAX_TOKENS, stop_token_ids=(oracle.EOS,), logprobs=oracle.TOP
        )
        scheduler.submit(prompt, params)
    while (plan := scheduler.next_plan()) is not None:
        counts = rows.apply(plan)
        for step in range(plan.lease_steps):
            inputs = rows.step_inputs(counts)
            outcome = rows.advance(inputs, loaded.device.execute(inputs))
            scheduler.on_outcome(plan, step, outcome)
            counts = rows.steady_counts()
            if not counts.any():
                break
    return scheduler


@pytest.mark.parametrize("name", oracle.MODELS)
def test_greedy_tokens_and_logprobs_equal_the_oracle(name: str, told: oracle.Told) -> None:
    for chunk_tokens, lease_steps, path in RUNS:
        loaded = load_model(told.folders[name], path)
        result = run(loaded, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
        for index, answer in enumerate(told.ragged[name]):
            assert tuple(result.outputs[index]) == answer.token_ids, (index, path)
            _check_logprobs(result, index, answer)


def _check_logprobs(result: MiniScheduler, index: int, answer: oracle.Answer) -> None:
    rows = result.logprobs[index]
    own = np.array([row.logprob for row in rows])
    assert np.abs(own - answer.logprobs).max() < LOGPROB_ERROR_MAX
    top = np.array([row.top_logprobs for row in rows])
    assert np.abs(top - answer.top_logprobs).max() < LOGPROB_ERROR_MAX
    # Ids may swap only where their log-probabilities agree within the bound.
    ids = np.array([row.top_token_ids for row in rows])
    gaps = np.diff(answer.top_logprobs, axis=1, append=-np.inf)
    is_clear = (gaps < -LOGPROB_ERROR_MAX) & np.roll(gaps < -LOGPROB_ERROR_MAX, 1, axis=1)
    assert (ids == answer.top_token_ids)[is_clear].all()


def test_the_oracle_is_no_constant(told: oracle.Told) -> None:
    """The outputs vary, and some end by themselves: otherwise equality would prove little."""
    for name, answers in told.ragged.items():
        seen = {token for answer in answers for token in answer.token_ids}
        assert len(seen) >= 10, name
    lengths = [len(a.token_ids) for answers in told.ragged.values() for a in answers]
    assert min(lengths) < oracle.RAGGED_MAX_TOKENS
