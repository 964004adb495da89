"""The pool of KV blocks: how many fit, what that means, and the memory itself.

`dtype` is that of keys and values: in fp8 the same memory holds twice the blocks of bf16.

layout   pages [places, 2 (keys, values), blocks, kv_heads, block_size, head_dim]
         one dense tile per block and head, which paged attention reads in one go
         a block is of one layer group (`layer_groups`), and has a place for each of its layers
         host blocks [host blocks, places, 2, kv_heads, block_size, head_dim]
         each in one run, so that a device reads or writes it in one transfer
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.container import free_memory_bytes
from gpu_worker.model.model import ModelConfig
from gpu_worker.runner.device_streams import DeviceStreams
from service_kit.errors import ConfigError

MB: Final = 1_000_000
# Of the memory free after loading, when --kv-memory-mb does not say.
_FREE_SHARE: Final = 0.4
# A large page of Linux.
_ALIGN_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    block_count: int
    block_size: int
    block_bytes: int
    # The longest sequence: what the model takes, the operator allows and the pool holds.
    context_tokens: int
    # Those of such a sequence at once, by layer group: what a window has left is given back.
    blocks_held: tuple[int, ...] = ()
    # Beside the pool, in the host's memory.
    host_block_count: int = 0

    @property
    def concurrency(self) -> float:
        """Sequences of full length that fit at once."""
        return self.block_count / sum(self.blocks_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What the operator asked for; None is "choose"."""

    block_size: int
    slots: int
    kv_memory_mb: float | None
    kv_blocks: int | None
    context_tokens: int | None
    # Of a step: so many more than a window a row may hold.
    step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that KV blocks may take when no setting says how much, and where that comes from."""

    kv_bytes: int
    source: str
    # A device has no more than this, whatever is asked for; a CPU's pages are taken as needed.
    is_limit: bool = False


def room_on_cpu(free_bytes: int) -> Room:
    """A share of what is free now: other processes of the machine go on taking memory."""
    return Room(
        kv_bytes=int(free_bytes * _FREE_SHARE),
        source=f"{_FREE_SHARE:.0%} of the {_mb(free_bytes)} MB free",
    )


def room_on_gpu(*, total_bytes: int, free_bytes: int, step_bytes: int, share: float) -> Room:
    """What `share` of the device leaves beside what is taken (weights) and the worst step."""
    taken_bytes = total_bytes - free_bytes
    return Room(
        kv_bytes=int(total_bytes * share) - taken_bytes - step_bytes,
        source=f"--gpu-memory-share {share:g} of the device's {_mb(total_bytes)} MB, less "
        f"{_mb(taken_bytes)} MB taken (weights, other processes) and {_mb(step_bytes)} MB for the "
        "largest step that --step-tokens and --slots allow,",
        is_limit=True,
    )


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Of one block in all layers of its group, keys and values."""
    tile = config.kv_heads * block_size * config.head_dim * dtype.itemsize
    return config.groups.places * 2 * tile


def size_pool(
    config: ModelConfig, dtype: torch.dtype, request: PoolRequest, room: Room
) -> PoolSize:
    """ConfigError names the setting that does not fit, and what would."""
    bytes_each = block_bytes(config, request.block_size, dtype)
    windows, context = config.groups.windows, _context(config, request)
    needed = sum(blocks_held(windows, context, request))
    # More blocks than all slots at full length can never be used.
    count = min(_affordable(request, bytes_each, room), request.slots * needed)

    def blocks_for(tokens: int) -> int:
        return sum(blocks_held(windows, tokens, request))

    fits = bisect_right(range(1, context + 1), count, key=blocks_for)
    if count < needed and (request.context_tokens is not None or not fits):
        would = f"; give at least --kv-memory-mb {_mb(needed * bytes_each)}"
        raise ConfigError(
            f"--context-tokens {context} needs {needed} blocks ({_mb(needed * bytes_each)} MB) but "
            f"the pool has {count}{would}"
            + (f", or at most --context-tokens {fits}" if fits else "")
        )
    return PoolSize(
        block_count=count,
        block_size=request.block_size,
        block_bytes=bytes_each,
        context_tokens=fits,
        blocks_held=blocks_held(windows, fits, request),
    )


