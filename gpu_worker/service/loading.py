"""From settings to a device that is ready: checkpoint, weights, pool, decoder, warm-up.

Each phase is timed, because start-up is what an operator waits for.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import AheadRunner, Grammars, ModelRunner, StepInputs, StepSamples
from gpu_worker.container import core_count, free_memory_bytes
from gpu_worker.model.checkpoint import Checkpoint, find_checkpoint, tokenizer_digest
from gpu_worker.model.config import read_config
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.kv_scales import read_scales
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import Weights, fingerprint, load_weights, weights_digest
from gpu_worker.runner.compile_ahead import ask_for_kernels
from gpu_worker.runner.device_streams import DeviceStreams, streams_for
from gpu_worker.runner.dummy_steps import largest_step, worst_step
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.kv_cache import (
    PoolRequest,
    PoolSize,
    Room,
    allocate_pages,
    block_bytes,
    room_on_cpu,
    room_on_gpu,
    size_pool,
    take_host_blocks,
)
from gpu_worker.runner.step_graphs import RECORDED_TOKENS_MAX, buckets_of
from gpu_worker.runner.step_watch import CudaCounters, Watched
from gpu_worker.runner.warm_up import make_ready, mixed_tokens, warm_up
from gpu_worker.service.device_selection import (
    DTYPE_NAMES,
    check_deterministic,
    check_heads,
    check_speculation,
    check_weight_dtype,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_watch,
    device_name,
    dtype_text,
    numeric_class,
    promise_on_gpu,
)
from gpu_worker.service.gpu_defaults import BatchSizes, batch_sizes, with_sizes
from gpu_worker.service.grammars import grammar_masks
from gpu_worker.service.start_faults import in_sentences
from gpu_worker.settings import WorkerSettings
from kernels import jit, native, variants
from kernels.kv import fp8
from service_kit.errors import ConfigError

log = structlog.get_logger()

# cuBLAS's of a further thread, with the workspace of a Hopper (32 MiB).
_HANDLES_BYTES: Final = 64 << 20
# More than the driver keeps of any recorded step: some kilobytes for each of its launches.
_GRAPH_BYTES_MAX: Final = 64 << 20
# Each takes some hundred megabytes of the host's memory.
_COMPILERS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A runner and what it runs; `limits` are those of the rows it serves."""

    runner: ModelRunner | AheadRunner
    limits: RowLimits
    model: str
    fingerprint: str
    architecture: str
    dtype: str
    kv_dtype: str
    device: torch.device
    device_name: str
    pool: PoolSize
    # Of each layer group.
    layer_counts: tuple[int, ...]
    # How many tokens a step may have in which somebody decodes.
    mixed_tokens: int
    phases_ms: dict[str, int]
    # To be called on the thread that computes: libraries keep handles and teams by thread.
    warm_up_thread: Callable[[], None] = lambda: None
    weights_digest: str = ""
    # Of the file that the gateway reads; empty: there is none.
    tokenizer_digest: str = ""
    # None: rows have none.
    grammars: Grammars | None = None


@dataclass(slots=True, eq=False)
class PhaseTimer:
    """Milliseconds by phase, in the order in which they ended."""

    phases_ms: dict[str, int] = field(default_factory=dict)
    running: str = "device"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_ns = time.monotonic_ns()
        self.running = name
        yield
        self.phases_ms[name] = (time.monotonic_ns() - started_ns) // 1_000_000
        log.info("worker.phase", phase=name, ms=self.phases_ms[name])


def load(settings: WorkerSettings) -> Loaded:
    """Blocks for as long as loading takes. ConfigError says what to change."""
    timer = PhaseTimer()
    with in_sentences(lambda: timer.running):
        return _load(settings, timer)


