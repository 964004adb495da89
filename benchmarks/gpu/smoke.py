"""Does anything run here? Each kernel once, one recorded step, one small worker: under a minute.

It comes first and alone. A wrong kernel, or a GPU that records nothing, is known before six
processes compile for minutes; and torch, read from a disk that may be cold, is read once.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.correctness import BOUNDS, CHECKS, _error
from benchmarks.gpu.crowd import Crowd, jobs_uniform
from benchmarks.gpu.in_process import compute_in_process, settle
from benchmarks.gpu.models import TINY_QWEN3, limits_of, random_weights, resident
from benchmarks.gpu.steps import quick_on_cpu
from gpu_worker.model.weights import Weights
from gpu_worker.runner.device_streams import streams_for
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.warm_up import make_ready
from kernels.norms_rope.rms_norm import rms_norm, rms_norm_reference

JOBS, SHORTEST, LONGEST = 3, 3, 9


def kernels(bench: Bench) -> None:
    """Small shapes; `correctness.kernels` has those of models."""
    small, wrong = replace(bench, is_tiny=True), []
    for name, check in CHECKS.items():
        started_s = time.perf_counter()
        error = max(_error(own, known) for own, known in check(small))
        bound = 0.0 if name == "sampling" else BOUNDS[bench.dtype]
        seconds = time.perf_counter() - started_s
        bench.row("smoke", what=name, seconds=seconds, error=error, ok=error <= bound)
        wrong += [] if error <= bound else [f"{name} is off by {error}, more than {bound}"]
    assert not wrong, "; ".join(wrong)


def graph(bench: Bench) -> None:
    """A kernel, recorded as steps are and launched again over another input."""
    started_s = time.perf_counter()
    streams = streams_for(bench.device)
    x, weight = torch.ones(4, 48, device=bench.device), torch.ones(48, device=bench.device)
    out = torch.zeros_like(x)

    def launch() -> None:
        out.copy_(rms_norm(x, weight, 1e-5))

    streams.finish()
    with streams.computing():
        again = streams.record(launch)
        x.copy_(torch.arange(x.numel(), device=bench.device).view_as(x))
        again()
    streams.finish()
    error = _error(out, rms_norm_reference(x, weight, 1e-5))
    seconds = time.perf_counter() - started_s
    bench.row("smoke", what="graph", seconds=seconds, error=error, ok=error <= 2e-5)
    assert error <= 2e-5, f"a recorded kernel is off by {error}"


def worker(bench: Bench) -> None:
    """A tiny model's tokens, recorded and unrecorded: the same, in float32."""
    exact, started_s = replace(bench, dtype=torch.float32), time.perf_counter()
    with quick_on_cpu(bench):
        weights = random_weights(TINY_QWEN3, exact)
        recorded, unrecorded = (
            _outputs(weights, exact, ready) for ready in (make_ready, lambda runner: None)
        )
    agreed = sum(a == b for a, b in zip(recorded, unrecorded, strict=True))
    seconds = time.perf_counter() - started_s
    bench.row("smoke", what="worker", seconds=seconds, rows=JOBS, agreed=agreed, ok=agreed == JOBS)
    assert agreed == JOBS, f"{agreed} of {JOBS} outputs of recorded steps are those of others"


def _outputs(
    weights: Weights, bench: Bench, ready: Callable[[GraphRunner], None]
) -> list[list[int]]:
    limits = limits_of(TINY_QWEN3, slots=4, context=32, step_tokens=16)
    runner = resident(TINY_QWEN3, weights, limits, bench, ready=ready)
    crowd = Crowd(limits, jobs_uniform(JOBS, SHORTEST, LONGEST, TINY_QWEN3.vocab))
    compute_in_process(runner, crowd, settle(runner))
    return crowd.outputs
