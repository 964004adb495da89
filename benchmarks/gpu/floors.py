"""What the device can do at best: reading memory, multiplying matrices. On random data.

A share of a ceiling says little if the ceiling is low, so each is the best of several readings.
"""

from functools import cache, partial

import torch

from benchmarks.gpu.bench import Bench


@cache
def floors(bench: Bench) -> tuple[float, float]:
    """(bytes per second read, operations per second of a large product): once in a process."""
    side = bench.sized(8192, 64)
    pairs = [
        [torch.randn(side, side, device=bench.device, dtype=bench.dtype) for _ in range(2)]
        for _ in range(bench.sized(3, 1))
    ]
    flops = 2 * side**3 / bench.seconds([partial(torch.matmul, a, b) for a, b in pairs], of=min)
    return max(summed(bench), copied(bench)), flops


def summed(bench: Bench) -> float:
    """Bytes per second of a sum over much more than any cache holds."""
    size = bench.sized(1 << 30, 1 << 16)
    data = [torch.randn(size // 4, device=bench.device) for _ in range(bench.sized(3, 1))]
    return size / bench.seconds([partial(torch.sum, x) for x in data], of=min)


def copied(bench: Bench) -> float:
    """The same of a copy, which moves each byte twice."""
    size = bench.sized(1 << 30, 1 << 16)
    data = [torch.randn(size // 4, device=bench.device) for _ in range(bench.sized(3, 1))]
    target = torch.empty_like(data[0])
    return 2 * size / bench.seconds([partial(target.copy_, x) for x in data], of=min)


def measured(bench: Bench) -> None:
    read, flops = floors(bench)
    bench.row("floors", what="read", tb_per_s=read / 1e12)
    for what, rate in (("sum", summed(bench)), ("copy", copied(bench))):
        bench.row("floors", what=what, tb_per_s=rate / 1e12)
    bench.row("floors", what=f"matmul {bench.dtype}", tflops=flops / 1e12)
