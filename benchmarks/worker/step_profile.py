"""Where the milliseconds of a worker's step go, operator by operator, inside whole steps.

GOMP_SPINCOUNT=5000 python -m benchmarks.worker.step_profile --model FOLDER [--dtype bf16] [--save]

Each operator of the decoder is timed where it runs, so what one does to the next (caches, threads
asleep) is in the figures. A figure is the least of all steps: neighbours on a shared machine only
add.

step        as the worker runs it: all layers in one compiled call, where there is one
one_by_one  the same with its operators called one by one: the parts add up to this
rest        of one_by_one, what no operator accounts for: Python between operators, memory of their
            results, embedding, choosing rows
floor       max(weight bytes / read rate, 2 * products with weights / matrix rate) + KV bytes / read
            rate + attention's operations / matrix rate; the last layer counts where it is needed
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks import recording
from gpu_worker.batch.step_types import RowEnds, SamplingColumns, StepInputs, StepTables
from gpu_worker.model import decoder as decoder_module
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import load_weights
from gpu_worker.runner import eager_runner
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.runner.kv_cache import PoolSize, allocate_pages, block_bytes
from gpu_worker.service.machine_rates import matmul_flops_per_s, products, read_bytes_per_s
from kernels import native
from kernels.linear.packed_linear import PackedLinear
from kernels.sampling.sample import sample

BLOCK_SIZE: Final = 16
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
LINEARS: Final = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`rows` decoding at `context`, and one prompt's `chunk` tokens after `chunk_done`."""

    rows: int = 0
    context: int = 150
    chunk: int = 0
    chunk_done: int = 0

    def __str__(self) -> str:
        decode = f"{self.rows}x{self.context}" if self.rows else ""
        chunk = f"chunk {self.chunk} at {self.chunk_done}" if self.chunk else ""
        return " + ".join(part for part in (decode, chunk) if part)

    @property
    def counts(self) -> list[int]:
        return [1] * self.rows + [self.chunk] * bool(self.chunk)

    @property
    def contexts(self) -> list[int]:
        return [self.context] * self.rows + [self.chunk_done + self.chunk] * bool(self.chunk)


CASES: Final = (
    *(Case(rows=rows) for rows in (1, 4, 8, 16, 32, 64)),
    Case(rows=16, context=1024),
    Case(rows=64, chunk=448),
    Case(chunk=512),
    Case(chunk=512, chunk_done=512),
)


