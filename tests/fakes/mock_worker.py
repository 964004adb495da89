"""A worker process without a model: all of the real one, but its device is a function.

    python -m tests.fakes.mock_worker --scheduler HOST:PORT --model FOLDER --step-ms 2.6 --slots 256

Of the model it reads config.json only. Every step takes `step_ms` plus `row_us` per row and
`token_us` per token; the token at an output position is a pure function of (sequence id, position)
and never ends a sequence, so a whole output is known without a run (`mock_token_ids`).
Log-probabilities asked for are all -1, those of a prompt minus their position. It can be told to
lie, to die of a token, to wait at a position, and to give a row several tokens per step.
"""

import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from gpu_worker.batch.plans import Description
from gpu_worker.batch.plans import StepResult as StepReport
from gpu_worker.batch.step_types import (
    BlockPairs,
    IntArray,
    PromptLogprobTokens,
    PromptTokenLogprobs,
    StepInputs,
    StepSamples,
)
from gpu_worker.model.checkpoint import find_checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.runner.kv_cache import room_on_cpu, size_pool, with_host_blocks
from gpu_worker.service import wire
from gpu_worker.service.loading import Loaded, model_name, pool_request, row_limits
from gpu_worker.service.process import WorkerProcess
from gpu_worker.settings import WorkerSettings
from kaiten.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    Feature,
    PromptLogprobs,
    TokenLogprobs,
    WorkerDescription,
)
from kaiten.v1.worker_service_pb2 import StepResult, StepTimings
from service_kit import lifecycle, logs
from service_kit.settings import load as load_settings
from tests.fakes.several_tokens import give_several

ALL_FEATURES = "LOGPROBS,PROMPT_LOGPROBS,LOGITS_PROCESSORS"
TokenFunction = Callable[[npt.NDArray[np.uint64], IntArray], IntArray]


class MockSettings(WorkerSettings):
    """A worker whose model is a function."""

    step_ms: float = Field(default=2.6, ge=0, description="time of a step")
    row_us: float = Field(default=0.0, ge=0, description="time added per row")
    token_us: float = Field(default=0.0, ge=0, description="time added per token")
    fingerprint: str = Field(default="mock", description="of weights, config and dtype")
    weights_digest: str = Field(default="", description="of the weights alone")
    lie: str = Field(default="none", description="what the results get wrong: one of LIES")
    lie_after_steps: int = Field(default=20, ge=0, description="results told truly before")
    poison_token: int = Field(default=-1, description="a step that computes it kills the process")
    slot_tokens: int = Field(default=1, ge=1, description="tokens that a step gives a row, at most")
    features: str = Field(default=ALL_FEATURES, description="what it can do")
    gates: Path | None = Field(
        default=None,
        description="a step of position 7 waits while gates/7 is there, any while gates/any is",
    )


class MockDevice:
    """A device as `batch.step_types.ModelRunner` wants it. `delay_s` is asked before each step."""

    def __init__(
        self, tokens_of: TokenFunction, delay_s: Callable[[StepInputs], float] = lambda step: 0.0
    ) -> None:
        self._tokens_of = tokens_of
        self._delay_s = delay_s
        self.swapped: list[tuple[int, int]] = []
        self.copied: list[tuple[int, int]] = []

    def swap_blocks(self, pairs: BlockPairs) -> None:
        self.swapped += pairs

    def copy_blocks(self, pairs: BlockPairs) -> None:
        self.copied += pairs

    def execute(self, step: StepInputs) -> StepSamples:
        started_ns = time.perf_counter_ns()
        sequence_ids = step.sequence_ids[step.sampled_rows]
        token_ids = self._tokens_of(sequence_ids, step.sampling.position)
        rows = np.flatnonzero(step.sampling.logprobs >= 0)
        k = int(step.sampling.logprobs.max(initial=0))
        elapsed_s = (time.perf_counter_ns() - started_ns) / 1e9
        if (rest_s := self._delay_s(step) - elapsed_s) > 0:
            time.sleep(rest_s)
        return StepSamples(
            token_ids=token_ids,
            is_ok=np.ones(len(token_ids), np.bool_),
            logprob_rows=rows,
            logprob=np.full(len(rows), -1.0, np.float32),
            top_token_ids=np.tile(np.arange(k), (len(rows), 1)),
            top_logprobs=np.full((len(rows), k), -1.0, np.float32),
            forward_us=(time.perf_counter_ns() - started_ns) // 1000,
            sample_us=0,
            prompt_logprobs=_prompt_logprobs(step.prompt_logprobs),
        )


def _prompt_logprobs(wanted: PromptLogprobTokens | None) -> PromptTokenLogprobs | None:
    """Minus the position: whoever reads it sees which one it is of."""
    if wanted is None:
        return None
    k = int(wanted.tops.max())
    logprob = -wanted.positions.astype(np.float32)
    return PromptTokenLogprobs(
        logprob=logprob,
        top_token_ids=wanted.positions[:, None] + np.arange(k),
        top_logprobs=np.repeat(logprob[:, None], k, axis=1),
    )


def token_function(allowed: IntArray) -> TokenFunction:
    """Tokens of `allowed`, well mixed over sequence ids and positions."""

    def tokens_of(sequence_ids: npt.NDArray[np.uint64], positions: IntArray) -> IntArray:
        mixed = sequence_ids * np.uint64(0x9E3779B97F4A7C15)
        mixed += positions.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        return allowed[(mixed % np.uint64(len(allowed))).astype(np.int64)]

    return tokens_of


