"""What a worker computes on and in, and the sentence when it does not go together."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_worker.model.config import config_from_json
from gpu_worker.service import device_selection
from gpu_worker.service.device_selection import (
    check_deterministic,
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
from service_kit.errors import ConfigError
from service_kit.settings import load
from tests.support.random_model import LLAMA


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


def test_tokens_are_drafted_on_cpus() -> None:
    check_speculation(4, torch.device("cpu"))
    check_speculation(0, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="--num-speculative-tokens 4 is for CPUs: on cuda:0"):
        check_speculation(4, torch.device("cuda", 0))


def test_what_torch_does_not_promise_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_deterministic(torch.device("cuda", 0), is_asked=True)
    monkeypatch.setattr(native, "available", lambda: False)
    check_deterministic(torch.device("cpu"), is_asked=False)
    with pytest.raises(ConfigError, match=r"^--deterministic, but .* torch's it is not promised"):
        check_deterministic(torch.device("cpu"), is_asked=True)
    monkeypatch.setattr(native, "available", lambda: True)
    check_deterministic(torch.device("cpu"), is_asked=True)


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
        numeric_class(torch.device("cpu"), "bf16", kv, is_deterministic=False)
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
    config = replace(config_from_json(LLAMA), **shape)  # type: ignore[arg-type]
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
    assert read.kv_host_memory_mb == 0
    assert settings("--kv-host-memory-mb", "2000").kv_host_memory_mb == 2000


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
        (("--kv-host-memory-mb", "-1"), "kv_host_memory_mb"),
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
