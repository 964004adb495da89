"""The kernels that the timed parts launch, compiled before them: every part finds them on the disk.

A kernel is compiled for the widths of a model and not for its depth, so one layer is enough.
"""

from dataclasses import replace

import torch

from benchmarks.gpu.attention import (
    BLOCK_SIZE,
    TILE_BLOCK_SIZE,
    Pool,
    attend_chunk,
    attend_decode,
    random_queries,
)
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import Shape, limits_of, random_weights, resident, shapes
from benchmarks.gpu.steps import quick_on_cpu
from benchmarks.gpu.variants import OF_DECODES, SPLITS, otherwise
from gpu_worker.runner.step_graphs import decode_buckets
from gpu_worker.runner.warm_up import make_ready
from kernels.attention.plan import LONG_SPLIT, SPLIT


def large(bench: Bench) -> None:
    model(shapes(bench)[0], bench)


def small(bench: Bench) -> None:
    model(shapes(bench)[-1], bench)


def model(shape: Shape, bench: Bench) -> None:
    one = replace(shape, layers=1)
    slots, context = bench.sized(32, 4), bench.sized(2048, 32)
    limits = limits_of(one, slots=slots, context=context, step_tokens=bench.sized(512, 16))
    with quick_on_cpu(bench):
        resident(one, random_weights(one, bench), limits, bench, ready=make_ready)


def ways(bench: Bench) -> None:
    """What `variants` times beside the usual."""
    one = replace(shapes(bench)[-1], layers=1)
    slots, context = bench.sized(64, 4), bench.sized(2048, 32)
    limits = limits_of(one, slots=slots, context=context, step_tokens=bench.sized(64, 16))
    with quick_on_cpu(bench):
        weights = random_weights(one, bench)
        for name in (*OF_DECODES, SPLITS):
            with otherwise(name):
                resident(one, weights, limits, bench, decode_buckets([1, slots]))
    for size in (BLOCK_SIZE, TILE_BLOCK_SIZE):
        pool = Pool(bench, [bench.sized(2 * SPLIT, 20)] * 2, size)
        attend_decode(bench, random_queries(bench, 2), pool)()


def attention(bench: Bench) -> None:
    """Whole and in splits, of bf16 and of fp8, with a chunk's own keys and without."""
    for dtype in (bench.dtype, torch.float8_e4m3fn):
        pool = Pool(bench, [bench.sized(2 * SPLIT, 20)] * 2)
        pool.k, pool.v = pool.k.to(dtype), pool.v.to(dtype)
        attend_decode(bench, random_queries(bench, 2), pool)()
    for has_own in (True, False):
        for context in (bench.sized(64, 20), bench.sized(2 * LONG_SPLIT, 40)):
            attend_chunk(bench, bench.sized(64, 9), context, has_own=has_own)()
