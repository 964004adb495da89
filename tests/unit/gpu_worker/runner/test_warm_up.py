"""How many tokens a step may have in which somebody decodes, and steps before anybody's."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import BlockPairs, StepInputs
from gpu_worker.runner.device_streams import CpuStreams, CudaStreams
from gpu_worker.runner.dummy_steps import largest_step, worst_step
from gpu_worker.runner.engine import Engine
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.stepping import OneAhead
from gpu_worker.runner.warm_up import launch_seated, make_ready, mixed_tokens, tokens_within
from gpu_worker.service import loading
from gpu_worker.settings import MIXED_STEP_MS, WorkerSettings
from kernels import dispatch, jit
from service_kit.errors import ConfigError
from tests.support.ahead import Model, play
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=4,
    context_tokens=64,
    step_tokens=40,
    block_size=4,
    block_count=32,
    vocab_size=97,
    host_block_count=2,
)


class Recording:
    """A device that only remembers what it was asked."""

    def __init__(self) -> None:
        self.steps: list[StepInputs] = []

    def swap_blocks(self, pairs: BlockPairs) -> None:
        raise AssertionError("nobody has blocks")

    def copy_blocks(self, pairs: BlockPairs) -> None:
        raise AssertionError("nobody has blocks")

    def execute(self, step: StepInputs) -> Any:
        self.steps.append(step)


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    dispatch.force("torch")
    yield Model(write_random_model(tmp_path_factory.mktemp("model") / "tiny", seed=3), LIMITS)
    dispatch.force(None)


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
    device = Recording()
    steps = device.steps
    assert mixed_tokens(device, LIMITS, 1e-9) == 2 * LIMITS.slots
    assert mixed_tokens(device, LIMITS, 1e9) == LIMITS.step_tokens
    assert {step.token_count for step in steps} == {8, 16, 32, 40}
    drafting = replace(LIMITS, slot_tokens=3)
    assert mixed_tokens(device, drafting, 1e-9) == (3 + 1) * LIMITS.slots
    assert all(step.row_count == LIMITS.slots for step in steps)
    assert all((step.tables().slot_mapping == -1).all() for step in steps)


def test_without_a_limit_or_without_others_nothing_is_measured() -> None:
    device = Recording()
    assert mixed_tokens(device, LIMITS, None) == LIMITS.step_tokens
    alone = RowLimits(
        slots=1, context_tokens=64, step_tokens=40, block_size=4, block_count=32, vocab_size=97
    )
    assert mixed_tokens(device, alone, 1e-9) == 40
    assert not device.steps


def test_step_tokens_that_are_given_are_exact_unless_a_time_is_given_too() -> None:
    assert WorkerSettings(model="m").mixed_step_s == MIXED_STEP_MS / 1000
    assert WorkerSettings(model="m", step_tokens=512).mixed_step_s is None
    assert WorkerSettings(model="m", mixed_step_ms=50).mixed_step_s == 0.05
    assert WorkerSettings(model="m", step_tokens=512, mixed_step_ms=50).mixed_step_s == 0.05


class Attention:
    """What a device's decoder was told of each step: (tokens of rows, contexts of rows)."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[list[int], list[int]]] = []
        forward = device._decoder.forward

        def told(step: Any) -> Any:
            starts, contexts = step.queries.starts, step.queries.context_lengths
            self.steps.append((starts.diff().tolist(), contexts.tolist()))
            return forward(step)

        monkeypatch.setattr(device._decoder, "forward", told)