def allowed_ids(folder: Path, vocab_size: int) -> IntArray:
    """Every id that does not end a sequence."""
    ends = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            raw: Any = json.loads((folder / name).read_text()).get("eos_token_id")
            ends += raw if isinstance(raw, list) else [raw] if raw is not None else []
    return np.setdiff1d(np.arange(vocab_size), np.array(ends, np.int64))


@cache
def tokens_said(folder: Path) -> TokenFunction:
    """By mock workers of a checkpoint, which is read once."""
    return token_function(allowed_ids(folder, read_config(folder).vocab_size))


def mock_token_ids(folder: Path, sequence_id: int, count: int) -> list[int]:
    """The whole output of a sequence."""
    tokens_of = tokens_said(folder)
    sequence_ids = np.full(count, sequence_id, np.uint64)
    return [int(token) for token in tokens_of(sequence_ids, np.arange(count))]


def load_mock(settings: WorkerSettings) -> Loaded:
    """In place of `gpu_worker.service.loading.load`."""
    assert isinstance(settings, MockSettings)
    folder = find_checkpoint(settings.model)
    config = read_config(folder)
    # Nothing is allocated, so any pool fits.
    pool = size_pool(config, torch.float32, pool_request(settings), room_on_cpu(1 << 60))
    pool = with_host_blocks(pool, settings.kv_host_memory_mb, 1 << 60)

    def is_held(step: StepInputs) -> bool:
        names = [] if settings.gates is None else os.listdir(settings.gates)
        return any(name == "any" or (step.positions == int(name)).any() for name in names)

    def delay_s(step: StepInputs) -> float:
        while is_held(step):
            # A gate is a file, which the test removes.
            time.sleep(0.005)
        if (step.token_ids == settings.poison_token).any():
            os.kill(os.getpid(), signal.SIGKILL)
        per_row, per_token = settings.row_us * 1e-6, settings.token_us * 1e-6
        return settings.step_ms / 1000 + step.row_count * per_row + step.token_count * per_token

    return Loaded(
        runner=MockDevice(token_function(allowed_ids(folder, config.vocab_size)), delay_s),
        limits=row_limits(settings, config, pool),
        model=model_name(settings),
        fingerprint=settings.fingerprint,
        weights_digest=settings.weights_digest,
        architecture=config.architecture,
        dtype="none",
        kv_dtype="none",
        device=torch.device("cpu"),
        device_name="mock",
        pool=pool,
        layer_counts=config.groups.layer_counts,
        mixed_tokens=settings.step_tokens,
        phases_ms={},
    )


def _missing_row(message: StepResult) -> None:
    del message.slots[-1], message.token_ids[-1]


def _in_logprobs(change: Callable[[TokenLogprobs], object]) -> Callable[[StepResult], None]:
    def lie(message: StepResult) -> None:
        for row in message.logprobs[:1]:
            change(row.logprobs)

    return lie


def _in_prompt(change: Callable[[PromptLogprobs], object]) -> Callable[[StepResult], None]:
    def lie(message: StepResult) -> None:
        for row in message.prompt_logprobs[:1]:
            change(row.logprobs)

    return lie


# One for each place that looks at a result; tests/unit/scheduler_svc has every rule of each place.
LIES: dict[str, Callable[[StepResult], object]] = {
    "token": lambda message: message.token_ids.__setitem__(0, 1 << 20),
    "missing_row": _missing_row,
    "other_boot": lambda message: setattr(message, "boot_id", "another"),
    "logprob_nan": _in_logprobs(lambda run: setattr(run, "logprob", math.nan)),
    "prompt_tops": _in_prompt(lambda run: run.top_token_ids.pop() and run.top_logprobs.pop()),
    "endless_step": lambda message: message.timings.MergeFrom(
        StepTimings(forward_us=(1 << 64) - 1, sample_us=(1 << 64) - 1)
    ),
    "wrong_end": lambda message: message.finished.add(
        slot=message.slots[0], reason=FINISH_REASON_LENGTH
    ),
}


def tell_lies(kind: str, after_steps: int) -> None:
    """From now on, what this process says of its steps is true `after_steps` times, then wrong."""
    truth, told = wire.result_to_proto, itertools.count()

    def lie(result: StepReport, *, boot_id: str) -> StepResult:
        message = truth(result, boot_id=boot_id)
        if message.slots and next(told) >= after_steps:
            LIES[kind](message)
        return message

    wire.result_to_proto = lie


def announce(features: str) -> None:
    """From now on this process describes itself as having these, and no other."""
    describe = wire.description_to_proto
    names = [f"FEATURE_{name}" for name in features.split(",") if name]
    told = cast("list[Feature]", [*map(Feature.Value, names)])

    def announced(description: Description) -> WorkerDescription:
        message = describe(description)
        del message.capabilities.features[:]
        message.capabilities.features.extend(told)
        return message

    wire.description_to_proto = announced


def main(argv: Sequence[str] | None = None) -> int:
    """As `gpu_worker.main.main`."""

    def build() -> WorkerProcess:
        settings = load_settings(MockSettings, "worker", argv)
        logs.configure("worker", settings.log_level)
        announce(settings.features)
        if settings.slot_tokens > 1:
            give_several(settings.slot_tokens)
        if settings.lie != "none":
            tell_lies(settings.lie, settings.lie_after_steps)
        return WorkerProcess(settings, load_mock)

    return lifecycle.launch(build)


if __name__ == "__main__":
    sys.exit(main())
