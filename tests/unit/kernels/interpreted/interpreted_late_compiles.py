"""After a worker's warm-up no step launches a kernel that was not compiled in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.weights import load_weights
from gpu_worker.runner import eager_runner
from gpu_worker.runner.compile_ahead import ask_for_kernels
from gpu_worker.runner.device_streams import CpuStreams
from gpu_worker.runner.dummy_steps import step_of
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.stepping import OneAhead
from gpu_worker.runner.warm_up import make_ready
from kernels import dispatch
from kernels.attention import decode_attention, triton_launch
from kernels.attention import plan as attention_plan
from kernels.attention.parts import Parts, PartsSize
from kernels.sampling.logprobs import token_logprobs
from tests.support.ahead import Model, play
from tests.support.launch_keys import LaunchKeys, launch_keys
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

# Nobody's rows hold whatever their memory held.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Odd: rows of logits begin wherever they come to lie.
VOCAB = 97
# Each layer has tables of its own: those of the second must begin where those of the first do.
WINDOWED = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window": 24,
}
LIMITS = RowLimits(
    slots=5,
    context_tokens=76,
    step_tokens=70,
    block_size=4,
    block_count=200,
    vocab_size=VOCAB,
    windows=(None, 24),
)
NEVER_CUT = 1 << 30
# A step with the prompt, and a recorded one.
OUTPUT = 2
# What they compute decides no later launch, and takes the interpreter five sixths of its time: they
# are launched, so known, and not run. Of attention's plan the host reads nothing.
NUMBERS = (
    "_rope_write_kv_kernel",
    "_rms_norm_kernel",
    "_gate_mul_kernel",
    "_plan_kernel",
    "attend_kernel",
    "combine_kernel",
    "decode_kernel",
    "_rank_kernel",
    "_merge_kernel",
)
# The front door admits so many.
TOP_LOGPROBS_MAX = 20


class Recording(CpuStreams):
    """As a GPU does, it runs a graph once before it records it."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    device: GraphRunner
    keys: LaunchKeys
    # Of the start.
    first: frozenset[str]
    folder: Path

    @contextmanager
    def compiling_nothing(self) -> Iterator[None]:
        before = set(self.keys.seen)
        yield
        late = sorted(self.keys.seen - before)
        assert not late


@pytest.fixture(scope="module")
def small_splits() -> Iterator[None]:
    """Contexts of thousands in little: some rows in one split of attention, others in several."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_plan, triton_launch, decode_attention):
            patch.setattr(module, "SPLIT", 32)
        for module in (attention_plan, triton_launch):
            patch.setattr(module, "LONG_SPLIT", 64)
        yield


@pytest.fixture(scope="module")
def warm(small_splits: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    dispatch.force("triton")
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = Model(write_random_model(folder, seed=3, **WINDOWED), LIMITS)
    with launch_keys(NUMBERS) as keys:
        device = GraphRunner(*model.decoder(), LIMITS, Recording())
        make_ready(device)
        yield Warm(device=device, keys=keys, first=frozenset(keys.seen), folder=folder)
    dispatch.force(None)


def run(warm: Warm, *asked: tuple[int, dict[str, Any]], chunk_tokens: int = NEVER_CUT) -> None:
    """Rows of so many prompt tokens, to their end."""
    scheduler = MiniScheduler(LIMITS, chunk_tokens=chunk_tokens, lease_steps=2)
    for index, (length, params) in enumerate(asked):
        prompt = [(7 * index + 3 * at) % 90 + 5 for at in range(length)]
        scheduler.submit(prompt, sampling(**{"max_tokens": OUTPUT, **params}))
    play(OneAhead(Rows(LIMITS), warm.device), scheduler, lambda: NEVER_CUT)
    assert not scheduler.errors
    assert all(len(output) == OUTPUT for output in scheduler.outputs.values())


def test_the_record_tells_compiles_apart(warm: Warm) -> None:
    """Otherwise nothing below would be proven."""
    names = {key.split()[0] for key in warm.keys.seen}
    assert names >= {"attend_kernel", "combine_kernel", "decode_kernel", "_edit_rows_kernel"}
    logits, ids = torch.zeros(2, VOCAB), torch.zeros(3, dtype=torch.int64)
    with warm.compiling_nothing():
        token_logprobs(logits, ids[:2], 7)
    with pytest.raises(AssertionError, match="_merge_kernel"), warm.compiling_nothing():
        # Eight bytes on: no longer divisible by 16.
        token_logprobs(logits, ids[1:], 7)


# Of prompts' log-probabilities, of which no recorded step is: the last layer attends with all
# tokens, here the only one with a window.
NOT_RECORDED = {"attend_kernel"}


def test_a_start_finds_its_kernels_compiled_ahead(warm: Warm) -> None:
    """Those of recorded steps: what is launched over tensors without memory is the same."""
    config, meta = read_config(warm.folder), torch.device("meta")
    with Checkpoint(warm.folder) as checkpoint:
        weights = load_weights(checkpoint, config, dtype=torch.float32, device=meta)
    tile = config.kv_heads, LIMITS.block_size, config.head_dim
    pages = torch.empty(config.groups.places, 2, 1, *tile)
    # None of them is run.
    with launch_keys({key.split()[0] for key in warm.first}) as ahead:
        ask_for_kernels(config, weights, pages, LIMITS, None)
    missed = sorted(warm.first - ahead.seen)
    assert {key.split()[0] for key in missed} == NOT_RECORDED, missed
    assert len(missed) == len(NOT_RECORDED)
    assert ahead.seen <= warm.first


def test_log_probabilities_whatever_their_number(warm: Warm) -> None:
    with warm.compiling_nothing():
        for k in range(TOP_LOGPROBS_MAX + 1):
            warm.device.launch(step_of([1], LIMITS, logprobs=k)).result()


def test_log_probabilities_of_some_rows_among_others(warm: Warm) -> None:
    with warm.compiling_nothing():
        run(warm, (5, {}), (3, {"logprobs": 20}), (1, {}), (9, {"logprobs": 0}), (2, {}))


def test_prompt_logprobs_in_parts(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 27 rows of logits: parts of as many would begin at odd places."""
    monkeypatch.setattr(eager_runner, "RANKED_AT_ONCE", 27 * VOCAB)
    with warm.compiling_nothing():
        run(warm, (31, {"prompt_logprobs": 1}), (4, {}))


