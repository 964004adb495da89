"""From settings to a device that is ready: checkpoint, weights, pool, decoder, warm-up.

Each phase is timed, because start-up is what an operator waits for.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import structlog
import torch

from gpu_worker.checkpoint import Checkpoint, find_checkpoint
from gpu_worker.decoder import Decoder
from gpu_worker.device import AheadDevice, Device, RowEnds, SamplingColumns, StepInputs
from gpu_worker.draft import RowLimits
from gpu_worker.kv_cache import (
    PoolRequest,
    PoolSize,
    allocate_pages,
    free_memory_bytes,
    size_pool,
)
from gpu_worker.model_config import ModelConfig, read_config
from gpu_worker.settings import WorkerSettings
from gpu_worker.torch_device import TorchDevice
from gpu_worker.weights import fingerprint, load_weights
from kernels import native
from service_kit.errors import ConfigError

log = structlog.get_logger()

_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_WARM_UP_TOKENS: Final = 32
_WARM_UP_ROWS: Final = 4
_FP32_CHECKPOINTS: Final = ("float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A device and what it is; `limits` are those of the rows it serves."""

    device: Device | AheadDevice
    limits: RowLimits
    model: str
    fingerprint: str
    architecture: str
    dtype: str
    device_name: str
    pool: PoolSize
    phases_ms: dict[str, int]


@dataclass(slots=True, eq=False)
class PhaseTimer:
    """Milliseconds by phase, in the order in which they ended."""

    phases_ms: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_ns = time.monotonic_ns()
        yield
        self.phases_ms[name] = (time.monotonic_ns() - started_ns) // 1_000_000
        log.info("worker.phase", phase=name, ms=self.phases_ms[name])


def load(settings: WorkerSettings) -> Loaded:
    """Blocks for as long as loading takes. ConfigError says what to change."""
    timer = PhaseTimer()
    device = torch.device("cpu")
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    with timer.phase("kernels"):
        choose_kernels(settings.native)
    with timer.phase("find"):
        folder = find_checkpoint(settings.model)
        config = read_config(folder)
    dtype = choose_dtype(settings.dtype, config.checkpoint_dtype)
    with timer.phase("load"), Checkpoint(folder) as checkpoint:
        weights = load_weights(checkpoint, config, dtype=dtype, device=device, on_layer=_narrate)
        digest = fingerprint(checkpoint, config, numeric_class(device, dtype))
    with timer.phase("pool"):
        pool = size_pool(config, dtype, pool_request(settings), free_memory_bytes())
        pages = allocate_pages(config, pool, dtype, device)
        decoder = Decoder(config, weights, pages, context_tokens=pool.context_tokens)
    torch_device = TorchDevice(decoder, pages)
    limits = row_limits(settings, config, pool)
    with timer.phase("warm_up"):
        warm_up(torch_device, limits)
    return Loaded(
        device=torch_device,
        limits=limits,
        model=model_name(settings),
        fingerprint=digest,
        architecture=config.architecture,
        dtype=_DTYPE_NAMES[dtype],
        device_name=f"{device.type} ({torch.get_num_threads()} threads, {native.reason()})",
        pool=pool,
        phases_ms=timer.phases_ms,
    )


def choose_kernels(asked: str) -> None:
    """Build or load the compiled path, once per machine, or settle for torch's."""
    if asked == "off":
        native.disable("torch path: switched off by --native off")
    elif not native.build() and asked == "on":
        raise ConfigError(
            f"--native on, but there is no compiled path ({native.reason()}); install a C++ "
            "compiler, or take --native auto"
        )
    log.info("worker.kernels", path=native.reason())


def numeric_class(device: torch.device, dtype: torch.dtype) -> str:
    """What may differ in the last bits between workers, and with them a token."""
    path = "native" if native.available() else "torch"
    return f"{device.type} {_DTYPE_NAMES[dtype]} {path}"


def choose_dtype(asked: str, checkpoint_dtype: str) -> torch.dtype:
    """float16 is hundreds of times slower than bfloat16 on a CPU, so it is never computed in."""
    if asked != "auto":
        return _DTYPES[asked]
    return torch.float32 if checkpoint_dtype in _FP32_CHECKPOINTS else torch.bfloat16


def pool_request(settings: WorkerSettings) -> PoolRequest:
    return PoolRequest(
        block_size=settings.block_size,
        slots=settings.slots,
        kv_memory_mb=settings.kv_memory_mb,
        kv_blocks=settings.kv_blocks,
        context_tokens=settings.context_tokens,
    )


def row_limits(settings: WorkerSettings, config: ModelConfig, pool: PoolSize) -> RowLimits:
    return RowLimits(
        slots=settings.slots,
        context_tokens=pool.context_tokens,
        step_tokens=settings.step_tokens,
        block_size=pool.block_size,
        block_count=pool.block_count,
        vocab_size=config.vocab_size,
    )


def model_name(settings: WorkerSettings) -> str:
    return settings.served_model_name or Path(settings.model).name


def warm_up(device: Device, limits: RowLimits) -> None:
    """Run a prefill, a decode step and a mixed one, so that no first request pays for it.

    Small ones: threads, scratch memory and the library's plans come with the first step of a kind,
    whatever its size.
    """
    longest = min(_WARM_UP_TOKENS, limits.step_tokens, limits.context_tokens)
    for counts in ([longest], [1] * min(_WARM_UP_ROWS, limits.slots), [min(2, longest), 1]):
        device.execute(_warm_up_step(np.array(counts, np.int64), limits))


def _warm_up_step(
    counts: np.ndarray[tuple[int], np.dtype[np.int64]], limits: RowLimits
) -> StepInputs:
    """Rows that all read block 0 and write nowhere; half of them sample with noise."""
    rows, total = len(counts), int(counts.sum())
    width = -(-int(counts.max()) // limits.block_size)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return StepInputs(
        slots=np.arange(rows),
        serials=np.zeros(rows, np.uint64),
        counts=counts,
        query_starts=starts.astype(np.int32),
        context_lengths=counts.astype(np.int32),
        block_tables=np.zeros((rows, width), np.int32),
        token_ids=np.zeros(total, np.int64),
        positions=np.concatenate([np.arange(count) for count in counts]),
        kv_slots=np.full(total, -1, np.int64),
        sampled_rows=np.arange(rows),
        sampled_tokens=starts[1:] - 1,
        sampling=SamplingColumns(
            temperature=(np.arange(rows) % 2).astype(np.float32),
            top_k=np.full(rows, min(8, limits.vocab_size), np.int64),
            top_p=np.full(rows, 0.9, np.float32),
            min_p=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int64),
            position=np.zeros(rows, np.int64),
            logprobs=np.full(rows, -1, np.int64),
            edits=None,
        ),
        ends=RowEnds(
            joined=np.zeros(rows, np.int64),
            known=counts,
            limit=counts,
            masked_until=np.zeros(rows, np.int64),
            stops=np.zeros((rows, 0), np.int64),
        ),
    )


def _narrate(layers: int) -> None:
    log.debug("worker.loading", layers=layers)