def _load(settings: WorkerSettings, timer: PhaseTimer) -> Loaded:
    device = choose_device(settings.device)
    is_watched = choose_watch(device, is_asked=settings.watch_steps)
    torch.set_num_threads(settings.threads or core_count())
    # Before the kernels, whose compilation takes a minute: what cannot be served is refused first.
    with timer.phase("find"):
        folder = find_checkpoint(settings.model)
        config = read_config(folder)
        config = config.for_context(settings.context_tokens or config.positions_max)
        check_heads(config, device)
        check_weight_dtype(settings.weight_dtype, config, device)
        check_speculation(settings.num_speculative_tokens, device)
    with timer.phase("kernels"):
        variants.choose(settings.kernel_variants)
        choose_kernels(settings.native, device, is_deterministic=settings.deterministic)
        check_deterministic(device, is_asked=settings.deterministic)
    dtype = choose_dtype(settings.dtype, config.checkpoint_dtype, device)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
    with timer.phase("load"), Checkpoint(folder) as checkpoint:
        weights = read_weights(checkpoint, config, settings, dtype, device)
        scales = read_scales(checkpoint, config) if kv_dtype == fp8.DTYPE else None
        told = dtype_text(dtype, settings.weight_dtype)
        kind = numeric_class(device, told, kv_dtype, is_deterministic=weights.is_deterministic)
        digest = fingerprint(checkpoint, config, kind, scales)
        weights_known_by = weights_digest(checkpoint, config)
    streams = streams_for(device)
    sized = with_sizes(settings, sizes_for(settings, config, dtype, kv_dtype, device))
    config = config.within(settings.context_tokens or config.positions_max)
    with timer.phase("pool"):
        room = find_room(sized, config, weights, kv_dtype, scales, streams)
        pool = size_pool(config, kv_dtype, pool_request(sized), room)
        pages = allocate_pages(config, pool, kv_dtype, device)
        decoder = Decoder(
            config, weights, pages, context_tokens=pool.context_tokens, kv_scales=scales
        )
        pool, host = take_host_blocks(config, pool, kv_dtype, sized.kv_host_memory_mb, streams)
    grammars = grammar_masks(folder, config.vocab_size)
    limits = row_limits(sized, config, pool, reads_grammars=grammars is not None)
    with timer.phase("warm_up"):
        runner = ready_runner(decoder, pages, host, limits, streams)
        mixed = mixed_tokens(runner, limits, settings.mixed_step_s)
    return Loaded(
        runner=watched(runner, device) if is_watched else runner,
        limits=limits,
        model=model_name(settings),
        fingerprint=digest,
        architecture=config.architecture,
        dtype=told,
        kv_dtype=DTYPE_NAMES[kv_dtype],
        device=device,
        device_name=device_name(device),
        pool=pool,
        layer_counts=config.groups.layer_counts,
        mixed_tokens=mixed,
        phases_ms=timer.phases_ms,
        weights_digest=weights_known_by,
        tokenizer_digest=tokenizer_digest(folder),
        grammars=grammars,
        warm_up_thread=partial(warm_up_thread, streams, runner, limits),
    )


def read_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    settings: WorkerSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """On the device, as the settings want them."""
    return load_weights(
        checkpoint,
        config,
        dtype=dtype,
        device=device,
        weight_dtype=settings.weight_dtype,
        is_deterministic=settings.deterministic and device.type != "cpu",
        on_layer=_narrator(config.layers),
    )


def tell_compiles() -> None:
    """Say which kernels are compiled: a first start takes long, and after Ready there are none."""
    done = itertools.count(1)

    def told(kernel: str) -> None:
        log.info("worker.compiled", kernel=kernel.partition(" ")[0], done=next(done))

    jit.watch_compiles(told)


def compile_ahead(
    config: ModelConfig,
    weights: Weights,
    pages: Tensor,
    limits: RowLimits,
    kv_scales: Tensor | None,
    device: torch.device,
) -> None:
    """Several kernels at a time; those that are missed here steps compile one after the other."""
    if device.type != "cuda":
        # Played by a CPU.
        return
    threads = min(_COMPILERS_MAX, core_count())
    try:
        with jit.compiling_ahead(device, threads):
            ask_for_kernels(config, weights, pages, limits, kv_scales)
    except Exception as error:
        # Nothing depends on it: whatever is wrong is met again by the first step, and told.
        log.warning("worker.compiles_late", reason=f"{type(error).__name__}: {error}")