def test_a_device_with_rows_of_its_own_is_measured_with_live_ones(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding would be timed without its attention."""
    device = model.resident()
    attention = Attention(device, monkeypatch)
    assert mixed_tokens(device, LIMITS, 1e9) == LIMITS.step_tokens
    # A full pool: 32 blocks of 4 for 4 rows.
    shared = 32
    expected = [
        ([tokens - 3, 1, 1, 1], [max(tokens - 3, shared), shared, shared, shared])
        for tokens in (8, 8, 16, 16, 32, 32, 40, 40)
    ]
    assert attention.steps == expected
    assert not device.rows.state.is_live.any()


def test_seated_rows_say_what_they_compute_and_go_on(model: Model) -> None:
    device = model.resident()
    samples = launch_seated(device, largest_step(LIMITS, context=20))()
    assert samples.is_there is not None
    assert samples.is_there.all()
    assert samples.is_ok.all()
    assert device.rows.state.num_computed_tokens.tolist() == [37, 20, 20, 20]


def test_ready_is_who_has_run_the_worst_step_and_forgot_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = model.resident()
    attention = Attention(device, monkeypatch)
    copied: list[tuple[list[int], list[int]]] = []
    copy = device._copies.copy

    def noted(sources: torch.Tensor, targets: torch.Tensor) -> None:
        copied.append((sources.tolist(), targets.tolist()))
        copy(sources, targets)

    monkeypatch.setattr(device._copies, "copy", noted)
    swapped: list[BlockPairs] = []
    swap = device._copies.swap

    def noted_swap(pairs: BlockPairs, own: torch.Tensor) -> None:
        swapped.append(pairs)
        swap(pairs, own)

    monkeypatch.setattr(device._copies, "swap", noted_swap)
    make_ready(device)
    # What copies blocks and what swaps them is loaded, too.
    assert copied == [([0], [0])]
    assert swapped == [((0, 32), (32, 0))]
    assert attention.steps[-1] == ([37, 1, 1, 1], [64] * 4)
    assert not device.rows.state.is_live.any()
    answers = []
    for stepper in (model.in_turns(), _ahead(device)):
        scheduler = MiniScheduler(LIMITS)
        for prompt in ([5, 6, 7], list(range(9, 40))):
            scheduler.submit(prompt, sampling(max_tokens=6))
        play(stepper, scheduler, lambda: 1 << 30)
        answers.append(scheduler.outputs)
    assert answers[0] == answers[1]


def _ahead(device: Any) -> OneAhead:
    return OneAhead(Rows(LIMITS), device)


def test_the_worst_step_wants_whatever_can_be_wanted() -> None:
    step = worst_step(LIMITS)
    assert step.prompt_logprobs is not None
    assert step.token_count == LIMITS.step_tokens
    assert (step.context_lengths == LIMITS.context_tokens).all()
    assert (step.sampling.logprobs == 32).all()
    assert step.sampling.edits() is not None
    np.testing.assert_array_equal(step.prompt_logprobs.positions, step.prompt_logprobs.computed + 1)


def test_no_buffer_is_pinned_after_the_start(model: Model) -> None:
    """Whatever the steps ask for."""

    class Counting(CpuStreams):
        pinned = 0

        def host_buffer(self, size_bytes: int) -> torch.Tensor:
            self.pinned += 1
            return super().host_buffer(size_bytes)

    streams = Counting()
    device = GraphRunner(*model.decoder(), LIMITS, streams, host_blocks=model.host_blocks())
    before = streams.pinned
    make_ready(device)
    scheduler = MiniScheduler(LIMITS, lease_steps=3)
    for index in range(6):
        bias = tuple((token, 0.1) for token in range(90))
        scheduler.submit(
            [5, 6, 7 + index],
            sampling(max_tokens=5, logprobs=20, prompt_logprobs=20, logit_bias=bias),
        )
    play(_ahead(device), scheduler, lambda: 1 << 30)
    assert not scheduler.errors
    assert streams.pinned == before > 0


def test_the_thread_that_computes_takes_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it computes first, it computes there."""
    told: list[str] = []

    class Played(CpuStreams):
        def take_thread(self) -> None:
            told.append(threading.current_thread().name)

    def computed(compute: Any, limits: RowLimits) -> None:
        told.append("warm-up")

    monkeypatch.setattr(loading, "streams_for", lambda device: Played())
    model = str(write_random_model(tmp_path / "tiny", seed=3))
    monkeypatch.setattr(loading, "warm_up", computed)
    settings = WorkerSettings(model=model, device="cpu", slots=2, kv_blocks=64, threads=1)
    loaded = loading.load(settings)
    told.clear()
    rows = Rows(loaded.limits, loaded.grammars)
    engine = Engine(rows, loaded.runner, on_crash=lambda error: None)
    engine.start(loaded.warm_up_thread).result(timeout=280)
    engine.stop()
    assert told == ["compute", "warm-up"]


def test_the_thread_that_computes_launches_one_by_one_too(model: Model) -> None:
    """Libraries give a thread its handles when it first asks, and recorded steps ask for none."""
    device = model.resident()
    is_graph: list[bool] = []
    launch = device.launch

    def noted(step: StepInputs) -> Any:
        flight = launch(step)
        is_graph.append(flight.result().is_graph)
        return flight

    device.launch = noted  # type: ignore[method-assign]
    loading.warm_up_thread(CpuStreams(), device, LIMITS)
    assert is_graph.count(False) == 1
    assert is_graph.count(True) >= 4
    assert not device.rows.state.is_live.any()


def test_what_it_meets_is_a_sentence(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    device = model.resident()

    def full(step: StepInputs) -> Any:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")

    device.launch = full  # type: ignore[method-assign]
    said = r"GPU fails while the worker starts .*computing thread: .*ALLOC_FAILED"
    with pytest.raises(ConfigError, match=said):
        loading.warm_up_thread(CpuStreams(), device, LIMITS)


def test_a_gpu_is_taken_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    cuda = object.__new__(CudaStreams)
    cuda.device = torch.device("cuda:1")
    cuda.take_thread()
    assert taken == [torch.device("cuda:1")]


def test_each_kernel_that_is_compiled_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Callable[[str], None]] = []
    monkeypatch.setattr(jit, "watch_compiles", notes.append)
    loading.tell_compiles()
    (note,) = notes
    with capture_logs() as logs:
        note("attend_kernel [('*bf16', 'D')]")
        note("_plan_kernel []")
    told = [(entry["event"], entry["kernel"], entry["done"]) for entry in logs]
    assert told == [
        ("worker.compiled", "attend_kernel", 1),
        ("worker.compiled", "_plan_kernel", 2),
    ]