def blocks_held(
    windows: tuple[int | None, ...], context: int, request: PoolRequest
) -> tuple[int, ...]:
    """By layer group, at once, of a sequence of so many tokens; as the scheduler counts it
    (docs/core.md).
    """
    size, step = request.block_size, request.step_tokens
    beyond = size - 1 + max(step, size) + step
    held = (context if window is None else min(context, window - 1 + beyond) for window in windows)
    return tuple(-(-tokens // size) for tokens in held)


def _context(config: ModelConfig, request: PoolRequest) -> int:
    asked = request.context_tokens
    if asked is not None and asked > config.positions_max:
        raise ConfigError(
            f"--context-tokens {asked} is more than the {config.positions_max} positions of the "
            f"model{_scaling(config)}"
        )
    return asked or config.positions_max


def _scaling(config: ModelConfig) -> str:
    """In words; empty without one."""
    ropes = [block.rope for block in config.blocks if block.rope and block.rope.kind != "default"]
    return f", with its rope scaling {ropes[0].kind!r} counted" if ropes else ""


def _affordable(request: PoolRequest, bytes_each: int, room: Room) -> int:
    fits = max(room.kv_bytes // bytes_each, 0)
    if request.kv_blocks is not None:
        count, setting = request.kv_blocks, f"--kv-blocks {request.kv_blocks}"
    elif request.kv_memory_mb is not None:
        count = int(request.kv_memory_mb * MB) // bytes_each
        setting = f"--kv-memory-mb {request.kv_memory_mb:g}"
    else:
        count, setting = fits, room.source
    if count < 1 and not (room.is_limit and fits < 1):
        raise ConfigError(
            f"{setting} holds no KV block: one of {request.block_size} tokens takes "
            f"{_mb(bytes_each)} MB; give at least --kv-memory-mb {_mb(bytes_each)}"
        )
    if room.is_limit and (fits < 1 or count > fits):
        raise ConfigError(
            f"{count} KV blocks are {_mb(count * bytes_each)} MB, but {room.source} leaves "
            f"{fits} blocks ({_mb(fits * bytes_each)} MB); raise the share, lower --step-tokens or "
            f"--slots, or give at most --kv-blocks {fits}"
            if fits
            else f"{room.source} leaves no room for a KV block ({_mb(bytes_each)} MB); raise the "
            "share, lower --step-tokens or --slots, or take a smaller model or a larger device"
        )
    return count


def with_host_blocks(size: PoolSize, memory_mb: float, free_bytes: int) -> PoolSize:
    """As many as `memory_mb` of the host holds. ConfigError names what there is, or would do."""
    asked_bytes = int(memory_mb * MB)
    if asked_bytes > free_bytes:
        raise ConfigError(
            f"--kv-host-memory-mb {memory_mb:g} is more than the {free_bytes // MB} MB that are "
            "free beside the model and its KV blocks; give less, or 0 for none"
        )
    if memory_mb and asked_bytes < size.block_bytes:
        raise ConfigError(
            f"--kv-host-memory-mb {memory_mb:g} holds no KV block: one of {size.block_size} tokens "
            f"takes {_mb(size.block_bytes)} MB; give at least that, or 0 for none"
        )
    return replace(size, host_block_count=asked_bytes // size.block_bytes)


def _mb(count_bytes: int) -> int:
    return -(-count_bytes // MB)


def allocate_pages(
    config: ModelConfig, size: PoolSize, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeroed pages. On the CPU the memory is taken from the system only as blocks are used."""
    shape = (config.groups.places, 2, size.block_count, *_tile(config, size))
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return _of_the_host(size.block_count * size.block_bytes).view(dtype).view(shape)


def take_host_blocks(
    config: ModelConfig,
    size: PoolSize,
    dtype: torch.dtype,
    memory_mb: float,
    streams: DeviceStreams,
) -> tuple[PoolSize, Tensor]:
    """The pool with as many host blocks as `memory_mb` holds, and their memory.

    After loading, and the pool was allocated. ConfigError: there is not so much, or too little.
    """
    free_bytes = free_memory_bytes()
    if streams.device.type == "cpu":
        # The pool is of the same memory, and has taken next to nothing of it yet.
        free_bytes = max(0, free_bytes - size.block_count * size.block_bytes)
    size = with_host_blocks(size, memory_mb, free_bytes)
    host_blocks = allocate_host_blocks(config, size, dtype)
    try:
        streams.pin(host_blocks)
    except RuntimeError as error:
        raise ConfigError(
            f"--kv-host-memory-mb {memory_mb:g}: the GPU's driver does not pin so much of the "
            f"host's memory ({error}); give less, or 0 for none"
        ) from error
    return size, host_blocks


def allocate_host_blocks(config: ModelConfig, size: PoolSize, dtype: torch.dtype) -> Tensor:
    """The memory is taken from the system as blocks are used, unless it is pinned."""
    shape = (size.host_block_count, config.groups.places, 2, *_tile(config, size))
    return _of_the_host(size.host_block_count * size.block_bytes).view(dtype).view(shape)


def _tile(config: ModelConfig, size: PoolSize) -> tuple[int, int, int]:
    return config.kv_heads, size.block_size, config.head_dim


def _of_the_host(size_bytes: int) -> Tensor:
    """Zeroed bytes.

    numpy asks Linux for large pages (2 MiB), as torch does not: a step reads blocks from all over
    the pool. They begin with such a page: begun within one, the first block of each layer lay in
    two where layers have a multiple of 2 MiB, and took both (46 MB more of 12 layers).
    """
    buffer = np.zeros(size_bytes + _ALIGN_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGN_BYTES
    return torch.from_numpy(buffer[offset : offset + size_bytes])
