"""Launches under watch: clean ones pass, each kind of violation ends the worker and says why."""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import AheadRunner, BlockPairs, RowChanges, StepInputs
from gpu_worker.runner.device_streams import CpuStreams, HostWaited, _wait_for
from gpu_worker.runner.dummy_steps import step_of
from gpu_worker.runner.engine import Engine
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.step_watch import CudaCounters, StepViolation, Watched
from gpu_worker.runner.stepping import OneAhead
from gpu_worker.service.device_selection import choose_watch
from gpu_worker.settings import WorkerSettings
from kernels import dispatch, jit
from service_kit.errors import ConfigError
from tests.support import warm_python
from tests.support.ahead import Model, play
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=4, context_tokens=40, step_tokens=24, block_size=4, block_count=40, vocab_size=97
)
NEVER_CUT = 1 << 30
ROOT = Path(__file__).parents[4]


class Played:
    """Counters that a test moves, and a host that waits where a test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.kernels: list[str] = []
        self.is_launching = False

    def memory_asked(self) -> int:
        return self.asked

    def compiled(self) -> Sequence[str]:
        return self.kernels

    @contextmanager
    def unwaiting(self) -> Iterator[None]:
        assert not self.is_launching
        self.is_launching = True
        try:
            yield
        finally:
            self.is_launching = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        was_launching, self.is_launching = self.is_launching, False
        yield
        self.is_launching = was_launching

    def wait(self) -> None:
        if self.is_launching:
            raise HostWaited("the host was about to wait for the device")

    def compile(self) -> None:
        self.kernels.append("_rank_kernel [...]")

    def ask(self) -> None:
        self.asked += 2


class Misbehaving:
    """A device that does something beside its work, at launches of `tokens` or plans of copies."""

    def __init__(self, device: GraphRunner, beside: Callable[[], None], tokens: int) -> None:
        self._device = device
        self._beside = beside
        self._tokens = tokens

    def clear(self) -> None:
        self._device.clear()

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        self._device.apply(changes, swaps, copies)
        if copies:
            self._beside()

    def launch(self, step: StepInputs) -> Any:
        flight = self._device.launch(step)
        if step.token_count == self._tokens:
            self._beside()
        return flight

    def finish(self) -> None:
        # Nobody launches: the host may wait.
        self._beside()


@pytest.fixture(scope="module", autouse=True)
def reference_path() -> Iterator[None]:
    dispatch.force("torch")
    yield
    dispatch.force(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_random_model(tmp_path_factory.mktemp("model") / "tiny", seed=3), LIMITS)


def asked() -> MiniScheduler:
    scheduler = MiniScheduler(LIMITS, lease_steps=3)
    for index, prompt in enumerate(([5, 6, 7, 8, 9], [11], [20, 21, 22])):
        scheduler.submit(prompt, sampling(max_tokens=6, temperature=0.9, seed=index))
    return scheduler


def test_clean_steps_are_as_without_a_watch(model: Model) -> None:
    plain, watched = asked(), asked()
    play(model.one_ahead(), plain, lambda: NEVER_CUT)
    counters = Played()
    # What happened before is nobody's fault.
    counters.compile()
    counters.ask()
    device = Watched(model.resident(), counters)
    assert isinstance(device, AheadRunner)
    play(OneAhead(Rows(LIMITS), device), watched, lambda: NEVER_CUT)
    assert watched.outputs == plain.outputs
    assert not watched.errors


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("compile", r"compiled _rank_kernel \[...\]"),
        ("ask", "asked the device for memory 2 times"),
        ("wait", "the host was about to wait for the device"),
    ],
)
def test_a_violation_names_the_step_and_what_happened(model: Model, name: str, reason: str) -> None:
    counters = Played()
    device = Watched(Misbehaving(model.resident(), getattr(counters, name), 3), counters)
    device.launch(step_of([4], LIMITS)).result()
    device.finish()
    with pytest.raises(StepViolation, match=rf"a step of 2 rows with 3 tokens: {reason}$"):
        device.launch(step_of([2, 1], LIMITS))
    assert not counters.is_launching


def test_everything_that_happened_is_told(model: Model) -> None:
    counters = Played()

    def all_at_once() -> None:
        counters.compile()
        counters.ask()
        counters.wait()

    device = Watched(Misbehaving(model.resident(), all_at_once, 3), counters)
    with pytest.raises(StepViolation, match=r"compiled .*; asked .*; the host was about to wait"):
        device.launch(step_of([3], LIMITS))


def test_a_plan_s_changes_are_watched_too(model: Model) -> None:
    counters = Played()
    device = Watched(Misbehaving(model.resident(), counters.ask, 0), counters)
    rows = Rows(LIMITS)
    plan = asked().next_plan()
    assert plan is not None
    rows.apply(plan)
    changes = rows.changes(plan)
    device.apply(changes, (), ())
    with pytest.raises(
        StepViolation, match="changes of 3 rows with 0 block swaps and 1 copies: asked"
    ):
        device.apply(changes, (), ((0, 1),))


def test_a_violation_ends_the_worker_and_fails_no_row(model: Model) -> None:
    """Unlike a launch that fails, which would be tried again row by row."""

    class Listener:
        def on_result(self, result: StepResult) -> None:
            assert not result.outcome.errors

        def on_opened(self) -> None:
            pass

        def on_refused(self, error: Exception) -> None:
            raise AssertionError("the plan is fine")

    counters = Played()
    device = Watched(Misbehaving(model.resident(), counters.wait, 9), counters)
    crashes: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    with capture_logs() as logs:
        engine = Engine(Rows(LIMITS), device, on_crash=crashes.put)
        engine.start().result(timeout=280)
        listener = Listener()
        plan = asked().next_plan()
        assert plan is not None
        engine.open(listener)
        engine.submit(listener, plan)
        crash = crashes.get(timeout=280)
        engine.stop()
    assert isinstance(crash, StepViolation)
    assert str(crash).startswith("after Ready, a step of 3 rows with 9 tokens: ")
    assert crash.__notes__ == [f"while plan {plan.plan_id} was run"]
    assert [entry["event"] for entry in logs] == ["engine.crashed"]


class _Torch:
    """What of torch.cuda the counters use, on a machine that has no GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode: int | str = 1
        self.allocations = 7
        monkeypatch.setattr(jit, "watch_compiles", lambda note: None)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self._set)
        monkeypatch.setattr(
            torch.cuda,
            "memory_stats_as_nested_dict",
            lambda device: {"num_device_alloc": self.allocations},
        )

    def _set(self, mode: int | str) -> None:
        self.mode = {"error": 2}.get(str(mode), mode)


