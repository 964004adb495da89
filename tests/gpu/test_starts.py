"""What is said of a GPU before anything is computed: by the doctor, and by workers that refuse."""

import json
import subprocess
import sys
from typing import Any, Final

import pytest
import torch

from kaiten.mini import CHECKPOINT
from tests.support.on_device import DEVICE, IS_GPU, OF_A_GPU
from tests.support.served import ENV, ROOT

pytestmark = pytest.mark.gpu

REFUSED: Final = 2
SECONDS_MAX: Final = 200


def ran(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip


def refusal(*words: str) -> str:
    """Why a worker does not start."""
    own = ("--model", str(CHECKPOINT), "--scheduler", "127.0.0.1:1")
    done = ran("gpu_worker", *own, *words)
    said = done.stdout + done.stderr
    assert done.returncode == REFUSED, said
    assert "Traceback" not in said
    entries: list[dict[str, Any]] = [
        json.loads(line) for line in said.splitlines() if line.startswith("{")
    ]
    assert not [entry for entry in entries if entry["event"] == "service.ready"]
    (reason,) = [entry["reason"] for entry in entries if entry["event"] == "service.refused"]
    return str(reason)


def test_the_doctor_names_it() -> None:
    (line,) = [
        line for line in ran("kaiten", "doctor").stdout.splitlines() if line.split()[1:2] == ["gpu"]
    ]
    assert line.startswith("ok")
    name = torch.cuda.get_device_name(DEVICE) if IS_GPU else "none"
    # Of a long one as much as stands in a line.
    assert name.split()[-1] in line


def test_one_that_is_not_there() -> None:
    reason = refusal("--device", "cuda:7" if torch.cuda.device_count() < 8 else "cuda:99")
    if IS_GPU:
        there = torch.cuda.device_count()
        assert f"but there are {there} CUDA devices, numbered from 0" in reason
    else:
        assert "finds no CUDA device" in reason
    assert reason.startswith("--device cuda:")


@OF_A_GPU
def test_a_share_that_holds_nothing() -> None:
    reason = refusal("--device", "cuda", "--gpu-memory-share", "0.0001")
    assert "--gpu-memory-share 0.0001 of the device's" in reason
    assert "raise the share" in reason


@OF_A_GPU
def test_more_blocks_than_the_share_holds() -> None:
    reason = refusal("--device", "cuda", "--gpu-memory-share", "0.9", "--kv-blocks", "1000000000")
    assert "raise the share" in reason
    assert "--kv-blocks" in reason


@OF_A_GPU
def test_what_is_for_cpus() -> None:
    reason = refusal("--device", "cuda", "--weight-dtype", "int8")
    assert "--weight-dtype int8 is for CPUs" in reason
    reason = refusal("--device", "cuda", "--num-speculative-tokens", "4")
    assert "--num-speculative-tokens 4 is for CPUs" in reason
