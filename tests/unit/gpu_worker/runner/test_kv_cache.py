"""The KV pool's size: what fits, what that means, and the sentence when it does not."""

import dataclasses
import gc
from typing import Any

import pytest
import torch

from gpu_worker.model.config import config_from_json
from gpu_worker.model.model import ModelConfig
from gpu_worker.runner import kv_cache
from gpu_worker.runner.device_streams import CpuStreams, CudaStreams
from gpu_worker.runner.kv_cache import (
    PoolRequest,
    Room,
    allocate_host_blocks,
    allocate_pages,
    block_bytes,
    room_on_cpu,
    room_on_gpu,
    size_pool,
    with_host_blocks,
)
from kernels.kv import fp8
from scheduler_svc.core.kv import KVManager
from scheduler_svc.core.types import WorkerSpec
from service_kit.errors import ConfigError
from tests.support.random_model import LLAMA

# 2 layers * 2 * 2 heads * 16 tokens * 8 * 4 bytes = 4096 per block; 256 positions = 16 blocks.
CONFIG = config_from_json(LLAMA)
FREE = 10_000_000


def request(**changes: Any) -> PoolRequest:
    base: dict[str, Any] = {
        "block_size": 16,
        "slots": 4,
        "kv_memory_mb": None,
        "kv_blocks": None,
        "context_tokens": None,
        "step_tokens": 32,
    }
    return PoolRequest(**(base | changes))


def size(free_bytes: int = FREE, config: Any = CONFIG, **changes: Any) -> Any:
    return size_pool(config, torch.float32, request(**changes), room_on_cpu(free_bytes))


def test_a_block_in_bytes() -> None:
    assert block_bytes(CONFIG, 16, torch.float32) == 4096
    assert block_bytes(CONFIG, 16, torch.bfloat16) == 2048
    assert block_bytes(CONFIG, 16, fp8.DTYPE) == 1024


def test_the_same_memory_holds_twice_the_blocks_in_fp8() -> None:
    counts = [
        size_pool(CONFIG, dtype, request(kv_memory_mb=0.05), room_on_cpu(FREE)).block_count
        for dtype in (torch.bfloat16, fp8.DTYPE)
    ]
    assert counts == [24, 48]


