"""The compute thread beside a device that is slower than the next plan is."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import InvalidPlan, StepOutcome, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import BlockPairs, RowChanges, StepInputs, StepSamples
from gpu_worker.runner.engine import Engine
from tests.support.mini_scheduler import MiniScheduler, sampling

LIMITS = RowLimits(
    slots=2, context_tokens=64, step_tokens=8, block_size=4, block_count=32, vocab_size=97
)
WAIT_S = 60.0


class _Held:
    """A step that is done when the test says so."""

    def __init__(self, step: StepInputs) -> None:
        self.rows = len(step.sampled_rows)
        self.landing = threading.Event()

    @property
    def is_done(self) -> bool:
        return self.landing.is_set()

    def result(self) -> StepSamples:
        assert self.landing.wait(WAIT_S)
        return StepSamples(
            token_ids=np.full(self.rows, 5),
            is_ok=np.ones(self.rows, np.bool_),
            logprob_rows=np.empty(0, np.int64),
            logprob=np.empty(0, np.float32),
            top_token_ids=np.empty((0, 0), np.int64),
            top_logprobs=np.empty((0, 0), np.float32),
            forward_us=0,
            sample_us=0,
        )


class _HeldDevice:
    def __init__(self) -> None:
        self.launched: queue.SimpleQueue[_Held] = queue.SimpleQueue()

    def clear(self) -> None:
        pass

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        pass

    def finish(self) -> None:
        pass

    def launch(self, step: StepInputs) -> _Held:
        held = _Held(step)
        self.launched.put(held)
        return held


class _Session:
    def __init__(self) -> None:
        self.results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()

    def on_result(self, result: StepResult) -> None:
        self.results.put(result)

    def on_opened(self) -> None:
        pass

    def on_refused(self, error: InvalidPlan) -> None:
        raise error


@pytest.fixture
def device() -> _HeldDevice:
    return _HeldDevice()


@pytest.fixture
def engine(device: _HeldDevice) -> Iterator[Engine]:
    crashes: list[Exception] = []
    engine = Engine(Rows(LIMITS), device, on_crash=crashes.append)
    engine.start()
    yield engine
    engine.stop()
    assert not crashes


def test_a_plan_that_comes_during_a_step_is_launched_behind_it(
    engine: Engine, device: _HeldDevice
) -> None:
    session, scheduler = _Session(), MiniScheduler(LIMITS, chunk_tokens=4, lease_steps=1)
    engine.open(session)
    scheduler.submit([3] * 12, sampling(max_tokens=1))
    flights = []
    for _ in range(3):
        plan = scheduler.next_plan()
        assert plan is not None
        engine.submit(session, plan)
        scheduler.on_outcome(plan, 0, StepOutcome(slots=(), token_ids=()))
        flights.append(device.launched.get(timeout=WAIT_S))
        if len(flights) > 1:
            # The step before is done only now: the next one was launched without it.
            assert session.results.empty()
            flights[-2].landing.set()
            session.results.get(timeout=WAIT_S)
    assert flights[-1].rows == 1
    flights[-1].landing.set()
    # And the last one is told of although no plan follows.
    assert session.results.get(timeout=WAIT_S).outcome.token_ids == (5,)


def test_a_step_in_the_air_that_does_not_land_is_seen(engine: Engine, device: _HeldDevice) -> None:
    """Although the thread itself waits for commands meanwhile."""
    session, scheduler = _Session(), MiniScheduler(LIMITS, chunk_tokens=4, lease_steps=1)
    assert engine.at_it_ns == 0
    engine.open(session)
    scheduler.submit([3] * 4, sampling(max_tokens=1))
    plan = scheduler.next_plan()
    assert plan is not None
    engine.submit(session, plan)
    held = device.launched.get(timeout=WAIT_S)
    wait_for(lambda: engine.at_it_ns > 20_000_000)
    held.landing.set()
    session.results.get(timeout=WAIT_S)
    wait_for(lambda: engine.at_it_ns == 0)


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


class _Panic(BaseException):
    """As a library written in Rust raises it."""


class _NoMemory:
    def critical(self, _event: str, **_fields: object) -> None:
        raise MemoryError


class _PanickingDevice(_HeldDevice):
    def launch(self, step: StepInputs) -> _Held:
        raise _Panic("index out of bounds")


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_panic_in_a_step_is_a_crash_that_is_told(
    has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing can be logged of it any more."""
    crashes: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    if not has_memory:
        monkeypatch.setattr("gpu_worker.runner.engine.log", _NoMemory())
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = Engine(Rows(LIMITS), _PanickingDevice(), on_crash=crashes.put)
    engine.start()
    session, scheduler = _Session(), MiniScheduler(LIMITS)
    engine.open(session)
    scheduler.submit([3] * 4, sampling(max_tokens=1))
    plan = scheduler.next_plan()
    assert plan is not None
    engine.submit(session, plan)
    assert str(crashes.get(timeout=WAIT_S)) == "_Panic: index out of bounds"
    engine.stop()
