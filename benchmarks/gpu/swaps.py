"""KV blocks to host memory and back: how fast beside the same bytes in one transfer."""

from functools import partial
from typing import Final

import torch

from benchmarks.gpu.bench import Bench, Call
from gpu_worker.runner.block_copies import BlockCopies

# Of Qwen3 0.6B: a block of 16 tokens is 1.8 MB.
LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 28, 8, 16, 128
BLOCKS: Final = 64


def speed(bench: Bench) -> None:
    layers, blocks = bench.sized(LAYERS, 2), bench.sized(BLOCKS, 4)
    tile = (KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pages = torch.zeros((layers, 2, 2 * blocks, *tile), dtype=bench.dtype, device=bench.device)
    host = torch.zeros((blocks, layers, 2, *tile), dtype=bench.dtype, pin_memory=bench.is_gpu)
    on_device = torch.zeros_like(host, device=bench.device)
    # Every second one, so that none is beside another.
    own = torch.arange(0, 2 * blocks, 2)
    out = tuple((int(block), 2 * blocks + i) for i, block in enumerate(own))
    back = tuple((target, source) for source, target in out)
    copies, numbers = BlockCopies(pages, host), own.to(bench.device)
    ways: dict[str, Call] = {
        "out": partial(copies.swap, out, numbers),
        "in": partial(copies.swap, back, numbers),
        "out_in_one": partial(host.copy_, on_device, non_blocking=True),
        "in_in_one": partial(on_device.copy_, host, non_blocking=True),
    }
    for name, way in ways.items():
        took_s = bench.seconds([way])
        bench.row(
            "swaps",
            what=name,
            gb_per_s=host.nbytes / took_s / 1e9,
            us_per_block=1e6 * took_s / blocks,
            block_mb=host.nbytes / blocks / 1e6,
        )
    bench.free()