def test_prompt_logprobs_by_chunks(warm: Warm) -> None:
    with warm.compiling_nothing():
        run(warm, (8, {"prompt_logprobs": 0}), (6, {"prompt_logprobs": 5}), chunk_tokens=3)


@pytest.mark.parametrize(
    "edit",
    [
        {"logit_bias": ((9, 1.5), (11, -3.0))},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.4},
        {"frequency_penalty": -0.2},
        {"allowed_token_ids": tuple(range(5, 60, 3))},
        {"bad_words": ((13,), (7, 21))},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_each_edit_alone(warm: Warm, edit: dict[str, Any]) -> None:
    with warm.compiling_nothing():
        run(warm, (5, {}), (3, edit), (2, {**edit, "logprobs": 2}))


def test_edits_of_every_kind_together(warm: Warm) -> None:
    some = {"logit_bias": ((9, 1.5),), "repetition_penalty": 1.3}
    more = {"allowed_token_ids": (5, 6, 7), "bad_words": ((6,),)}
    with warm.compiling_nothing():
        run(warm, (3, some), (4, more), (1, {**some, **more}))


@pytest.mark.parametrize("chunk_tokens", [1, 7, NEVER_CUT], ids=["one", "odd", "whole"])
def test_prompts_however_they_are_cut(warm: Warm, chunk_tokens: int) -> None:
    lengths = (1, 4, 5) if chunk_tokens == 1 else (1, 17, 4, 30, 5, 70)
    params = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 3}
    rows = [(length, params if length % 2 else {}) for length in lengths]
    with warm.compiling_nothing():
        run(warm, *rows, chunk_tokens=chunk_tokens)


def test_attention_keeps_its_parts_between_steps(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed ones too: rows in one split and in several, short and long."""
    taken: list[int] = []
    of = Parts.of

    def noted(size: PartsSize, device: torch.device) -> Parts:
        taken.append(size.short)
        return of(size, device)

    monkeypatch.setattr(Parts, "of", noted)
    run(warm, (70, {}), (3, {}), (40, {}), chunk_tokens=30)
    assert not taken
    # Otherwise nothing is proven: without what is kept, each plan takes its own.
    monkeypatch.setattr(warm.device._decoder, "_parts", None)
    warm.device.launch(step_of([2, 1], LIMITS, context=70)).result()
    assert len(taken) == 2
    assert min(taken) > 0
