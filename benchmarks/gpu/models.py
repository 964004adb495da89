"""Models by their shape, with random weights made on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.layer_spec import LayerSpec, QkNorm
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.rope import RopeConfig
from gpu_worker.model.weights import LayerWeights, Weights
from gpu_worker.runner.device_streams import streams_for
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.kv_cache import PoolSize, allocate_pages, block_bytes
from gpu_worker.runner.step_graphs import Bucket
from kernels.linear.packed_linear import PackedLinear

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    has_qk_norm: bool = False
    is_tied: bool = False
    theta: float = 500_000.0
    positions: int = 8192

    @property
    def config(self) -> ModelConfig:
        architecture = "Qwen3ForCausalLM" if self.has_qk_norm else "LlamaForCausalLM"
        rope = RopeConfig(kind="default", theta=self.theta, rotary_dim=self.head_dim)
        qk_norm: QkNorm | None = "head" if self.has_qk_norm else None
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            inner_size=self.inner,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-6,
            positions_max=self.positions,
            blocks=self.layers * (LayerSpec(rope=rope, qk_norm=qk_norm),),
            has_tied_embeddings=self.is_tied,
            checkpoint_dtype="bfloat16",
            attention_scale=self.head_dim**-0.5,
        )

    @property
    def parameters(self) -> int:
        """What every token is multiplied with, the head included."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * queries + 2 * keys + 3 * self.inner)
        return self.layers * layer + self.vocab * self.hidden

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


LLAMA_8B = Shape(
    name="llama 8b", hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, head_dim=128,
    vocab=128256,
)  # fmt: skip
QWEN3_06B = Shape(
    name="qwen3 0.6b", hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, head_dim=128,
    vocab=151936, has_qk_norm=True, is_tied=True,
)  # fmt: skip
TINY = Shape(
    name="tiny llama", hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=97,
)  # fmt: skip
TINY_QWEN3 = Shape(
    name="tiny qwen3", hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=97,
    has_qk_norm=True, is_tied=True,
)  # fmt: skip


def shapes(bench: Bench) -> tuple[Shape, ...]:
    return (TINY, TINY_QWEN3) if bench.is_tiny else (LLAMA_8B, QWEN3_06B)


def random_weights(
    shape: Shape, bench: Bench, *, deviation: float = 0.02, drawn_on: torch.device | None = None
) -> Weights:
    """By default so small that activations stay finite through all layers.

    `drawn_on` a device of one kind they are the same numbers everywhere.
    """
    drawn_on = drawn_on or bench.device
    generator = torch.Generator(drawn_on).manual_seed(0)

    def noise(*size: int) -> Tensor:
        made = torch.randn(size, generator=generator, device=drawn_on, dtype=bench.dtype)
        return made.mul_(deviation).to(bench.device)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=bench.device, dtype=bench.dtype)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = ones(shape.head_dim) if shape.has_qk_norm else None
    layers = tuple(
        LayerWeights(
            attention_norm=ones(shape.hidden),
            qkv=PackedLinear(noise(queries + 2 * keys, shape.hidden)),
            q_norm=norm,
            k_norm=norm,
            output=PackedLinear(noise(shape.hidden, queries)),
            mlp_norm=ones(shape.hidden),
            gate_up=PackedLinear(noise(2 * shape.inner, shape.hidden)),
            down=PackedLinear(noise(shape.hidden, shape.inner)),
        )
        for _ in range(shape.layers)
    )
    table = noise(shape.vocab, shape.hidden)
    head = PackedLinear(table if shape.is_tied else noise(shape.vocab, shape.hidden))
    return Weights(embedding=table, layers=layers, norm=ones(shape.hidden), head=head)


def limits_of(
    shape: Shape, *, slots: int, context: int, step_tokens: int, pool: int | None = None
) -> RowLimits:
    """A pool of so many tokens, or one that holds every slot at full length."""
    blocks = -(-context // BLOCK_SIZE)
    return RowLimits(
        slots=slots,
        context_tokens=context,
        step_tokens=step_tokens,
        block_size=BLOCK_SIZE,
        block_count=slots * blocks if pool is None else -(-pool // BLOCK_SIZE),
        vocab_size=shape.vocab,
    )


def pages_of(shape: Shape, limits: RowLimits, bench: Bench) -> Tensor:
    """Of a pool as large as the limits say, full of noise."""
    pool = PoolSize(
        block_count=limits.block_count,
        block_size=limits.block_size,
        block_bytes=block_bytes(shape.config, limits.block_size, bench.dtype),
        context_tokens=limits.context_tokens,
    )
    return allocate_pages(shape.config, pool, bench.dtype, bench.device).normal_()


def resident(
    shape: Shape,
    weights: Weights,
    limits: RowLimits,
    bench: Bench,
    buckets: Sequence[Bucket] | None = None,
    ready: Callable[[GraphRunner], None] = GraphRunner.record,
    pages: Tensor | None = None,
) -> GraphRunner:
    """Steps of these sizes are recorded, by default of all; `pages` are its own, unless given."""
    pages = pages_of(shape, limits, bench) if pages is None else pages
    decoder = Decoder(shape.config, weights, pages, context_tokens=limits.context_tokens)
    device = GraphRunner(decoder, pages, limits, streams_for(bench.device), buckets=buckets)
    ready(device)
    return device
