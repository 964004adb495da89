"""What a container lets its process have."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker import container
from gpu_worker.container import free_memory_bytes
from gpu_worker.service.device_memory import device_memory
from kaiten.local import stack

MIB = 1 << 20


def test_free_memory_is_a_plausible_number() -> None:
    assert 1_000_000 < free_memory_bytes() < 1 << 50


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
    memory = device_memory(torch.device("cpu"), tmp_path)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free is None:
        assert free_memory_bytes(tmp_path) > 16 * MIB
        assert memory["total"] == machine
    else:
        assert free_memory_bytes(tmp_path) == free * MIB
        assert memory["total"] in (MIB, 9 * MIB), "what it is ended beyond"


@pytest.mark.parametrize("count", [container.core_count, stack.core_count], ids=["worker", "serve"])
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        # Of a core that is not whole nobody can have a thread of its own.
        ({"cpu.max": "390000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "50000\n"}, 2),
    ],
)
def test_a_containers_share_of_the_cores(
    count: Callable[[Path], int],
    files: dict[str, str],
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        path = tmp_path / name if name == "cpu.max" else tmp_path / "cpu" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert count(tmp_path) == cores