def test_torch_refuses_to_wait_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    played = _Torch(monkeypatch)
    counters = CudaCounters(torch.device("cuda:0"))

    def failing(words: str) -> None:
        with counters.unwaiting():
            assert played.mode == 2
            raise RuntimeError(words)

    with pytest.raises(HostWaited):
        failing("called a synchronizing CUDA operation")
    assert played.mode == 1
    # What else fails is a step's own failure.
    with pytest.raises(RuntimeError, match="no memory"):
        failing("no memory")
    assert played.mode == 1
    assert counters.memory_asked() == 7


def test_a_wait_for_an_upload_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which torch's own debug mode knows nothing."""

    class Event:
        is_done, waits = False, 0

        def query(self) -> bool:
            return self.is_done

        def synchronize(self) -> None:
            self.waits += 1

    _Torch(monkeypatch)
    counters = CudaCounters(torch.device("cuda:0"))
    event: Any = Event()
    _wait_for(event)
    with pytest.raises(HostWaited, match="wait for a copy"), counters.unwaiting():
        _wait_for(event)
    assert event.waits == 1
    event.is_done = True
    with counters.unwaiting():
        _wait_for(event)
    assert event.waits == 2


_COMPILES = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Elsewhere:
    # As much of a driver as compiling takes.
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Elsewhere())
from kernels import jit
from kernels.norms_rope.gate_mul import _gate_mul_kernel
told = []
jit.watch_compiles(told.append)
x = torch.zeros(2, 64)
for inner in (32, 48, 24):
    parts = {"IS_GELU": False, "BLOCK": 32, "PDL": False}
    _gate_mul_kernel.warmup(x, x, inner, x.stride(0), **parts, grid=(2, 1))
print(*told, sep="\\n")
"""


def test_triton_tells_of_each_compile_once(tmp_path: Path) -> None:
    """Triton itself compiles here, for a processor that is elsewhere."""
    pytest.importorskip("triton", reason="no triton here")
    environ = {"KAITEN_TRITON": "1", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = warm_python.run("-c", _COMPILES, imports=warm_python.TORCH, environ=environ)
    assert done.code == 0, done.err[-4000:]
    told = done.out.splitlines()
    # Divisible by 16 twice, then not.
    assert len(told) == 2
    assert all(line.startswith("_gate_mul_kernel [('*fp32', 'D'), ") for line in told)
    assert "('i32', 'D')" in told[0]
    assert "('i32', '')" in told[1]


def test_a_cpu_has_nothing_to_watch() -> None:
    cpu = CpuStreams().device
    assert not WorkerSettings(model="m").watch_steps
    assert not choose_watch(cpu, is_asked=False)
    assert choose_watch(torch.device("cuda"), is_asked=True)
    with pytest.raises(ConfigError, match="--watch-steps is for GPUs"):
        choose_watch(cpu, is_asked=True)
