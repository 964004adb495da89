"""What the device can do at best: reading memory, multiplying matrices. On random data."""

from functools import cache, partial

import torch

from benchmarks.gpu.bench import Bench


@cache
def floors(bench: Bench) -> tuple[float, float]:
    """(bytes per second read by a large sum, operations per second of a large product): once."""
    size = bench.sized(1 << 30, 1 << 16)
    data = [torch.randn(size // 4, device=bench.device) for _ in range(bench.sized(3, 1))]
    read = size / bench.seconds([partial(torch.sum, x) for x in data])
    side = bench.sized(8192, 64)
    pairs = [
        [torch.randn(side, side, device=bench.device, dtype=bench.dtype) for _ in range(2)]
        for _ in range(bench.sized(3, 1))
    ]
    flops = 2 * side**3 / bench.seconds([partial(torch.matmul, a, b) for a, b in pairs])
    return read, flops


def measured(bench: Bench) -> None:
    read, flops = floors(bench)
    bench.row("floors", what="read", tb_per_s=read / 1e12)
    bench.row("floors", what=f"matmul {bench.dtype}", tflops=flops / 1e12)


PARTS = (measured,)
