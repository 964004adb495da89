"""One steady decode step of a worker by part, beside the floor of the machine in the same run.

GOMP_SPINCOUNT=5000 python -m benchmarks.worker.worker_step --model FOLDER [--dtype bf16]
    [--weight-dtype int8 | int4] [--rows 1 16 64]
(a worker sets the spin count itself, see gpu_worker/service/runtime.py; without it, two threads on
a busy machine took 30 times as long)

step     the device's whole step, and the host's work before and after it, through `Rows`
parts    the same operators on the same weights and pages, each kind alone for all layers
floor    max(weight bytes / read rate, 2 * parameters * rows / matrix rate) + KV bytes / read rate
cpu_ms   CPU time of all threads: on a shared machine it tells more than the clock
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks import recording
from gpu_worker.batch.logits_indices import logits_indices
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import Plan, StepResult, StepTimings
from gpu_worker.batch.rows import Rows
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import Weights, load_weights
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.runner.kv_cache import PoolSize, allocate_pages, block_bytes
from gpu_worker.service.machine_rates import matmul_flops_per_s, read_bytes_per_s
from gpu_worker.service.wire import plan_from_proto, result_to_proto
from kaiten.v1 import worker_service_pb2
from kernels import native
from kernels.attention.paged_attention import paged_attention
from kernels.kv.write_kv import write_kv
from kernels.linear.packed_linear import WeightDtype, is_int4
from kernels.norms_rope.gate_mul import gate_mul
from kernels.norms_rope.rms_norm import add_rms_norm
from kernels.norms_rope.rope import rope, rope_table
from kernels.sampling.sample import SamplingTensors, sample

BLOCK_SIZE = 16
STEPS = 25
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GREEDY = worker_service_pb2.RowSampling(
    top_p=1.0, max_tokens=1 << 20, stop_token_ids=[2], logprobs=-1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    best_ms: float
    median_ms: float
    cpu_ms: float


def times(run: Callable[[], object], repeats: int = STEPS) -> Times:
    """Of one call, after one that is not counted; the CPU time is the least seen."""
    run()
    wall, cpu = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        run()
        wall.append((time.perf_counter() - started) * 1e3)
        cpu.append((time.process_time() - used) * 1e3)
    return Times(
        best_ms=round(min(wall), 3),
        median_ms=round(statistics.median(wall), 3),
        cpu_ms=round(min(cpu), 3),
    )


class Bench:
    """`rows` members of a batch, each about to compute the token at position `context` - 1."""

    def __init__(self, config: ModelConfig, weights: Weights, rows: int, context: int) -> None:
        self.config, self.weights, self.context = config, weights, context
        dtype = weights.norm.dtype
        blocks = -(-(context + 16 * STEPS) // BLOCK_SIZE)
        limits = RowLimits(
            slots=rows,
            context_tokens=blocks * BLOCK_SIZE,
            step_tokens=max(rows, 512),
            block_size=BLOCK_SIZE,
            block_count=rows * blocks,
            vocab_size=config.vocab_size,
        )
        pool = PoolSize(
            block_count=limits.block_count,
            block_size=BLOCK_SIZE,
            block_bytes=block_bytes(config, BLOCK_SIZE, dtype),
            context_tokens=limits.context_tokens,
        )
        self.pages = allocate_pages(config, pool, dtype, torch.device("cpu"))
        self.pages.normal_()
        decoder = Decoder(config, weights, self.pages, context_tokens=limits.context_tokens)
        self.device = EagerRunner(decoder, self.pages)
        self.rows = Rows(limits)
        self.rows.apply(_joins(rows, context, blocks, limits.block_count))

    def host(self) -> object:
        """What happens between two device steps."""
        inputs = self.rows.step_inputs(self.rows.steady_counts())
        outcome = self.rows.advance(inputs, self.samples)
        timings = StepTimings(
            wait_us=0, forward_us=0, sample_us=0, tokens_computed=inputs.token_count, rows=1
        )
        result = StepResult(plan_id=1, step=0, outcome=outcome, is_last=False, timings=timings)
        return result_to_proto(result, boot_id="0123456789abcdef").SerializeToString()

    def measure(self) -> dict[str, Times]:
        inputs = self.rows.step_inputs(self.rows.steady_counts())
        self.samples = self.device.execute(inputs)
        # A row that sampled the stop token would leave the batch.
        self.samples = dataclasses.replace(
            self.samples, token_ids=np.full_like(self.samples.token_ids, 5)
        )
        step = self.device._on_device(inputs, logits_indices(inputs))
        count, hidden = inputs.row_count, self.config.hidden_size
        dtype = self.weights.norm.dtype
        x = torch.randn(count, hidden).to(dtype)
        tables, slots = step.block_tables[0], step.slot_mapping[0]
        parts: dict[str, Callable[[], object]] = {
            "step": lambda: self.device.execute(inputs),
            "linears": lambda: self._linears(x),
            "head": lambda: self.weights.head(x),
            "attention": self._attention(tables, step.queries.starts, inputs.row_count),
            "small_ops": self._small(x, step.positions, slots),
            "sampling": self._sampling(count),
            "host": self.host,
        }
        with torch.inference_mode():
            return {name: times(run) for name, run in parts.items()}

    def _linears(self, x: Tensor) -> None:
        config = self.config
        mixed = x.new_ones(len(x), config.heads * config.head_dim)
        inner = x.new_ones(len(x), config.inner_size)
        for layer in self.weights.layers:
            layer.qkv(x)
            layer.output(mixed)
            layer.gate_up(x)
            layer.down(inner)

    def _attention(self, tables: Tensor, starts: Tensor, count: int) -> Callable[[], object]:
        config = self.config
        q = torch.randn(count, config.heads, config.head_dim).to(self.pages.dtype)
        contexts = torch.full((count,), self.context, dtype=torch.int32)
        scale = config.head_dim**-0.5

        def run() -> None:
            for pages in self.pages:
                paged_attention(q, pages[0], pages[1], tables, starts, contexts, scale)

        return run

    def _small(self, x: Tensor, positions: Tensor, slots: Tensor) -> Callable[[], object]:
        config = self.config
        table = rope_table(self.rows.limits.context_tokens, torch.rand(config.head_dim // 2))
        heads = config.heads + 2 * config.kv_heads
        qkv = torch.randn(len(x), heads, config.head_dim).to(x.dtype)
        q, k = qkv[:, : config.heads], qkv[:, config.heads : config.heads + config.kv_heads]
        v = qkv[:, config.heads + config.kv_heads :]
        gate_up = torch.randn(len(x), 2 * config.inner_size).to(x.dtype)
        norm = self.weights.norm

        def run() -> None:
            for pages in self.pages:
                add_rms_norm(x, x, norm, 1e-5)
                rope(q, k, positions, table)
                write_kv(k, v, pages[0], pages[1], slots)
                add_rms_norm(x, x, norm, 1e-5)
                gate_mul(gate_up)

        return run

    def _sampling(self, count: int) -> Callable[[], object]:
        logits = torch.randn(count, self.config.vocab_size)
        columns = self.rows._sampling(np.arange(count), np.ones(count, np.int64))
        names = [field.name for field in dataclasses.fields(SamplingTensors)]
        params = SamplingTensors(**{n: torch.from_numpy(getattr(columns, n)) for n in names})
        return lambda: sample(logits, params)


def _joins(rows: int, context: int, blocks: int, block_count: int) -> Plan:
    """Rows whose blocks lie anywhere in the pool."""
    order = np.random.default_rng(0).permutation(block_count).reshape(rows, blocks).tolist()
    joins = [
        worker_service_pb2.Join(
            slot=slot,
            sequence_id=slot,
            token_ids=range(5, 5 + context),
            prompt_tokens=1,
            num_computed_tokens=context - 1,
            block_tables=[worker_service_pb2.BlockTable(blocks=order[slot])],
            sampling=GREEDY,
        )
        for slot in range(rows)
    ]
    checksum = sum((slot + 1) * (2 * slot + 1) for slot in range(rows))
    message = worker_service_pb2.Plan(
        plan_id=1, lease_steps=1, joins=joins, membership_checksum=checksum
    )
    return plan_from_proto(message)


def parameters(config: ModelConfig) -> int:
    """Weights that every token is multiplied with, the head included."""
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    layer = hidden * (2 * queries + 2 * keys + 3 * config.inner_size)
    return config.layers * layer + config.vocab_size * hidden


def weight_bytes(config: ModelConfig, weight_dtype: WeightDtype, dtype: torch.dtype) -> float:
    """Of `parameters`, as the compiled kernels keep them."""
    if weight_dtype == "auto":
        return parameters(config) * dtype.itemsize
    head = config.vocab_size * config.hidden_size
    layers = parameters(config) - head
    # 56 bytes hold 96 codes with their scales and zeros.
    return layers * (56 / 96 if is_int4(weight_dtype) else 1) + head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--weight-dtype", choices=get_args(WeightDtype), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(asked.threads)
    native.build()
    dtype = DTYPES[asked.dtype]
    config = read_config(asked.model)
    with Checkpoint(asked.model) as checkpoint:
        weights = load_weights(
            checkpoint,
            config,
            dtype=dtype,
            device=torch.device("cpu"),
            weight_dtype=asked.weight_dtype,
        )
    read_rate, matrix_rate = read_bytes_per_s(), matmul_flops_per_s(dtype, 2048)
    weight_count, kv_width = parameters(config), config.layers * 2 * config.kv_heads
    for rows in asked.rows:
        measured = Bench(config, weights, rows, asked.context).measure()
        kv_bytes = rows * asked.context * kv_width * config.head_dim * dtype.itemsize
        compute_s = 2 * weight_count * rows / matrix_rate
        floor_s = (
            max(weight_bytes(config, asked.weight_dtype, dtype) / read_rate, compute_s)
            + kv_bytes / read_rate
        )
        figures = {
            "dtype": asked.dtype,
            "weight_dtype": asked.weight_dtype,
            "rows": rows,
            "context": asked.context,
            "threads": asked.threads,
            "native": native.reason(),
            "read_gb_per_s": round(read_rate / 1e9, 1),
            "matrix_gf_per_s": round(matrix_rate / 1e9, 1),
            "floor_ms": round(floor_s * 1e3, 3),
            "floor_fraction": round(floor_s * 1e3 / measured["step"].median_ms, 3),
            "parts": {name: dataclasses.asdict(part) for name, part in measured.items()},
        }
        recording.record("worker_step", figures, save=asked.save)


if __name__ == "__main__":
    main()
