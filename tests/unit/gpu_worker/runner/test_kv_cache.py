"""The KV pool's size: what fits, what that means, and the sentence when it does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model.config import config_from_json
from gpu_worker.model.model import ModelConfig
from gpu_worker.runner.kv_cache import (
    PoolRequest,
    Room,
    allocate_pages,
    block_bytes,
    free_memory_bytes,
    room_on_cpu,
    room_on_gpu,
    size_pool,
)
from gpu_worker.service import device_selection
from gpu_worker.service.device_selection import (
    check_heads,
    check_speculation,
    check_weight_dtype,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    numeric_class,
)
from gpu_worker.settings import WorkerSettings
from kernels import native
from kernels.kv import fp8
from kernels.linear import packed_linear
from kernels.linear.packed_linear import WeightDtype
from scheduler_svc.core.kv import KVManager
from scheduler_svc.core.types import WorkerSpec
from service_kit.errors import ConfigError
from service_kit.settings import load
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


def test_free_memory_is_a_plausible_number() -> None:
    assert 1_000_000 < free_memory_bytes() < 1 << 50


MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "9"}, None),
        ({"memory.max": str(9 * MIB), "memory.current": str(8 * MIB)}, 1),
        # Pages of files are given back when somebody wants them.
        (
            {
                "memory.max": f"{9 * MIB}\n",
                "memory.current": f"{8 * MIB}\n",
                "memory.stat": f"anon 7\ninactive_file {4 * MIB}\nactive_file {MIB}\nfile 9\n",
            },
            6,
        ),
        ({"memory.max": str(MIB), "memory.current": str(2 * MIB)}, 0),
        (
            {
                "memory/memory.limit_in_bytes": str(9 * MIB),
                "memory/memory.usage_in_bytes": str(8 * MIB),
                "memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {2 * MIB}\n",
            },
            3,
        ),
        # Without a limit version 1 says more than any machine has.
        (
            {
                "memory/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
                "memory/memory.usage_in_bytes": "9",
            },
            None,
        ),
    ],
)
def test_a_containers_limit(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if free is None:
        assert free_memory_bytes(tmp_path) > 16 * MIB
    else:
        assert free_memory_bytes(tmp_path) == free * MIB


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


@pytest.mark.parametrize(
    ("asked", "checkpoint", "on_cpu", "on_gpu"),
    [
        ("auto", "float32", torch.float32, torch.bfloat16),
        ("auto", "bfloat16", torch.bfloat16, torch.bfloat16),
        ("auto", "float16", torch.bfloat16, torch.float16),
        ("fp32", "bfloat16", torch.float32, torch.float32),
        ("bf16", "float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype(
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    checkpoint: str,
    on_cpu: torch.dtype,
    on_gpu: torch.dtype,
) -> None:
    monkeypatch.setattr(device_selection, "is_fast", lambda _dtype: True)
    assert choose_dtype(asked, checkpoint, torch.device("cpu")) is on_cpu
    assert choose_dtype(asked, checkpoint, torch.device("cuda")) is on_gpu


def test_fp16_is_not_for_cpus() -> None:
    with pytest.raises(ConfigError, match="take --dtype bf16"):
        choose_dtype("fp16", "float16", torch.device("cpu"))


@pytest.mark.parametrize(("asked", "chosen"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_a_cpu_emulates_no_dtype_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, chosen: torch.dtype
) -> None:
    """As AVX2 without a compiler: there oneDNN packs no bfloat16."""
    monkeypatch.setattr(native, "library_for", lambda _weight: None)
    monkeypatch.setattr(packed_linear, "packing_available", lambda dtype: dtype is torch.float32)
    assert choose_dtype(asked, "bfloat16", torch.device("cpu")) is chosen


@pytest.mark.parametrize("asked", ["int8", "int4", "int4_asym"])
def test_rounded_weights_are_for_cpus(asked: WeightDtype) -> None:
    config = config_from_json(LLAMA | {"intermediate_size": 64})
    check_weight_dtype(asked, config, torch.device("cpu"))
    check_weight_dtype("auto", config, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"--weight-dtype {asked} is for CPUs, on cuda:0"):
        check_weight_dtype(asked, config, torch.device("cuda", 0))


def test_tokens_are_guessed_on_cpus() -> None:
    check_speculation(4, torch.device("cpu"))
    check_speculation(0, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="--num-speculative-tokens 4 is for CPUs: on cuda:0"):
        check_speculation(4, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "hidden_size is 48"),
        ({"intermediate_size": 65}, "intermediate_size is 65"),
        ({"head_dim": 12}, r"num_attention_heads \* head_dim is 48"),
    ],
)
def test_int4_needs_widths_of_whole_groups(changes: dict[str, Any], said: str) -> None:
    config = config_from_json(LLAMA | {"intermediate_size": 64} | changes)
    check_weight_dtype("int8", config, torch.device("cpu"))
    sentence = rf"^config\.json: {said}, and --weight-dtype int4 .* a multiple of 32; take .* int8$"
    with pytest.raises(ConfigError, match=sentence):
        check_weight_dtype("int4", config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("asked", "dtype", "expected"),
    [
        ("auto", torch.float32, torch.float32),
        ("auto", torch.float16, torch.float16),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp8", torch.float32, fp8.DTYPE),
        ("fp8", torch.bfloat16, fp8.DTYPE),
    ],
)
def test_the_dtype_of_kv(asked: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert choose_kv_dtype(asked, dtype) is expected


def test_kv_in_a_third_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-dtype bf16, but the model computes in fp32; .*"):
        choose_kv_dtype("bf16", torch.float32)


def test_workers_of_other_kv_are_of_another_class() -> None:
    kinds = [
        numeric_class(torch.device("cpu"), torch.bfloat16, kv, weight_dtype="auto")
        for kv in (torch.bfloat16, fp8.DTYPE)
    ]
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"head_dim": 258}, "head_dim is 258, .* at most 256; take --device cpu"),
        ({"heads": 130, "kv_heads": 2}, "num_key_value_heads is 65, .* at most 64"),
        ({"head_dim": 256, "heads": 128, "kv_heads": 2}, None),
    ],
)
def test_heads_that_no_kernel_takes(shape: dict[str, int], reason: str | None) -> None:
    config = replace(CONFIG, **shape)  # type: ignore[arg-type]
    check_heads(config, torch.device("cpu"))
    if reason is None:
        check_heads(config, torch.device("cuda:0"))
        return
    with pytest.raises(ConfigError, match=reason):
        check_heads(config, torch.device("cuda:0"))


def test_a_gpu_that_is_not_there_is_missed() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    if torch.cuda.is_available():
        with pytest.raises(ConfigError, match="numbered from 0"):
            choose_device("cuda:99")
        return
    for asked in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=rf"--device {asked}, but .* no CUDA device"):
            choose_device(asked)


def test_a_gpu_adds_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    for name in names:
        # As torch has it; on a CPU nobody looks at it.
        setattr(products, name, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert [getattr(products, name) for name in names] == [False, False]


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update"


@pytest.mark.parametrize(
    ("cuda", "fault", "said"),
    [
        ("13.0", RuntimeError(f"{OLD_DRIVER}\nmore"), r"driver on your system is too old"),
        ("13.0", RuntimeError("Found no NVIDIA driver on your system."), "Found no NVIDIA driver"),
        ("13.0", None, "none is visible"),
        (None, None, None),
    ],
)
def test_a_build_for_gpus_without_a_usable_one(
    cuda: str | None, fault: Exception | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It "works" a hundred times slower than expected: that must be asked for."""

    def init() -> None:
        if fault is not None:
            raise fault

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert choose_device("cpu") == torch.device("cpu")
    if said is None:
        assert choose_device("auto") == torch.device("cpu")
        return
    with pytest.raises(ConfigError, match=rf"--device auto, .*{said}.*take --device cpu") as caught:
        choose_device("auto")
    assert "\n" not in str(caught.value)


