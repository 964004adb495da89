"""What this CPU can do, and what steps of a model take: at least, and by its kernels' own times.

    python -m gpu_worker.service.machine_rates --model FOLDER      JSON, for `kaiten doctor --bench`

A step in which rows decode cannot take less than

    max(weight bytes / reading, 2 * products with weights / multiplying) + KV bytes / reading

Nothing of a checkpoint is loaded but its config: weights of the same shapes take as long.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from gpu_worker.model.config import read_config
from gpu_worker.model.model import ModelConfig
from gpu_worker.service.device_selection import DTYPE_NAMES, choose_dtype
from kernels import native
from kernels.attention.paged_attention import paged_attention
from kernels.linear import weight_memory
from kernels.linear.packed_linear import PackedLinear
from service_kit.errors import ConfigError
from service_kit.settings import Settings, load

Clock = Callable[[], float]

ROWS: Final = (1, 16, 64)
CONTEXT: Final = 256
BLOCK_SIZE: Final = 16
# Layers that are timed one after the other hold so much, that none is found in a cache.
LAYERS_BYTES_MIN: Final = 256 << 20


class MachineRatesSettings(Settings):
    """What this CPU can do, and what steps of a model take."""

    model: Path = Field(description="checkpoint folder; its config is read, no weights")
    dtype: Literal["auto", "bf16", "fp32"] = Field(default="auto", description="as a worker's")
    threads: int = Field(default=0, ge=0, le=1024, description="0: as many as there are cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of a step in which so many rows decode, each behind `CONTEXT` tokens."""

    rows: int
    floor_ms: float
    timed_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    path: str
    dtype: str
    threads: int
    read_gb_s: float
    products_gflop_s: float
    steps: tuple[StepTimes, ...]


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
    """Best rate of a square product: through PackedLinear and torch, in this dtype and in float32,
    to which a bfloat16 is widened where the processor has no products of it.

    The best: beside a path that emulates bfloat16 every step would seem faster than the machine.
    """
    x, kinds = torch.randn(size, size), dict.fromkeys((torch.float32, dtype))
    ways = [partial(PackedLinear(x.to(kind)), x.to(kind)) for kind in kinds]
    ways += [partial(torch.mm, x.to(kind), x.to(kind)) for kind in kinds if onednn_has(kind)]
    return 2 * size**3 / min(times_s(way, repeats=9, clock=clock)[0] for way in ways)


def onednn_has(dtype: torch.dtype) -> bool:
    """By whichever instructions, tiles (AMX) among them; what it has not torch does one by one."""
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def products(config: ModelConfig, tokens: int, rows: int) -> int:
    """Multiplications with weights: of the last layer `rows` tokens see more than keys and values,
    and of the head they see all."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.inner_size)
    kept, head = config.hidden_size * 2 * keys, config.hidden_size * config.vocab_size
    whole = (config.layers - 1) * layer + kept
    return whole * tokens + (layer - kept + head) * rows


def decode_floor_s(
    config: ModelConfig, rows: int, context: int, size: int, read: float, flops: float
) -> float:
    """`size`: bytes of a number; `read`: bytes per second; `flops`: per second."""
    kv_bytes = rows * context * config.layers * 2 * config.kv_heads * config.head_dim * size
    weights_s = products(config, 1, 1) * size / read
    return max(weights_s, 2 * products(config, rows, rows) / flops) + kv_bytes / read


class TimedModel:
    """The costly parts of a model, by shape: linears, attention, head; no norms, no sampling."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        per_layer = sum(o * i for o, i in self._shapes()) * dtype.itemsize
        count = min(config.layers, -(-LAYERS_BYTES_MIN // per_layer))
        self._layers = [[self._linear(*shape) for shape in self._shapes()] for _ in range(count)]
        self._head = self._linear(config.vocab_size, config.hidden_size)

    def step_s(self, rows: int, context: int, *, repeats: int = 7) -> float:
        """Best seconds of a step in which so many rows decode."""
        attend, inputs = self._attention(rows, context), {}
        for linear_inputs in {inputs_of for _, inputs_of in self._shapes()}:
            inputs[linear_inputs] = torch.ones(rows, linear_inputs, dtype=self._dtype)

        def layers() -> None:
            for layer in self._layers:
                for linear, (_, width) in zip(layer, self._shapes(), strict=True):
                    linear(inputs[width])
                attend()

        x = torch.ones(rows, self._config.hidden_size, dtype=self._dtype)
        layer_s = times_s(layers, repeats=repeats)[0] / len(self._layers)
        return layer_s * self._config.layers + times_s(lambda: self._head(x), repeats=repeats)[0]

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's linears."""
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return (
            (queries + 2 * keys, config.hidden_size),
            (config.hidden_size, queries),
            (2 * config.inner_size, config.hidden_size),
            (config.hidden_size, config.inner_size),
        )

    def _linear(self, outputs: int, inputs: int) -> PackedLinear:
        return PackedLinear(torch.full((outputs, inputs), 0.01, dtype=self._dtype))

    def _attention(self, rows: int, context: int) -> Callable[[], Tensor]:
        """Of one layer, over pages that no other row has."""
        config, blocks = self._config, -(-context // BLOCK_SIZE)
        shape = (rows * blocks, config.kv_heads, BLOCK_SIZE, config.head_dim)
        k_pages, v_pages = (torch.ones(shape, dtype=self._dtype) for _ in range(2))
        tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        contexts = torch.full((rows,), context, dtype=torch.int32)
        q = torch.ones(rows, config.heads, config.head_dim, dtype=self._dtype)
        scale = config.attention_scale
        return lambda: paged_attention(q, k_pages, v_pages, tables, starts, contexts, scale)


def measured(settings: MachineRatesSettings) -> MachineRates:
    """About ten seconds; more where no weight of the size fits a cache."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    native.build()
    config = read_config(settings.model)
    dtype = choose_dtype(settings.dtype, config.checkpoint_dtype, torch.device("cpu"))
    read, flops = read_bytes_per_s(), matmul_flops_per_s(dtype)
    model, steps = TimedModel(config, dtype), []
    for rows in ROWS:
        floor_s = decode_floor_s(config, rows, CONTEXT, dtype.itemsize, read, flops)
        timed_s = model.step_s(rows, CONTEXT)
        steps.append(
            StepTimes(rows=rows, floor_ms=round(floor_s * 1e3, 3), timed_ms=round(timed_s * 1e3, 3))
        )
    return MachineRates(
        path=native.reason(),
        dtype=DTYPE_NAMES[dtype],
        threads=torch.get_num_threads(),
        read_gb_s=round(read / 1e9, 1),
        products_gflop_s=round(flops / 1e9, 1),
        steps=tuple(steps),
    )


def main(argv: Sequence[str] | None = None) -> int:
    try:
        found = measured(load(MachineRatesSettings, "machine_rates", argv))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
