"""A crowd through a worker's engine in this process: everything but the wire."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.gpu.crowd import Crowd
from benchmarks.serving.one_process import to_core, to_worker
from gpu_worker.batch import plans
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import AheadRunner, StepInputs, StepSamples
from gpu_worker.runner.dummy_steps import worst_step
from gpu_worker.runner.engine import Engine
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.warm_up import warm_up


class CrowdDevice(AheadRunner, Protocol):
    """A device, and the crowd that it has room for."""

    @property
    def limits(self) -> RowLimits: ...


class _Listener:
    """A stream without a wire."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[plans.StepResult | Exception | None] = queue.SimpleQueue()

    def on_result(self, result: plans.StepResult) -> None:
        self.said.put(result)

    def on_opened(self) -> None:
        self.said.put(None)

    def on_refused(self, error: plans.InvalidPlan) -> None:
        self.said.put(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What steps came out, in order, in how long."""

    steps: list[plans.StepResult]
    seconds: float


def compute_in_process(
    device: AheadRunner, crowd: Crowd, first: Callable[[], None] = lambda: None
) -> Computed:
    """Every job to its end. `first` runs before, untimed, on the thread that computes."""
    crashes: list[Exception] = []
    listener = _Listener()

    def crashed(error: Exception) -> None:
        crashes.append(error)
        listener.said.put(error)

    engine = Engine(Rows(crowd.limits), device, on_crash=crashed)
    engine.start(first).result()
    engine.open(listener)
    results: list[plans.StepResult] = []
    listener.said.get()
    started_s = time.perf_counter()
    try:
        while not crowd.is_done:
            crowd.arrive(time.perf_counter() - started_s)
            while (plan := crowd.next_plan()) is not None:
                engine.submit(listener, to_worker(plan, crowd.output_of))
            due_s, now_s = crowd.next_due_s, time.perf_counter() - started_s
            try:
                said = listener.said.get(timeout=None if due_s is None else max(0, due_s - now_s))
            except queue.Empty:
                continue
            crowd.arrive(time.perf_counter() - started_s)
            if isinstance(said, Exception):
                raise said
            assert said is not None
            results.append(said)
            crowd.take(to_core(said.plan_id, said.step, said.outcome, is_last=said.is_last))
        seconds = time.perf_counter() - started_s
    finally:
        engine.stop()
    return Computed(steps=results, seconds=seconds)


def settle(device: GraphRunner) -> Callable[[], None]:
    """What the libraries keep for each thread, taken before the first request: by steps of every
    kind, and by one that is not recorded.
    """

    def compute(step: StepInputs) -> StepSamples:
        return device.launch(step).result()

    def first() -> None:
        warm_up(compute, device.limits)
        compute(worst_step(device.limits))

    return first
