"""What distance costs a fast device: its scheduler in the same process, across gRPC, and 2 ms away.

    python -m benchmarks.serving.distance [--save]

The device is paced: a step takes as long as the floor of an H200 says (the rates below), without
using a core, and begins when the step before it is done and it has been launched. All else is the
worker's and the scheduler's own: plans, leases, rows, one step ahead of the host. So the figures
say how long a device of that speed would wait for Python and for messages; they say nothing of
kernels. 256 requests at once, input and output lengths uniform from 100 to 1024, seed 0.

idle   of the time from the first launch to the last result, the part without a step to compute
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import torch

from benchmarks.gpu.across_grpc import served
from benchmarks.gpu.crowd import Crowd, Job, jobs_uniform
from benchmarks.gpu.in_process import compute_in_process
from benchmarks.gpu.models import LLAMA_8B, QWEN3_06B, Shape, limits_of
from benchmarks.recording import record
from gpu_worker.batch.step_types import BlockPairs, RowChanges, StepInputs, StepSamples

# Of an H200, on random data.
READ_BYTES_PER_S: Final = 4.5e12
FLOPS_PER_S: Final = 790e12
SLOTS, STEP_TOKENS, CONTEXT_TOKENS = 256, 4096, 2048
DELAYS_MS: Final = (0, 2)
TOKEN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    rows: int
    step_s: float
    due_s: float

    @property
    def is_done(self) -> bool:
        return time.perf_counter() >= self.due_s

    def result(self) -> StepSamples:
        if (rest_s := self.due_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return StepSamples(
            token_ids=np.full(self.rows, TOKEN),
            is_ok=np.ones(self.rows, np.bool_),
            logprob_rows=np.empty(0, np.int64),
            logprob=np.empty(0, np.float32),
            top_token_ids=np.empty((0, 0), np.int64),
            top_logprobs=np.empty((0, 0), np.float32),
            forward_us=int(self.step_s * 1e6),
            sample_us=0,
        )


class PacedDevice:
    """Computes nothing, in the time that the floor says."""

    def __init__(self, shape: Shape) -> None:
        self.limits = limits_of(shape, slots=SLOTS, context=CONTEXT_TOKENS, step_tokens=STEP_TOKENS)
        self._weights_s = 2 * shape.parameters / READ_BYTES_PER_S
        self._token_s = 2 * shape.parameters / FLOPS_PER_S
        self._position_s = shape.kv_bytes(torch.bfloat16) / READ_BYTES_PER_S
        self.clear()

    def clear(self) -> None:
        """As new: nothing was launched."""
        self.steps, self.busy_s, self._first_s, self._free_s = 0, 0.0, 0.0, 0.0

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        """Rows of forced lengths end where the host expects it: there is nothing to know."""

    def finish(self) -> None:
        pass

    def launch(self, step: StepInputs) -> _Flight:
        now_s = time.perf_counter()
        if not self.steps:
            self._first_s = now_s
        compute_s = max(self._weights_s, self._token_s * step.token_count)
        step_s = compute_s + self._position_s * int(step.context_lengths.sum())
        self._free_s = max(now_s, self._free_s) + step_s
        self.busy_s += step_s
        self.steps += 1
        return _Flight(rows=len(step.sampled_rows), step_s=step_s, due_s=self._free_s)

    @property
    def idle(self) -> float:
        return 1 - self.busy_s / (self._free_s - self._first_s)


def in_process(device: PacedDevice, jobs: list[Job]) -> float:
    """Tokens per second."""
    crowd = Crowd(device.limits, jobs)
    started_s = time.perf_counter()
    compute_in_process(device, crowd)
    return crowd.tokens / (time.perf_counter() - started_s)


def away(delay_ms: int) -> Callable[[PacedDevice, list[Job]], float]:
    """Tokens per second; the scheduler is another process, messages travel for so long."""
    return lambda device, jobs: asyncio.run(served(device, jobs, delay_ms))["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    ways: dict[str, Callable[[PacedDevice, list[Job]], float]] = {"in process": in_process}
    ways |= {f"gRPC, {delay_ms} ms": away(delay_ms) for delay_ms in DELAYS_MS}
    for shape in (LLAMA_8B, QWEN3_06B):
        jobs = jobs_uniform(chosen.requests, 100, 1024, shape.vocab)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        idle: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(chosen.rounds):
            for name, way in ways.items():
                device = PacedDevice(shape)
                rates[name].append(way(device, jobs))
                idle[name].append(device.idle)
        for name in ways:
            figures = {
                "shape": shape.name,
                "what": name,
                "requests": chosen.requests,
                "rounds": chosen.rounds,
                "tokens_per_s": round(median(rates[name])),
                "of_in_process": round(median(rates[name]) / median(rates["in process"]), 3),
                "idle": round(median(idle[name]), 4),
            }
            record("distance", figures, save=chosen.save)


if __name__ == "__main__":
    main()