def sizes_for(
    settings: WorkerSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> BatchSizes | None:
    """Of a GPU that holds the weights and nothing else of this worker; None: a CPU's."""
    if device.type == "cpu":
        return None
    # What loading took for a while.
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return batch_sizes(
        config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_tokens=settings.context_tokens or config.positions_max,
        memory_bytes=total_bytes,
        room_bytes=int(total_bytes * settings.gpu_memory_share) - (total_bytes - free_bytes),
    )


def find_room(
    settings: WorkerSettings,
    config: ModelConfig,
    weights: Weights,
    kv_dtype: torch.dtype,
    kv_scales: Tensor | None,
    streams: DeviceStreams,
) -> Room:
    """What KV blocks may take: on a GPU, what the weights and the largest step leave."""
    device = streams.device
    if device.type == "cpu":
        return room_on_cpu(free_memory_bytes())
    tell_compiles()
    # Streams of their own: graphs that are thrown away must not open the pool of those that stay.
    step_bytes = measure_step(settings, config, weights, kv_dtype, kv_scales, streams_for(device))
    # What was measured refers to itself; torch keeps what it gives back.
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return room_on_gpu(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        step_bytes=step_bytes,
        share=settings.gpu_memory_share,
    )


def measure_step(
    settings: WorkerSettings,
    config: ModelConfig,
    weights: Weights,
    kv_dtype: torch.dtype,
    kv_scales: Tensor | None,
    streams: DeviceStreams,
) -> int:
    """What a worker with these settings takes beside weights and KV, by being one.

    What it keeps, what the worst step takes for a while, and what the largest recorded one does:
    recorded steps keep that for themselves. And what torch does not count: of each recorded step
    the driver keeps its launches, and the thread that computes has handles of its own.
    """
    device = streams.device
    context = settings.context_tokens or config.positions_max
    one_block = PoolSize(
        block_count=1,
        block_size=settings.block_size,
        block_bytes=block_bytes(config, settings.block_size, kv_dtype),
        context_tokens=context,
    )
    # At most: whether rows have grammars is known later.
    limits = row_limits(settings, config, one_block, reads_grammars=True)
    before = torch.cuda.memory_allocated(device)
    pages = allocate_pages(config, one_block, kv_dtype, device)
    compile_ahead(config, weights, pages, limits, kv_scales, device)
    decoder = Decoder(config, weights, pages, context_tokens=context, kv_scales=kv_scales)
    buckets = buckets_of(limits)
    measured = GraphRunner(decoder, pages, limits, streams, buckets=buckets[-1:])
    kept = torch.cuda.memory_allocated(device) - before
    worst = worst_step(limits)
    recorded = replace(limits, step_tokens=min(limits.step_tokens, RECORDED_TOKENS_MAX))
    largest = largest_step(recorded, context=context)
    compute = compute_of(measured)
    peaks = sum(peak_bytes(partial(compute, step), device) for step in (worst, largest))
    before_graph = outside_bytes(device)
    measured.record()
    # Another process may take memory just now, and its gigabyte would count once for each bucket.
    each_graph = min(max(0, outside_bytes(device) - before_graph), _GRAPH_BYTES_MAX)
    return kept + peaks + each_graph * len(buckets) + _HANDLES_BYTES


def outside_bytes(device: torch.device) -> int:
    """What is taken of the device and not by torch: the driver's, and other processes'."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Device memory that the call takes and gives back."""
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def ready_runner(
    decoder: Decoder,
    pages: Tensor,
    host_blocks: Tensor,
    limits: RowLimits,
    streams: DeviceStreams,
) -> ModelRunner | AheadRunner:
    """Warmed up. A GPU gets its steps ahead of the host; a CPU is the host."""
    if pages.device.type == "cpu":
        in_turns = EagerRunner(decoder, pages, host_blocks)
        warm_up(in_turns.execute, limits)
        return in_turns
    runner = GraphRunner(decoder, pages, limits, streams, host_blocks=host_blocks)
    make_ready(runner, lambda done, total: log.info("worker.recording", done=done, total=total))
    return runner


def watched(runner: ModelRunner | AheadRunner, device: torch.device) -> AheadRunner:
    """For who comes after Ready: what settles the compute thread may still allocate."""
    assert isinstance(runner, AheadRunner)
    return Watched(runner, CudaCounters(device))


def warm_up_thread(
    streams: DeviceStreams, runner: ModelRunner | AheadRunner, limits: RowLimits
) -> None:
    """The thread that calls this is the one that computes. ConfigError says what to change."""
    compute = compute_of(runner)
    with in_sentences(lambda: "warm_up of the computing thread"):
        streams.take_thread()
        warm_up(compute, limits)
        if isinstance(runner, GraphRunner):
            # All of those are recorded. What is launched one by one asks libraries for this
            # thread's handles and workspaces: now, and not in somebody's long prompt.
            compute(worst_step(limits))


def compute_of(runner: ModelRunner | AheadRunner) -> Callable[[StepInputs], StepSamples]:
    """A step of nobody's rows, from its inputs to its end."""
    if isinstance(runner, AheadRunner):
        return lambda step: runner.launch(step).result()
    return runner.execute


def choose_kernels(asked: str, device: torch.device, *, is_deterministic: bool = False) -> None:
    """On a CPU load the compiled path, or compile it once per machine, or settle for torch's.

    A GPU's are Triton's, compiled as steps need them: C++ for the CPU would be compiled for nobody.
    """
    if device.type != "cpu":
        if asked not in ("auto", "off"):
            raise ConfigError(
                f"--native {asked} is for CPUs, on {device} kernels are Triton's; take --native "
                "auto, or --device cpu"
            )
        native.disable("not for GPUs")
        if not jit.IS_INSTALLED:
            raise ConfigError(
                f"there are no kernels for {device}: Triton is not installed; pip install "
                "'kaiten[gpu]', or take --device cpu"
            )
        if (problem := jit.driver_problem()) is not None:
            raise ConfigError(
                f"Triton cannot launch kernels on {device}: {problem}; install a C compiler and "
                "Python's headers (Debian: gcc python3-dev), or take --device cpu"
            )
        exact = promise_on_gpu(is_deterministic=is_deterministic)
        log.info("worker.kernels", path="triton", variants=variants.taken(), exact=exact)
        return
    if asked == "off":
        native.disable("torch path: switched off by --native off")
    elif not native.build(variant=None if asked in ("auto", "on") else asked) and asked != "auto":
        raise ConfigError(
            f"--native {asked}, but there is no such compiled path ({native.reason()}); "
            "--native auto does without"
        )
    tell = log.info if native.available() else log.warning
    tell("worker.kernels", path=native.reason(), exact=native.promise())


def pool_request(settings: WorkerSettings) -> PoolRequest:
    return PoolRequest(
        block_size=settings.block_size,
        slots=settings.slots,
        kv_memory_mb=settings.kv_memory_mb,
        kv_blocks=settings.kv_blocks,
        context_tokens=settings.context_tokens,
        step_tokens=settings.step_tokens,
    )


def row_limits(
    settings: WorkerSettings, config: ModelConfig, pool: PoolSize, *, reads_grammars: bool = False
) -> RowLimits:
    return RowLimits(
        slots=settings.slots,
        context_tokens=pool.context_tokens,
        step_tokens=settings.step_tokens,
        block_size=pool.block_size,
        block_count=pool.block_count,
        vocab_size=config.vocab_size,
        windows=config.groups.windows,
        reads_grammars=reads_grammars,
        slot_tokens=settings.slot_tokens_max,
        host_block_count=pool.host_block_count,
    )


def model_name(settings: WorkerSettings) -> str:
    return settings.served_model_name or Path(settings.model).name


def _narrator(layers: int) -> Callable[[int], None]:
    """About ten lines in a log."""
    step = max(1, layers // 10)

    def narrate(done: int) -> None:
        if done % step == 0 or done == layers:
            log.info("worker.loading", done=done, total=layers)

    return narrate
