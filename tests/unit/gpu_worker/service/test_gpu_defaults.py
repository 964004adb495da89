"""The table of what a GPU takes where nobody says, by its memory and the model."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from gpu_worker.model.config import config_from_json
from gpu_worker.service.gpu_defaults import GB, BatchSizes, _part_bytes, batch_sizes, with_sizes
from gpu_worker.service.loading import sizes_for
from gpu_worker.settings import WorkerSettings
from kernels.attention.parts import Kept
from kernels.kv import fp8
from service_kit.settings import load
from tests.support.random_model import LLAMA


def shape(layers: int, hidden: int, inner: int, heads: int, kv: int, head: int, most: int) -> Any:
    changes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head,
        "max_position_embeddings": most,
    }  # fmt: skip
    return config_from_json(LLAMA | changes)


QWEN_06B = shape(28, 1024, 3072, 16, 8, 128, 40_960)
LLAMA_8B = shape(32, 4096, 14336, 32, 8, 128, 131_072)
LLAMA_70B = shape(80, 8192, 28672, 64, 8, 128, 131_072)


@pytest.mark.parametrize(
    ("config", "weights_gb", "memory_gb", "context", "expected"),
    [
        (QWEN_06B, 1.2, 141, None, (256, 8192)),
        (QWEN_06B, 1.2, 80, None, (256, 8192)),
        (QWEN_06B, 1.2, 24, None, (128, 2048)),
        (QWEN_06B, 1.2, 8, None, (32, 2048)),
        (LLAMA_8B, 16, 141, None, (256, 8192)),
        (LLAMA_8B, 16, 80, None, (256, 8192)),
        (LLAMA_8B, 16, 48, None, (128, 4096)),
        (LLAMA_8B, 16, 24, None, (32, 2048)),
        (LLAMA_8B, 16, 24, 4096, (32, 2048)),
        # Two gigabytes are left: a few rows, and steps as small as a CPU's.
        (LLAMA_8B, 16, 20, 4096, (8, 1024)),
        (LLAMA_70B, 71, 80, 8192, (8, 512)),
    ],
)
def test_sizes_follow_memory_and_model(
    config: Any, weights_gb: float, memory_gb: float, context: int | None,
    expected: tuple[int, int],
) -> None:  # fmt: skip
    sizes = found(config, weights_gb, memory_gb, context)
    assert (sizes.slots, sizes.step_tokens, sizes.block_size) == (*expected, 16)
    assert sizes.step_tokens >= 2 * sizes.slots


def found(
    config: Any, weights_gb: float, memory_gb: float, context: int | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> BatchSizes:  # fmt: skip
    return batch_sizes(
        config,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        context_tokens=context or config.positions_max,
        memory_bytes=int(memory_gb * GB),
        room_bytes=int((0.9 * memory_gb - weights_gb) * GB),
    )


def test_more_memory_is_never_fewer_rows_or_smaller_steps() -> None:
    ladder = [found(LLAMA_8B, 16, memory_gb) for memory_gb in range(20, 200, 4)]
    for less, more in pairwise(ladder):
        assert (more.slots >= less.slots, more.step_tokens >= less.step_tokens) == (True, True)


@pytest.mark.parametrize("head", [64, 80, 96, 128, 256])
def test_a_part_is_counted_as_wide_as_it_lies_there(head: int) -> None:
    """Of heads that leave a part of their tile empty as well."""
    kept = Kept.of(32, head, torch.device("cpu"))
    taken = sum(each.nbytes for each in (kept.sums, kept.tops, kept.totals))
    assert _part_bytes(shape(2, 64, 64, 32, 8, head, 4096)) == taken


def test_fp8_keys_take_more_rows() -> None:
    bf16, halved = (found(LLAMA_8B, 16, 32, 4096, kv) for kv in (torch.bfloat16, fp8.DTYPE))
    assert halved.slots == 2 * bf16.slots


SIZES = BatchSizes(slots=256, step_tokens=8192, block_size=16)


@pytest.mark.parametrize(
    ("argv", "on_gpu", "on_cpu"),
    [
        ("", (256, 8192, 16), (64, 512, 16)),
        ("--slots 32", (32, 8192, 16), (32, 512, 16)),
        # Alone it is more than a step of a CPU takes, which makes room.
        ("--slots 1024", (1024, 8192, 16), (1024, 2048, 16)),
        ("--step-tokens 512", (256, 512, 16), (64, 512, 16)),
        ("--step-tokens 256", (128, 256, 16), (64, 256, 16)),
        ("--step-tokens 48", (24, 48, 16), (24, 48, 16)),
        ("--step-tokens 2", (1, 2, 16), (1, 2, 16)),
        ("--slots 4 --step-tokens 64 --block-size 32", (4, 64, 32), (4, 64, 32)),
        ("--num-speculative-tokens 4", (256, 8192, 16), (64, 512, 16)),
        # Draft tokens want room as well.
        ("--num-speculative-tokens 9", (256, 8192, 16), (64, 1280, 16)),
        ("--num-speculative-tokens 4 --step-tokens 64", (6, 64, 16), (6, 64, 16)),
    ],
)
def test_what_is_asked_for_stays(
    argv: str, on_gpu: tuple[int, int, int], on_cpu: tuple[int, int, int]
) -> None:
    asked = load(WorkerSettings, "worker", ["--model", "m", *argv.split()], environ={})
    for sizes, expected in ((SIZES, on_gpu), (None, on_cpu)):
        settings = with_sizes(asked, sizes)
        assert (settings.slots, settings.step_tokens, settings.block_size) == expected
        assert settings.step_tokens > settings.slots * settings.slot_tokens_max


def test_what_others_hold_of_the_gpu_is_not_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, and whoever else is there; on a CPU nothing is asked."""
    free_gb = 124.0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (int(free_gb * GB), int(141 * GB))
    )
    settings, bf16 = WorkerSettings(model="m"), torch.bfloat16
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert sizes_for(settings, LLAMA_8B, bf16, bf16, gpu) == found(LLAMA_8B, 17, 141)
    free_gb = 30.0
    crowded = sizes_for(settings, LLAMA_8B, bf16, bf16, gpu)
    assert crowded is not None
    assert (crowded.slots, crowded.step_tokens) == (64, 4096)
    assert sizes_for(settings, LLAMA_8B, bf16, bf16, cpu) is None
