"""A device a step ahead that refuses a launch, or fails while it computes: who pays for it."""

import gc
import queue
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import Plan, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import (
    BlockPairs,
    DeviceLost,
    Flight,
    RowChanges,
    StepInputs,
    StepSamples,
)
from gpu_worker.runner.device_streams import CpuStreams, CudaStreams, NotRecorded, _Fetching
from gpu_worker.runner.engine import Engine
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.stepping import OneAhead
from gpu_worker.runner.warm_up import make_ready
from kernels import dispatch
from tests.support.ahead import Model, play, replay
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=4, context_tokens=40, step_tokens=24, block_size=4, block_count=40, vocab_size=97
)
PROMPTS = ([5, 6, 7, 8, 9], [11], [20, 21, 22], [30, 31, 32, 33, 34, 35, 36])
NEVER_CUT = 1 << 30
Refusal = Callable[[StepInputs], Exception | None]


class Refusing:
    """A device whose launches fail as told, after half of the work was launched."""

    def __init__(self, device: GraphRunner, refusal: Refusal) -> None:
        self._device = device
        self._refusal = refusal
        self.is_lost = False
        self.refused = 0

    def clear(self) -> None:
        self._raise_if_lost()
        self._device.clear()

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        self._raise_if_lost()
        self._device.apply(changes, swaps, copies)

    def launch(self, step: StepInputs) -> Flight:
        if (error := self._refusal(step)) is not None:
            self.refused += 1
            raise error
        return self._device.launch(step)

    def finish(self) -> None:
        if self.is_lost:
            raise DeviceLost("the GPU failed")
        self._device.finish()

    def _raise_if_lost(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: earlier kernel")


@pytest.fixture(scope="module", autouse=True)
def reference_path() -> Iterator[None]:
    dispatch.force("torch")
    # Each refusal is logged with all its frames.
    with capture_logs():
        yield
    dispatch.force(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_random_model(tmp_path_factory.mktemp("model") / "tiny", seed=3), LIMITS)


@pytest.fixture(scope="module")
def undisturbed(model: Model) -> list[list[int]]:
    scheduler = asked()
    play(model.in_turns(), scheduler, lambda: NEVER_CUT)
    return [scheduler.outputs[sequence_id] for sequence_id in range(len(PROMPTS))]


def asked(lease_steps: int = 3) -> MiniScheduler:
    """Some stop by themselves, one looks at its own tokens."""
    scheduler = MiniScheduler(LIMITS, lease_steps=lease_steps)
    stops = tuple(range(0, 97, 4))
    for index, prompt in enumerate(PROMPTS):
        changes: dict[str, Any] = {"temperature": 0.9, "seed": index, "max_tokens": 9}
        if index == 1:
            changes["stop_token_ids"] = stops
        scheduler.submit(prompt, sampling(**changes))
    return scheduler


def never(step: StepInputs) -> None:
    return None


def together(step: StepInputs) -> Exception | None:
    """There is memory for one row, and no more."""
    return torch.OutOfMemoryError("no memory") if step.row_count > 1 else None


def test_what_fails_together_and_not_alone_disturbs_nobody(
    model: Model, undisturbed: list[list[int]]
) -> None:
    device = Refusing(model.resident(), together)
    scheduler = asked()
    play(OneAhead(Rows(LIMITS), device), scheduler, lambda: NEVER_CUT)
    assert [scheduler.outputs[sequence_id] for sequence_id in range(len(PROMPTS))] == undisturbed
    assert not scheduler.errors
    assert device.refused > 3


def test_a_row_that_fails_alone_fails_nobody_else(
    model: Model, undisturbed: list[list[int]]
) -> None:
    def refusal(step: StepInputs) -> Exception | None:
        is_late = bool((step.sequence_ids == 2).any()) and int(step.context_lengths.max()) > 6
        return ValueError("a number too many") if is_late else None

    scheduler = asked()
    play(OneAhead(Rows(LIMITS), Refusing(model.resident(), refusal)), scheduler, lambda: NEVER_CUT)
    for sequence_id in (0, 1, 3):
        assert scheduler.outputs[sequence_id] == undisturbed[sequence_id]
    known = scheduler.outputs[2]
    assert known == undisturbed[2][: len(known)]
    assert scheduler.errors == {2: "the step failed for this row: ValueError"}


@given(data=st.data(), lease=st.integers(1, 5))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_launches_fail_at_any_time(model: Model, data: st.DataObject, lease: int) -> None:
    """Also while a step is on its way, of this plan or the one before."""
    scheduler = asked(lease)
    played = play(model.in_turns(), scheduler, lambda: data.draw(st.integers(1, 6)))

    def refusal(step: StepInputs) -> Exception | None:
        return together(step) if data.draw(st.booleans()) else None

    device = Refusing(model.resident(), refusal)
    replay(OneAhead(Rows(LIMITS), device), played, lambda: data.draw(st.booleans()))


def test_a_device_that_fails_every_row_ends_the_worker(model: Model) -> None:
    device = Refusing(model.resident(), lambda step: RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        play(OneAhead(Rows(LIMITS), device), asked(), lambda: NEVER_CUT)


def test_memory_that_is_full_for_one_row_ends_the_worker(model: Model) -> None:
    """It would fail one request after the other, and be free for the next meanwhile."""

    def full(step: StepInputs) -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def elsewhere(step: StepInputs) -> Exception | None:
        return full(step) if step.row_count > 1 or (step.slots == 2).any() else None

    for refusal in (full, elsewhere):
        with pytest.raises(DeviceLost, match=r"memory is full in a step of one row.*elsewhere"):
            play(
                OneAhead(Rows(LIMITS), Refusing(model.resident(), refusal)),
                asked(),
                lambda: NEVER_CUT,
            )


class Unrecordable(CpuStreams):
    """Of the steps to be recorded the first few are, and then one is not."""

    def __init__(self, first: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = first, error

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().record(run)


def unrecordable(model: Model, first: int, error: Exception) -> GraphRunner:
    return GraphRunner(*model.decoder(), LIMITS, Unrecordable(first, error))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_cannot_be_recorded_is_launched_all_the_same(
    model: Model, undisturbed: list[list[int]], first: int
) -> None:
    error = NotRecorded("CUDA error: operation not permitted when stream is capturing")
    device = unrecordable(model, first, error)
    with capture_logs() as logs:
        make_ready(device)
    (told,) = (entry for entry in logs if entry["event"] == "worker.unrecorded")
    assert "(CUDA error: operation not permitted when stream is capturing)" in told["reason"]
    scheduler = asked()
    play(OneAhead(Rows(LIMITS), device), scheduler, lambda: NEVER_CUT)
    assert [scheduler.outputs[sequence_id] for sequence_id in range(len(PROMPTS))] == undisturbed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), DeviceLost("the GPU failed")])
