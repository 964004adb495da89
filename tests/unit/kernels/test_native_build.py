import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import native
from kernels.cpp import build as binaries
from kernels.cpp.library import Library
from kernels.norms_rope.rms_norm import rms_norm


@pytest.fixture(autouse=True)
def rebuilt_afterwards(is_compiled: bool) -> object:
    yield
    native.build()


def test_importing_builds_nothing() -> None:
    code = "from kernels import native; print(native.available(), native.reason())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(native.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert result.stdout.startswith("False not built")


def test_no_compiler_leaves_the_torch_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.disable("test")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not native.build(tmp_path)
    assert not native.available()
    assert "install g++" in native.reason()
    assert torch.equal(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0), torch.ones(1, 4))


def test_a_failing_compiler_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cpp"
    broken.mkdir()
    (broken / "rowwise.cpp").write_text("#error no such kernel\n")
    monkeypatch.setattr(binaries, "SOURCES", broken)
    native.disable("test")
    assert not native.build(tmp_path / "cache")
    if "no C++ compiler" in native.reason():
        pytest.skip(native.reason())
    (log,) = (tmp_path / "cache").glob("*.log")
    assert str(log) in native.reason()
    assert "no such kernel" in log.read_text()
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_wrong_binary_is_not_used(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    native.disable("test")
    monkeypatch.setattr(Library, "rms_norm", lambda self, x, weight, eps: torch.zeros_like(x))
    assert not native.build()
    assert "wrong result" in native.reason()


def test_a_binary_is_named_by_all_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name found is a binary of these very sources and flags, by this very compiler."""
    made: list[str] = []
    monkeypatch.setattr(binaries, "compile_to", lambda target, *_: made.append(target.name))
    monkeypatch.setattr(binaries, "find_compiler", lambda: "c++")
    monkeypatch.setattr(binaries, "_version", lambda compiler: "12.2")
    best, generic = binaries.X86[0], binaries.X86[-1]
    binaries.compiled(best, tmp_path)
    binaries.compiled(generic, tmp_path)
    monkeypatch.setattr(binaries, "_version", lambda compiler: "12.3")
    binaries.compiled(best, tmp_path)
    monkeypatch.setattr(binaries, "_FLAGS", ("-O2",))
    binaries.compiled(best, tmp_path)
    (tmp_path / "other.h").write_text("")
    monkeypatch.setattr(binaries, "SOURCES", tmp_path)
    binaries.compiled(best, tmp_path)
    assert len(set(made)) == 5
    assert all(name.startswith(f"{best.name}-") for name in made if name != made[1])


def test_disabling_takes_the_torch_path() -> None:
    native.disable("switched off by --native off")
    assert native.path_for(torch.ones(1)) == "torch"
    assert native.reason() == "switched off by --native off"