@pytest.mark.parametrize(
    ("changes", "blocks", "context"),
    [
        # More than all slots at full length is never useful: 4 * 16 blocks.
        ({}, 64, 256),
        ({"slots": 2}, 32, 256),
        ({"kv_memory_mb": 0.0041}, 1, 16),
        ({"kv_memory_mb": 0.1}, 24, 256),
        ({"kv_blocks": 7}, 7, 112),
        ({"kv_blocks": 9999}, 64, 256),
        ({"context_tokens": 100}, 28, 100),
        ({"context_tokens": 100, "kv_blocks": 7}, 7, 100),
        # 40 % of what is free.
        ({"free_bytes": 4096 * 50}, 20, 256),
    ],
)
def test_what_fits(changes: dict[str, Any], blocks: int, context: int) -> None:
    pool = size(**changes)
    assert (pool.block_count, pool.context_tokens) == (blocks, context)
    assert pool.blocks_held == (-(-context // 16),)
    assert pool.concurrency == pytest.approx(blocks / -(-context // 16))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_memory_mb": 0.004}, "--kv-memory-mb 0.004 holds no KV block"),
        ({"free_bytes": 4096}, "40% of the 1 MB free holds no KV block"),
        ({"context_tokens": 300}, "more than the 256 positions"),
        (
            {"context_tokens": 200, "kv_blocks": 7},
            "--context-tokens 200 needs 13 blocks (1 MB) but the pool has 7; give at least "
            "--kv-memory-mb 1, or at most --context-tokens 112",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size(**changes)
    assert said in str(caught.value)


def test_a_context_as_long_as_the_scaling_allows_and_no_longer() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = config_from_json(LLAMA | {"rope_scaling": yarn})
    assert size(config=config, context_tokens=1024).context_tokens == 1024
    with pytest.raises(ConfigError, match=r"1024 positions of .* scaling 'yarn' counted"):
        size(config=config, context_tokens=1025)


def test_behind_a_window_that_every_layer_has_a_row_holds_nothing() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    config = config_from_json(LLAMA | mistral)
    # 15 + 63 + 32 + 32 tokens, 9 blocks, of 256.
    pool = size(config=config)
    assert (pool.context_tokens, pool.blocks_held, pool.block_count) == (256, (9,), 4 * 9)
    assert size(config=config, kv_blocks=9).context_tokens == 256
    assert size(config=config, kv_blocks=8).context_tokens == 8 * 16


def test_a_long_context_behind_a_window_costs_a_fifth_and_the_scheduler_counts_alike() -> None:
    shape = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    config = config_from_json(LLAMA | shape | {"sliding_window": 4096})
    pool = size(config=config, step_tokens=512, free_bytes=1 << 40)
    assert pool.blocks_held[0] * 16 <= 0.2 * pool.context_tokens == 0.2 * 32768
    spec = WorkerSpec(
        fingerprint="",
        block_size=pool.block_size,
        block_count=pool.block_count,
        slots_max=4,
        step_tokens_max=512,
        vocab_size=100,
        context_tokens_max=pool.context_tokens,
        windows=(4096,),
    )
    # All four slots at full length, and not a block more.
    assert 4 * KVManager(spec).worst(pool.context_tokens) == pool.block_count


def gemma3_1b() -> ModelConfig:
    """The shape of the published one: 26 layers, of which every sixth attends to everything."""
    gemma3 = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    }
    return config_from_json(LLAMA | gemma3)


def test_a_context_of_32k_of_gemma_3_costs_a_fifth_and_five_times_as_many_fit() -> None:
    config, step_tokens = gemma3_1b(), 512
    asked = request(slots=256, step_tokens=step_tokens, kv_memory_mb=4000)
    pool = size_pool(config, torch.bfloat16, asked, room_on_cpu(1 << 40))
    # 4 layers in a block: one group of all positions and six of 15 + 511 + 2 * 512, some padded.
    assert config.groups.windows == (None, *[512] * 6)
    assert config.groups.layer_counts == (4, 4, 4, 4, 4, 4, 2)
    assert pool.blocks_held == (2048, *[97] * 6)
    held_bytes = sum(pool.blocks_held) * pool.block_bytes
    full_bytes = 26 * 2 * 32768 * 256 * 2
    assert held_bytes / full_bytes == pytest.approx(0.198, abs=0.001)
    spec = WorkerSpec(
        fingerprint="",
        block_size=pool.block_size,
        block_count=pool.block_count,
        slots_max=256,
        step_tokens_max=step_tokens,
        vocab_size=100,
        context_tokens_max=pool.context_tokens,
        windows=config.groups.windows,
    )
    worst = KVManager(spec).worst(pool.context_tokens)
    assert worst == sum(pool.blocks_held)
    # The scheduler admits whose blocks at their longest fit.
    assert (pool.block_count // worst, int(4000e6 // full_bytes)) == (23, 4)


def test_the_longest_context_that_fits_counts_every_group() -> None:
    some = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    config = config_from_json(LLAMA | {"architectures": ["Qwen2ForCausalLM"]} | some)
    # 256 tokens, and 15 + 31 + 32 + 32 of them.
    assert size(config=config).blocks_held == (16, 7)
    small = size(config=config, kv_blocks=20)
    assert (small.context_tokens, small.blocks_held, small.concurrency) == (208, (13, 7), 1.0)
    said = "--context-tokens 256 needs 23 blocks .* the pool has "
    would = "20; give at least --kv-memory-mb 1, or at most --context-tokens 208"
    with pytest.raises(ConfigError, match=said + would):
        size(config=config, kv_blocks=20, context_tokens=256)
    with pytest.raises(ConfigError, match=said + "1; give at least --kv-memory-mb 1$"):
        size(config=config, kv_blocks=1)


def test_a_window_that_no_row_outgrows_needs_no_group() -> None:
    assert gemma3_1b().within(513).groups.windows == (None, *[512] * 6)
    assert gemma3_1b().within(512).groups.windows == (None,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, fp8.DTYPE])
def test_pages_are_zero_aligned_and_of_the_layout(dtype: torch.dtype) -> None:
    pool = size_pool(CONFIG, dtype, request(kv_blocks=5), room_on_cpu(FREE))
    pages = allocate_pages(CONFIG, pool, dtype, torch.device("cpu"))
    assert pages.shape == (2, 2, 5, 2, 16, 8)
    assert pages.dtype == dtype
    # Where a large page begins: a first block that lay in two would take both, in every layer.
    assert pages.data_ptr() % (2 << 20) == 0
    assert pages.is_contiguous()
    assert not pages.float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, fp8.DTYPE])
def test_a_host_block_is_one_run_of_bytes(dtype: torch.dtype) -> None:
    pool = size_pool(CONFIG, dtype, request(kv_blocks=5), room_on_cpu(FREE))
    pool = with_host_blocks(pool, 0.0131, FREE)
    blocks = allocate_host_blocks(CONFIG, pool, dtype)
    assert blocks.shape == (pool.host_block_count, 2, 2, 2, 16, 8)
    assert blocks.dtype == dtype
    assert blocks.is_contiguous()
    assert blocks[0].nbytes == pool.block_bytes
    assert not blocks.float().any()


@pytest.mark.parametrize(
    ("memory_mb", "blocks"), [(0, 0), (0.004096, 1), (0.008191, 1), (0.008192, 2), (10, 2441)]
)
def test_as_many_host_blocks_as_their_memory_holds(memory_mb: float, blocks: int) -> None:
    pool = size(kv_blocks=5)
    with_host = with_host_blocks(pool, memory_mb, 10_000_000)
    assert with_host == dataclasses.replace(pool, host_block_count=blocks)


@pytest.mark.parametrize(
    ("memory_mb", "free_bytes", "said"),
    [
        (
            12,
            11_999_999,
            "--kv-host-memory-mb 12 is more than the 11 MB that are free beside the model and its "
            "KV blocks; give less, or 0 for none",
        ),
        (
            0.004,
            FREE,
            "--kv-host-memory-mb 0.004 holds no KV block: one of 16 tokens takes 1 MB; give at "
            "least that, or 0 for none",
        ),
        (0.0000001, FREE, "--kv-host-memory-mb 1e-07 holds no KV block"),
        (0.001, 0, "--kv-host-memory-mb 0.001 is more than the 0 MB that are free"),
    ],
)
def test_host_memory_that_is_not_there_or_too_little(
    memory_mb: float, free_bytes: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_host_blocks(size(), memory_mb, free_bytes)
    assert str(caught.value).startswith(said)


class Gpu(CpuStreams):
    """Its host memory is apart from the pool, and pinned."""

    def __init__(self, refusal: str = "") -> None:
        super().__init__()
        self.device = torch.device("cuda:0")
        self.pinned: list[torch.Tensor] = []
        self._refusal = refusal

    def pin(self, memory: torch.Tensor) -> None:
        if self._refusal:
            raise RuntimeError(self._refusal)
        self.pinned.append(memory)


def test_the_pool_of_a_cpu_is_of_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 KV blocks of 4096 bytes.
    pool = size(kv_blocks=20)
    monkeypatch.setattr(kv_cache, "free_memory_bytes", lambda: 100_000)
    taken, blocks = kv_cache.take_host_blocks(CONFIG, pool, torch.float32, 0.018, CpuStreams())
    assert (taken.host_block_count, len(blocks)) == (4, 4)
    with pytest.raises(ConfigError, match=r"0\.019 is more than the 0 MB that are free beside"):
        kv_cache.take_host_blocks(CONFIG, pool, torch.float32, 0.019, CpuStreams())
    monkeypatch.setattr(kv_cache, "free_memory_bytes", lambda: 1)
    assert not len(kv_cache.take_host_blocks(CONFIG, pool, torch.float32, 0, CpuStreams())[1])
    gpu = Gpu()
    monkeypatch.setattr(kv_cache, "free_memory_bytes", lambda: 100_000)
    taken, blocks = kv_cache.take_host_blocks(CONFIG, pool, torch.float32, 0.1, gpu)
    assert taken.host_block_count == 24
    assert gpu.pinned == [blocks]
    assert blocks.device.type == "cpu"


def test_a_driver_that_pins_no_more_is_a_sentence() -> None:
    said = r"^--kv-host-memory-mb 1: the GPU's driver does not pin .*\(out of memory \(2\)\); give"
    with pytest.raises(ConfigError, match=said):
        kv_cache.take_host_blocks(
            CONFIG, size(), torch.float32, 1, Gpu(refusal="out of memory (2)")
        )


def test_a_gpu_pins_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly so many bytes, while its streams are there; nothing where there are none."""
    registered: list[tuple[int, ...]] = []
    given_back: list[int] = []

    class Driver:
        def cudaHostRegister(self, *asked: int) -> int:
            registered.append(asked)
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            given_back.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: code)
    cuda, memory = object.__new__(CudaStreams), torch.empty(3, 5)
    cuda._pinned = []
    cuda.pin(memory[:0])
    cuda.pin(memory)
    address = memory.data_ptr()
    assert registered == [(address, 60, 0)]
    del memory
    gc.collect()
    assert not given_back
    del cuda
    gc.collect()
    assert given_back == [address]


GB = 10**9


def gpu_room(**changes: Any) -> Room:
    base: dict[str, Any] = {
        "total_bytes": 140 * GB,
        "free_bytes": 120 * GB,
        "step_bytes": 6 * GB,
        "share": 0.9,
    }
    return room_on_gpu(**(base | changes))


def test_a_gpu_gives_what_weights_and_the_largest_step_leave() -> None:
    # 126 GB are the worker's, 20 are taken, 6 are the step's.
    assert gpu_room().kv_bytes == 100 * GB
    assert gpu_room(share=0.5).kv_bytes == 44 * GB


@pytest.mark.parametrize(
    ("room", "changes", "said"),
    [
        (
            {"share": 0.1},
            {},
            "--gpu-memory-share 0.1 of the device's 140000 MB, less 20000 MB taken (weights, other "
            "processes) and 6000 MB for the largest step that --step-tokens and --slots allow, "
            "leaves no room for a KV block",
        ),
        ({"share": 0.185716}, {"kv_blocks": 99}, "leaves 58 blocks"),
        ({"share": 0.185716}, {"kv_blocks": 99}, "give at most --kv-blocks 58"),
        ({"share": 0.185716}, {"kv_memory_mb": 1.0}, "244 KV blocks are 1 MB"),
    ],
)
def test_what_does_not_fit_on_a_gpu(
    room: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        size_pool(CONFIG, torch.float32, request(slots=99, **changes), gpu_room(**room))
    assert said in str(caught.value)