def test_faults_of_another_kind_end_the_start(model: Model, error: Exception) -> None:
    with pytest.raises(type(error)):
        make_ready(unrecordable(model, 1, error))


def test_a_lost_device_blames_no_row(model: Model) -> None:
    """The launch that notices is innocent, also when it is of one row."""
    scheduler = MiniScheduler(LIMITS)
    scheduler.submit([5, 6], sampling(max_tokens=4))
    device = Refusing(model.resident(), never)

    def refusal(step: StepInputs) -> Exception:
        device.is_lost = True
        return RuntimeError("CUDA error: earlier kernel")

    device._refusal = refusal
    results: list[StepResult] = []
    first = scheduler.next_plan()
    assert first is not None
    with pytest.raises(DeviceLost):
        OneAhead(Rows(LIMITS), device).run(first, 0, results.append, lambda: False)
    assert not results


def test_a_plan_or_a_stream_that_finds_the_device_lost_says_so(model: Model) -> None:
    """Nothing is on its way, so neither a launch nor a wait has told."""
    device = Refusing(model.resident(), never)
    device.is_lost = True
    stepper = OneAhead(Rows(LIMITS), device)
    plan = asked().next_plan()
    assert plan is not None
    with pytest.raises(DeviceLost, match="the GPU failed"):
        stepper.run(plan, 0, lambda result: None, lambda: False)
    with pytest.raises(DeviceLost, match="the GPU failed"):
        stepper.clear()


class _Lost:
    """A step that never comes back."""

    is_done = True

    def result(self) -> StepSamples:
        raise DeviceLost("the GPU failed")


def test_the_engine_ends_by_a_lost_device(model: Model) -> None:
    class Losing(Refusing):
        def launch(self, step: StepInputs) -> Flight:
            return _Lost()

    class Listener:
        def on_result(self, result: StepResult) -> None:
            raise AssertionError("no step was computed")

        def on_opened(self) -> None:
            pass

        def on_refused(self, error: Exception) -> None:
            raise AssertionError("the plan is fine")

    crashes: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    engine = Engine(Rows(LIMITS), Losing(model.resident(), never), on_crash=crashes.put)
    engine.start().result(timeout=280)
    listener = Listener()
    scheduler = MiniScheduler(LIMITS)
    scheduler.submit([5, 6], sampling(max_tokens=4))
    plan: Plan | None = scheduler.next_plan()
    assert plan is not None
    engine.open(listener)
    engine.submit(listener, plan)
    assert isinstance(crashes.get(timeout=280), DeviceLost)
    engine.stop()


def test_an_engine_whose_first_step_fails_is_not_ready(model: Model) -> None:
    def fails() -> None:
        raise ValueError("no handle")

    engine = Engine(Rows(LIMITS), model.resident(), on_crash=lambda error: None)
    with pytest.raises(ValueError, match="no handle"):
        engine.start(fails).result(timeout=280)
    engine.stop()


def test_a_recording_that_breaks_off_is_over_for_the_allocator_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch ends it only where the driver does; and later ones ask the graph of this one."""

    class Graph:
        pass

    broken = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    errors = [broken, broken, torch.OutOfMemoryError("CUDA out of memory")]
    graphs: list[weakref.ref[Graph]] = []
    ended: list[tuple[object, object]] = []

    def graph_of() -> Graph:
        graph = Graph()
        graphs.append(weakref.ref(graph))
        return graph

    @contextmanager
    def recording(graph: Graph, pool: object, stream: object) -> Iterator[None]:
        yield
        raise errors[len(graphs) - 1]

    def end(device: object, pool: object) -> None:
        ended.append((device, pool))
        if len(ended) == 2:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    for name, played in (
        ("Stream", lambda device: None),
        ("graph_pool_handle", lambda: (0, 7)),
        ("synchronize", lambda device: None),
        ("CUDAGraph", graph_of),
        ("graph", recording),
    ):
        monkeypatch.setattr(torch.cuda, name, played)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    streams = CudaStreams(torch.device("cuda", 1))
    for _ in range(2):
        with pytest.raises(NotRecorded, match="previous error during capture"):
            streams.record(lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        streams.record(lambda: None)
    gc.collect()
    assert ended == [(1, (0, 7))] * 3
    assert all(graph() is not None for graph in graphs)


def test_an_error_of_a_wait_says_that_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    event: Any = Event()
    with pytest.raises(DeviceLost, match=r"\(CUDA error: an illegal memory access was enc.*\)"):
        _Fetching([], event, event, event).wait()