def inputs_of(case: Case, vocab: int) -> StepInputs:
    """Rows whose blocks lie anywhere in the pool; every row samples."""
    rng = np.random.default_rng(0)
    counts, contexts = np.array(case.counts), np.array(case.contexts)
    blocks = -(-contexts // BLOCK_SIZE)
    pool = rng.permutation(int(blocks.sum()))
    tables = np.zeros((len(counts), blocks.max()), np.int32)
    positions, slot_mapping, taken = [], [], 0
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        own = pool[taken : taken + blocks[row]]
        taken += blocks[row]
        tables[row, : len(own)] = own
        at = np.arange(context - count, context)
        positions.append(at)
        slot_mapping.append(own[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    rows, starts = len(counts), np.concatenate([[0], counts.cumsum()])
    zeros = np.zeros(rows, np.int64)
    return StepInputs(
        slots=np.arange(rows),
        sequence_ids=np.arange(rows, dtype=np.uint64),
        counts=counts,
        query_starts=starts.astype(np.int32),
        context_lengths=contexts.astype(np.int32),
        token_ids=rng.integers(0, vocab, int(counts.sum())),
        positions=np.concatenate(positions),
        tables=lambda: StepTables(
            block_tables=tables[None], slot_mapping=np.concatenate(slot_mapping)[None]
        ),
        sampled_rows=np.arange(rows),
        sampled_tokens=starts[1:] - 1,
        sampling=SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_k=zeros,
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            seed=zeros,
            choice=zeros,
            position=zeros,
            logprobs=zeros - 1,
            edits=lambda: None,
        ),
        ends=RowEnds(
            joined=zeros,
            num_tokens=contexts,
            limit=contexts + 2,
            masked_until=zeros,
            stops=zeros[:, None] - 1,
        ),
    )


class Laps:
    """Seconds by operator within the running step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: object, **named: object) -> object:
            started = self.clock()
            result = run(*arguments, **named)
            self.seconds[name] += self.clock() - started
            return result

        return wrapper


@contextmanager
def instrumented(decoder: Decoder, clock: Callable[[], float]) -> Iterator[Laps]:
    """Every operator the decoder and the device call reports to the laps."""
    laps, undone, weights = Laps(clock), [], decoder.weights
    names = {id(getattr(layer, name)): name for layer in weights.layers for name in LINEARS} | {
        id(weights.head): "head"
    }

    def replace(owner: Any, name: str, value: object) -> None:
        undone.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    call = PackedLinear.__call__

    def linear(layer: PackedLinear, *arguments: object, **named: object) -> Any:
        return laps.timed(names[id(layer)], call)(layer, *arguments, **named)

    replace(PackedLinear, "__call__", linear)
    for name in _kernels_of(decoder_module):
        replace(decoder_module, name, laps.timed(name, getattr(decoder_module, name)))
    replace(eager_runner, "sample", laps.timed("sample", sample))
    try:
        yield laps
    finally:
        for owner, name, value in undone:
            setattr(owner, name, value)


def _kernels_of(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "").startswith("kernels.")
        and name not in ("rope_table", "CompiledLayers")
    ]


def clock_of(asked: argparse.Namespace) -> Callable[[], float]:
    return time.thread_time if asked.threads == 1 else time.perf_counter


def profile(
    decoder: Decoder, pages: Tensor, inputs: StepInputs, asked: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds by operator, the least of as many steps as fit the time."""
    clock, device, compiled = clock_of(asked), EagerRunner(decoder, pages), decoder.compiled
    for _ in range(2):
        device.execute(inputs)
    least: defaultdict[str, float] = defaultdict(lambda: float("inf"))
    ends = time.perf_counter() + asked.seconds
    while time.perf_counter() < ends:
        for name, layers in (("step", compiled), ("one_by_one", None)):
            decoder.compiled = layers
            started = clock()
            device.execute(inputs)
            least[name] = min(least[name], clock() - started)
        with instrumented(decoder, clock) as laps:
            device.execute(inputs)
        for name, value in laps.seconds.items():
            least[name] = min(least[name], value)
    decoder.compiled = compiled
    parts = sum(least.values()) - least["step"] - least["one_by_one"]
    seconds = {**least, "rest": least["one_by_one"] - parts}
    return {name: round(value * 1e3, 3) for name, value in seconds.items()}


def floor_s(case: Case, config: ModelConfig, size: int, read: float, matrix: float) -> float:
    flops = 2 * products(config, sum(case.counts), len(case.counts))
    pairs = sum(
        count * (context - (count - 1) / 2)
        for count, context in zip(case.counts, case.contexts, strict=True)
        if count > 1
    )
    flops_attention = 4 * (config.layers - 1) * config.heads * config.head_dim * pairs
    kv_bytes = sum(case.contexts) * config.layers * 2 * config.kv_heads * config.head_dim * size
    weights_s = products(config, 1, 1) * size / read
    return max(weights_s, flops / matrix) + kv_bytes / read + flops_attention / matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    native.build()
    dtype, config = DTYPES[asked.dtype], read_config(asked.model)
    with Checkpoint(asked.model) as checkpoint:
        weights = load_weights(checkpoint, config, dtype=dtype, device=torch.device("cpu"))
    for case in CASES:
        if asked.only not in str(case):
            continue
        inputs = inputs_of(case, config.vocab_size)
        pool = PoolSize(
            block_count=int(sum(-(-c // BLOCK_SIZE) for c in case.contexts)),
            block_size=BLOCK_SIZE,
            block_bytes=block_bytes(config, BLOCK_SIZE, dtype),
            context_tokens=1 << 11,
        )
        pages = allocate_pages(config, pool, dtype, torch.device("cpu"))
        pages.normal_()
        decoder = Decoder(config, weights, pages, context_tokens=pool.context_tokens)
        parts = profile(decoder, pages, inputs, asked)
        # Beside each case, as a shared machine changes from minute to minute.
        clock = clock_of(asked)
        read, matrix = read_bytes_per_s(clock), matmul_flops_per_s(dtype, 2048, clock)
        floor_ms = floor_s(case, config, dtype.itemsize, read, matrix) * 1e3
        figures = {
            "case": str(case),
            "dtype": asked.dtype,
            "threads": asked.threads,
            "native": native.reason(),
            "read_gb_per_s": round(read / 1e9, 1),
            "matrix_gf_per_s": round(matrix / 1e9, 1),
            "floor_ms": round(floor_ms, 2),
            "floor_fraction": round(floor_ms / parts["step"], 3),
            "parts_ms": parts,
        }
        recording.record("step_profile", figures, save=asked.save)


if __name__ == "__main__":
    main()
