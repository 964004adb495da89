"""Every family and shape of model says, token for token, what transformers says.

Float32, greedy, with log-probabilities. Rows and device are driven directly, all prompts at once:
in one piece, in chunks that split blocks, and with leases that run over block boundaries.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pytest

from gpu_worker.batch.rows import Rows
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.service.loading import Loaded, load
from gpu_worker.settings import WorkerSettings
from tests.parity import oracle
from tests.support.mini_scheduler import MiniScheduler, sampling

# The compiled kernels where this machine has them, or torch's; chunk and lease. The second run
# finds the KV as the first one left it.
PATHS: Final[tuple[Literal["auto", "off"], ...]] = ("off", "auto")
RUNS: Final = ((1000, 1), (7, 5))
# Other weights and sizes of a family of which one takes every path in every manner: each path once,
# each manner once, by turns.
ONCE_EACH: Final = tuple(name for name in oracle.MODELS if name not in oracle.ONE_PER_FAMILY)
# Of logits of size 1 to 10 after two or three layers in float32: each layer is about ten operations
# one upon another, of sums of up to 128 terms whose errors, of random sign, grow with the root of
# their number: sqrt(128) * 10 * 3 * 2^-24 * 3 ~ 6e-5 of a logit of 3, were all of them to add up.
LOGPROB_ERROR_MAX = 1e-4


# Of models whose rope is stretched for long rows: up to here it is not. A row that crosses is
# another matter: transformers turns its later keys otherwise than its earlier ones, kaiten none.
SHORT_TOKENS: Final = 64
STRETCHED: Final = ("phi3-mini-128k", "phi4-mini")


def load_model(
    folder: Path, path: Literal["auto", "off"], context_tokens: int | None = None
) -> Loaded:
    settings = WorkerSettings(
        native=path,
        model=str(folder),
        dtype="fp32",
        slots=8,
        step_tokens=256,
        block_size=8,
        kv_blocks=160,
        threads=1,
        context_tokens=context_tokens,
    )
    return load(settings)


def run(
    loaded: Loaded,
    *,
    chunk_tokens: int,
    lease_steps: int,
    prompts: Sequence[list[int]] = oracle.RAGGED,
) -> MiniScheduler:
    """Everything to its end, eight rows at a time."""
    assert isinstance(loaded.runner, EagerRunner)
    rows = Rows(loaded.limits, loaded.grammars)
    scheduler = MiniScheduler(loaded.limits, chunk_tokens=chunk_tokens, lease_steps=lease_steps)
    for prompt in prompts:
        params = sampling(
            max_tokens=oracle.RAGGED_MAX_TOKENS, stop_token_ids=(oracle.EOS,), logprobs=oracle.TOP
        )
        scheduler.submit(prompt, params)
    while (plan := scheduler.next_plan()) is not None:
        counts = rows.apply(plan)
        for step in range(plan.lease_steps):
            inputs = rows.step_inputs(counts)
            outcome = rows.advance(inputs, loaded.runner.execute(inputs))
            scheduler.on_outcome(plan, step, outcome)
            counts = rows.steady_counts()
            if not counts.any():
                break
    return scheduler


@pytest.mark.parametrize(
    "name", oracle.each([name for name in oracle.ALL if name not in STRETCHED])
)
def test_greedy_tokens_and_logprobs_equal_the_oracle(name: str, told: oracle.Told) -> None:
    _check(told, name, range(len(oracle.RAGGED)), context_tokens=None)


@pytest.mark.parametrize("name", oracle.each(STRETCHED))
@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_a_stretched_rope_on_either_side(name: str, is_long: bool, told: oracle.Told) -> None:
    lengths = [len(prompt) for prompt in oracle.RAGGED]
    if is_long:
        some = [index for index, length in enumerate(lengths) if length > SHORT_TOKENS]
    else:
        longest = SHORT_TOKENS - oracle.RAGGED_MAX_TOKENS
        some = [index for index, length in enumerate(lengths) if length <= longest]
    assert len(some) >= 3
    _check(told, name, some, context_tokens=None if is_long else SHORT_TOKENS)


def _check(told: oracle.Told, name: str, some: Sequence[int], context_tokens: int | None) -> None:
    prompts = [oracle.RAGGED[index] for index in some]
    answers = [told.ragged[name][index] for index in some]
    for number, path in enumerate(PATHS):
        loaded = load_model(told.folders[name], path, context_tokens)
        for chunk_tokens, lease_steps in _runs_of(name, number):
            done = run(loaded, chunk_tokens=chunk_tokens, lease_steps=lease_steps, prompts=prompts)
            for index, answer in enumerate(answers):
                assert tuple(done.outputs[index]) == answer.token_ids, (index, path)
                _check_logprobs(done, index, answer)


def _runs_of(name: str, path: int) -> Sequence[tuple[int, int]]:
    if name not in ONCE_EACH:
        return RUNS
    return (RUNS[(path + ONCE_EACH.index(name)) % len(RUNS)],)


def _check_logprobs(result: MiniScheduler, index: int, answer: oracle.Answer) -> None:
    rows = result.logprobs[index]
    own = np.array([row.logprob for row in rows])
    assert np.abs(own - answer.logprobs).max() < LOGPROB_ERROR_MAX
    top = np.array([row.top_logprobs for row in rows])
    assert np.abs(top - answer.top_logprobs).max() < LOGPROB_ERROR_MAX
    # Ids may swap only where their log-probabilities agree within the bound.
    ids = np.array([row.top_token_ids for row in rows])
    clear = oracle.is_clear(answer.top_logprobs, LOGPROB_ERROR_MAX)
    assert (ids == answer.top_token_ids)[clear].all()


def test_the_oracle_is_no_constant(told: oracle.Told) -> None:
    """The outputs vary, and some end by themselves: otherwise equality would prove little."""
    for name, answers in told.ragged.items():
        seen = {token for answer in answers for token in answer.token_ids}
        assert len(seen) >= 10, name
    lengths = [len(a.token_ids) for answers in told.ragged.values() for a in answers]
    assert min(lengths) < oracle.RAGGED_MAX_TOKENS
