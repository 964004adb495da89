"""What every kernel benchmark shares: timing, and the machine's ceilings measured in the run."""

import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import recording
from kernels import native
from kernels.linear import weight_memory
from kernels.linear.packed_linear import PackedLinear

Clock = Callable[[], float]


def times_s(
    run: Callable[[], object], *, repeats: int = 15, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """(best, median) seconds: the median is the figure, the best tells how busy the machine was."""
    run()
    seconds = []
    for _ in range(repeats):
        start = clock()
        run()
        seconds.append(clock() - start)
    return min(seconds), statistics.median(seconds)


def read_bytes_per_s(clock: Clock = time.perf_counter) -> float:
    """Best reading rate of 256 MiB on large pages, by a sum.

    The best: with neighbours both threads may share a core for a while. On pages of 4 KiB it is a
    fifth less here, and a step that keeps its weights on large ones seemed faster than memory.
    """
    x = weight_memory.empty((64 * 2**20,), torch.float32).fill_(1)
    return x.numel() * 4 / times_s(lambda: x.sum(), repeats=15, clock=clock)[0]


def matmul_flops_per_s(
    dtype: torch.dtype, size: int = 1024, clock: Clock = time.perf_counter
) -> float:
    """Best rate of a square product in this dtype, through the path PackedLinear takes."""
    layer, x = PackedLinear(torch.randn(size, size).to(dtype)), torch.randn(size, size).to(dtype)
    return 2 * size**3 / times_s(lambda: layer(x), repeats=15, clock=clock)[0]


def record(kernel: str, **fields: object) -> None:
    """One JSON line, printed and appended to benchmarks/results/kernels_cpu.jsonl."""
    machine = {
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 1),
        "native": native.reason(),
    }
    recording.record("kernels_cpu", {"kernel": kernel, **fields, **machine}, save=True)
