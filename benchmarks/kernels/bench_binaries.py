"""linears of two binaries of the compiled kernels, in turns: GF/s, and of the machine's floor.

python -m benchmarks.kernels.bench_binaries before=OLD.so after=NEW.so [--kinds int8,int4]
    [--threads 2] [--save]

A product takes at least max(weight bytes / read rate, operations / matrix rate); the matrix rate is
the best that torch or the kernels of this tree reach in x's dtype or in float32.
A binary lies in ~/.cache/kaiten/native after a first start, or where `make wheel` puts it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import recording
from gpu_worker.service.machine_rates import matmul_flops_per_s, read_bytes_per_s
from kernels import native
from kernels.cpp.library import Library
from kernels.linear import weight_memory
from kernels.linear.linear_int4 import Int4Weight
from kernels.linear.linear_int8 import Int8Weight

# qkv, output, gate-up and down of the 125M Llama shape; so many layers that no cache holds them.
SHAPES = ((1280, 768), (768, 768), (6144, 768), (768, 3072))
LAYERS = 6
PARAMETERS = LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES)
KINDS = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
# Bytes of a weight where it is not as wide as x: codes, and of a group of 32 a scale and a zero.
BYTES = {"int8": 1.0, "int4": (32 / 2 + 2 + 2 / 3) / 32}
ROWS = (1, 4, 16, 64)

Layer = Callable[[Tensor], Tensor]


def layers_of(library: Library, kind: str) -> list[tuple[int, Layer]]:
    """(inputs, linear), packed by the binary itself: layouts may differ."""
    dtype, layers = KINDS[kind], []
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        keep = _KEEPERS.get(kind, _as_is)
        for _ in range(LAYERS):
            packed, scales = keep(library, weight)
            layers.append((inputs, _layer(library, packed, outputs, scales)))
    return layers


def _as_is(library: Library, weight: Tensor) -> tuple[Tensor, None]:
    packed = weight_memory.empty(library.packed_shape(weight), weight.dtype)
    library.pack_linear(weight, packed)
    return packed, None


def _as_int8(library: Library, weight: Tensor) -> tuple[Tensor, Tensor]:
    quantised = Int8Weight.of(weight)
    packed = weight_memory.empty(library.packed_shape(weight), torch.int8)
    library.pack_int8(quantised.codes, packed, weight.dtype)
    return packed, quantised.scales


def _as_int4(library: Library, weight: Tensor) -> tuple[Tensor, None]:
    quantised = Int4Weight.of(weight, is_symmetric=False)
    packed = weight_memory.empty((library.packed_int4_bytes(*weight.shape),), torch.uint8)
    library.pack_int4(quantised.codes, quantised.scales, quantised.zeros, packed, weight.dtype)
    return packed, None


_KEEPERS = {"int8": _as_int8, "int4": _as_int4}


def _layer(library: Library, packed: Tensor, outputs: int, scales: Tensor | None) -> Layer:
    return lambda x: library.linear(x, packed, None, outputs, scales)


def in_turns(
    sides: dict[str, list[tuple[int, Layer]]], rows: int, dtype: torch.dtype, turns: int
) -> tuple[dict[str, list[float]], bool]:
    """Seconds of every turn of every side, and whether all sides gave the same bits."""
    inputs = {width: torch.randn(rows, width).to(dtype) for _, width in SHAPES}

    def run(layers: list[tuple[int, Layer]]) -> list[Tensor]:
        return [layer(inputs[width]) for width, layer in layers]

    outputs = [run(layers) for layers in sides.values()]
    is_same = all(map(torch.equal, outputs[0], outputs[-1]))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, layers in sides.items():
            started = time.perf_counter()
            run(layers)
            seconds[name].append(time.perf_counter() - started)
    return seconds, is_same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sides", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    native.build()
    names = dict(side.split("=", 1) for side in asked.sides)
    libraries = {name: Library(Path(file)) for name, file in names.items()}
    read = read_bytes_per_s()
    for kind in asked.kinds.split(","):
        dtype = KINDS[kind]
        flops = matmul_flops_per_s(dtype)
        sides = {name: layers_of(library, kind) for name, library in libraries.items()}
        size = BYTES.get(kind, dtype.itemsize)
        for rows in ROWS:
            seconds, is_same = in_turns(sides, rows, dtype, asked.turns)
            floor_s = max(PARAMETERS * size / read, 2 * PARAMETERS * rows / flops)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            figures: dict[str, object] = {
                "kernel": "linear",
                "kind": kind,
                "rows": rows,
                "threads": asked.threads,
                "instructions": next(iter(libraries.values())).instructions(),
                "same_bits": is_same,
                "read_gb_per_s": round(read / 1e9, 1),
                "matrix_gf_per_s": round(flops / 1e9, 1),
                "floor_ms": round(floor_s * 1e3, 3),
                "median_ms": {name: round(s * 1e3, 3) for name, s in medians.items()},
                "best_ms": {name: round(min(s) * 1e3, 3) for name, s in seconds.items()},
                "floor_fraction": {name: round(floor_s / s, 3) for name, s in medians.items()},
            }
            recording.record("binaries", figures, save=asked.save)


if __name__ == "__main__":
    main()
