"""What a worker on a GPU takes where nobody says: rows of the batch, tokens of a step, block size.

A GPU reads its weights once per step whoever shares it, so it takes as many rows as its memory
serves, and steps so large that prompts are computed at the rate of its tensor cores. All of it is
arithmetic: no GPU is asked, and two of a kind get the same.
"""

from dataclasses import dataclass
from typing import Final

import torch

from gpu_worker.model.model import ModelConfig
from gpu_worker.runner.kv_cache import block_bytes
from gpu_worker.settings import WorkerSettings
from kernels.attention.parts import dim_tile
from kernels.attention.plan import SHORT_TILE, long_parts, short_parts

GB: Final = 1_000_000_000
# Of a row in a busy server: longer ones share the pool with shorter ones, or are preempted.
_ROW_TOKENS: Final = 1024
_SLOTS_MIN: Final = 8
# Each size is recorded at the start, and beyond this many rows the floor of a step hardly falls per
# row: 256 rows of an 8B model at 1024 tokens read 34 GB of keys and values, and 16 GB of weights.
_SLOTS_MAX: Final = 256
# (memory from which on, tokens): what fills the tensor cores of that size's GPUs several times.
_STEP_TOKENS: Final = ((64 * GB, 8192), (32 * GB, 4096), (0, 2048))
_STEP_TOKENS_MIN: Final = 512
# Of what weights leave, for the tensors of the largest step.
_STEP_SHARE: Final = 1 / 8
# The block size for which kernels are compiled ahead, tested and measured. A tile of 64 positions
# would be one block of 64; that is timed by `benchmarks/gpu` and not yet the default.
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    slots: int
    step_tokens: int
    block_size: int


def batch_sizes(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    context_tokens: int,
    memory_bytes: int,
    room_bytes: int,
) -> BatchSizes:
    """For a GPU of `memory_bytes`, of which weights leave `room_bytes` to steps and KV blocks."""
    # Query tokens that a short row may have (`kernels.attention.plan`).
    tokens_each = max(1, SHORT_TILE // (config.heads // config.kv_heads))
    row = min(context_tokens, _ROW_TOKENS) * _kv_bytes(config, kv_dtype)
    row += _part_bytes(config) * short_parts(1, tokens_each, tokens_each, context_tokens)
    slots = _SLOTS_MAX
    while slots > _SLOTS_MIN and slots * row > room_bytes * (1 - _STEP_SHARE):
        slots //= 2
    token = _activation_bytes(config, dtype)
    token += _part_bytes(config) * long_parts(1, context_tokens)
    tokens = next(tokens for least, tokens in _STEP_TOKENS if memory_bytes >= least)
    while tokens > _STEP_TOKENS_MIN and tokens * token > room_bytes * _STEP_SHARE:
        tokens //= 2
    return BatchSizes(slots=slots, step_tokens=max(tokens, 2 * slots), block_size=BLOCK_SIZE)


def with_sizes(settings: WorkerSettings, sizes: BatchSizes | None) -> WorkerSettings:
    """What the operator has set stays; of slots and step tokens the other makes room for it.

    None: those of the settings themselves, which are a CPU's.
    """
    if sizes is None:
        sizes = BatchSizes(
            slots=settings.slots, step_tokens=settings.step_tokens, block_size=settings.block_size
        )
    given = settings.model_fields_set
    slots = settings.slots if "slots" in given else sizes.slots
    tokens = settings.step_tokens if "step_tokens" in given else sizes.step_tokens
    each = settings.slot_tokens_max
    if "step_tokens" not in given and tokens <= slots * each:
        tokens = 2 * slots * each
    if "slots" not in given and tokens <= slots * each:
        slots = max(1, tokens // (2 * each))
    block_size = settings.block_size if "block_size" in given else sizes.block_size
    chosen = {"slots": slots, "step_tokens": tokens, "block_size": block_size}
    return settings.model_copy(update=chosen)


def _kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a token, in all layers: what a window gives back is not counted on."""
    return len(config.groups.windows) * block_bytes(config, 1, dtype)


def _part_bytes(config: ModelConfig) -> int:
    """What attention keeps of a query token and a split of its context, of all heads in float32."""
    return 4 * (dim_tile(config.head_dim) + 2) * config.heads


def _activation_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a token: residual, norm, branch and its copy; queries, keys, values; gate, up, product."""
    qkv = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return dtype.itemsize * (4 * config.hidden_size + qkv + 3 * config.inner_size)