def settings(*argv: str) -> WorkerSettings:
    return load(WorkerSettings, "worker", ["--model", "m", *argv], environ={})


def test_settings_from_flags() -> None:
    read = settings("--scheduler", "a:1,b:2", "--kv-memory-mb", "12.5", "--slots", "8")
    assert read.scheduler == ("a:1", "b:2")
    assert (read.kv_memory_mb, read.kv_blocks, read.slots) == (12.5, None, 8)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--slots", "64", "--step-tokens", "64"), "must be more than slots (64): every"),
        (
            ("--slots", "8", "--step-tokens", "40", "--num-speculative-tokens", "4"),
            "step_tokens (40) must be more than slots (8) times num_speculative_tokens + 1 (5)",
        ),
        (("--step-tokens", "4", "--num-speculative-tokens", "3"), "slots (1) times"),
        (("--num-speculative-tokens", "16"), "less than or equal to 15"),
        (("--kv-blocks", "4", "--kv-memory-mb", "4"), "exclude each other"),
        (("--dtype", "fp8"), "'bf16'"),
        (("--weight-dtype", "int3"), "'int8', 'int4' or 'int4_asym'"),
        (("--kv-dtype", "fp16"), "'auto', 'bf16' or 'fp8'"),
        (("--device", "tpu"), "device"),
        (("--slots", "0"), "greater than or equal to 1"),
    ],
)
def test_settings_that_contradict_themselves(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*argv)
    assert said in str(caught.value)
