import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import native
from kernels.norms_rope.rms_norm import rms_norm


@pytest.fixture(autouse=True)
def rebuilt_afterwards(is_compiled: bool) -> object:
    yield
    native.build()


def test_importing_builds_nothing_and_without_a_gpu_triton_stays_out() -> None:
    """Not even a CPU install that happens to have triton pays for its import."""
    code = (
        "import sys, torch; from kernels import dispatch, layers, native\n"
        "import kernels.kv.rope_write_kv\n"
        "print('triton' in sys.modules, dispatch.path_for(torch.ones(1)))\n"
        "print(native.available(), native.reason())"
    )
    given = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TRITON_INTERPRET", "KAITEN_TRITON")
    }
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(native.__file__).parents[1],
        env={**given, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    triton, built = result.stdout.splitlines()
    assert triton == "False torch"
    assert built.startswith("False not built")


def test_no_compiler_leaves_the_torch_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.disable("test")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert not native.build(tmp_path)
    assert not native.available()
    assert "install g++" in native.reason()
    assert torch.equal(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0), torch.ones(1, 4))


def test_a_failing_compiler_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cpp"
    broken.mkdir()
    (broken / "module.cpp").write_text("#error no such kernel\n")
    monkeypatch.setattr(native, "_SOURCES", broken)
    native.disable("test")
    assert not native.build(tmp_path / "cache")
    if "no C++ compiler" in native.reason():
        pytest.skip(native.reason())
    (log,) = (tmp_path / "cache").glob("*/build.log")
    assert str(log) in native.reason()
    assert "no such kernel" in log.read_text()


def test_a_wrong_binary_is_not_used(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())

    class Wrong:
        @staticmethod
        def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            return torch.zeros_like(x)

    native.disable("test")
    monkeypatch.setattr(native, "_load_or_compile", lambda folder: Wrong)
    assert not native.build()
    assert "wrong result" in native.reason()


def test_folder_changes_with_sources_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = native._build_folder(tmp_path)
    monkeypatch.setattr(native, "_cpu_features", lambda: "another processor")
    other_cpu = native._build_folder(tmp_path)
    monkeypatch.setattr(native, "_SOURCES", tmp_path)
    assert len({before, other_cpu, native._build_folder(tmp_path)}) == 3
    assert torch.__version__ in before.name


def test_disabling_takes_the_torch_path() -> None:
    native.disable("switched off by --native off")
    assert native.path_for(torch.ones(1)) == "torch"
    assert native.reason() == "switched off by --native off"
