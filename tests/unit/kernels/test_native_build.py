import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import native, probe
from kernels.cpp import build as binaries
from kernels.cpp.library import Library
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


@pytest.fixture
def no_prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.disable("test")
    monkeypatch.setattr(binaries, "PREBUILT", tmp_path / "none")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.usefixtures("no_prebuilt", "no_compiler")
def test_no_compiler_leaves_the_torch_path(tmp_path: Path) -> None:
    assert not native.build(tmp_path)
    assert not native.available()
    assert "install g++" in native.reason()
    assert torch.equal(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0), torch.ones(1, 4))


@pytest.mark.usefixtures("no_prebuilt")
def test_a_failing_compiler_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cpp"
    broken.mkdir()
    (broken / "rowwise.cpp").write_text("#error no such kernel\n")
    monkeypatch.setattr(binaries, "SOURCES", broken)
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
    with monkeypatch.context() as patched:
        patched.setattr(Library, "rms_norm", lambda self, x, weight, eps: torch.zeros_like(x))
        assert not native.build()
        assert "wrong result" in native.reason()
    linear, dtypes = Library.linear, list[torch.dtype]()

    def swaps_lanes(
        self: Library, x: torch.Tensor, packed: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        dtypes.append(x.dtype)
        return linear(self, x.flip(-1) if x.dtype is torch.bfloat16 else x, packed, *rest)

    monkeypatch.setattr(Library, "linear", swaps_lanes)
    assert native.build() == (torch.bfloat16 not in dtypes)


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


@pytest.fixture
def prebuilt(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> Path:
    """Of the best variant, in a package of its own; and there is no compiler."""
    if not is_compiled:
        pytest.skip(native.reason())
    loaded = Path(native.compiled().path)
    monkeypatch.setattr(binaries, "PREBUILT", tmp_path)
    library = binaries.prebuilt(binaries.variants()[0])
    shutil.copy(loaded, library)
    native.disable("test")
    return library


def test_a_prebuilt_library_needs_no_compiler(prebuilt: Path, tmp_path: Path) -> None:
    assert native.build(tmp_path / "cache")
    assert native.reason() == f"prebuilt for {binaries.variants()[0].name}"
    assert native.compiled().path == prebuilt
    assert not (tmp_path / "cache").exists()


def test_one_of_other_sources_is_not_found(
    prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "_FLAGS", ("-O2",))
    assert not native.build(tmp_path / "cache")
    assert "no C++ compiler" in native.reason()


def test_one_that_does_not_load_is_told(prebuilt: Path, tmp_path: Path) -> None:
    prebuilt.write_bytes(b"made for another C library")
    assert not native.build(tmp_path / "cache")
    assert "no C++ compiler" in native.reason()
    assert "the prebuilt library does not load" in native.reason()


def test_a_kept_one_that_does_not_load_is_made_anew(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    loaded, made = native.compiled().path, list[Path]()

    def compile_to(target: Path, *_: object) -> None:
        made.append(target)
        target.write_bytes(b"cut short" if len(made) == 1 else Path(loaded).read_bytes())

    monkeypatch.setattr(binaries, "PREBUILT", tmp_path / "nothing")
    monkeypatch.setattr(binaries, "find_compiler", lambda: "c++")
    monkeypatch.setattr(binaries, "_version", lambda _: "1")
    monkeypatch.setattr(binaries, "compile_to", compile_to)
    native.disable("test")
    assert native.build(tmp_path)
    assert native.reason().startswith("compiled for ")
    # Of several that may be the best each is tried.
    assert made[0] == made[1]
    assert len(made) == len(binaries.rivals()) + 1


def test_the_best_that_the_processor_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {variant.name: variant.needs for variant in binaries.X86}
    said: dict[str, set[str]] = {
        "avx512-amx": {*needs["avx512-amx"], "amx_int8"},
        "avx512-bf16": {*needs["avx512-bf16"], "sse2"},
        "avx512": {*needs["avx512"], "avx512_vnni"},
        # Alder Lake has bf16 of AVX, but nothing of AVX-512.
        "avx2": {*needs["avx2"], "avx_vnni", "avx512_bf16"},
        "generic": {"sse2", "avx"},
    }
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name, flags in said.items():
        monkeypatch.setattr(binaries, "_cpu_flags", lambda found=flags: frozenset(found))
        assert binaries.variants.__wrapped__()[0].name == name
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert [variant.name for variant in binaries.variants.__wrapped__()] == ["generic"]


def test_those_of_arm_are_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux says there what it calls flags elsewhere by another word."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(binaries, "variants", binaries.variants.__wrapped__)
    for features, names in (("fp asimd", ["neon"]), ("fp asimd bf16", ["neon-bf16", "neon"])):
        said = f"processor\t: 0\nFeatures\t: {features}\n"
        monkeypatch.setattr(Path, "read_text", lambda path, found=said: found)
        assert [variant.name for variant in binaries.rivals()] == names


@pytest.mark.parametrize(
    ("times_s", "name"),
    [
        ({"first": 1.0, "second": 1.1}, "first"),
        # Not by so much that it could not be chance.
        ({"first": 1.0, "second": 0.9}, "first"),
        ({"first": 1.0, "second": 0.5}, "second"),
        ({"first": 1.0}, "first"),
    ],
)
def test_a_rival_must_be_clearly_faster(times_s: dict[str, float], name: str) -> None:
    assert probe.chosen(times_s) == name


@pytest.mark.parametrize("faster", ["first", "second"])
def test_of_rivals_the_faster_is_loaded(
    prebuilt: Path, faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = binaries.variants()[0]
    names = ("broken", "first", "second")
    rivals = [replace(best, name=name, is_timed=True) for name in names]
    monkeypatch.setattr(binaries, "variants", lambda: tuple(rivals))
    for rival in rivals:
        shutil.copy(prebuilt, binaries.prebuilt(rival))
    binaries.prebuilt(rivals[0]).write_bytes(b"made for another C library")

    def forced(library: Library, dtype: torch.dtype) -> float:
        return 0.25 if library.path.name.startswith(faster) else 1.0

    monkeypatch.setattr(probe, "linear_s", forced)
    assert native.build()
    assert native.compiled().path.name.startswith(faster)
    monkeypatch.undo()
    said = native.explanation()
    assert "timed here, a linear in bf16: first " in said
    assert re.search(r"x 1024, takes bf16 [\d.]+ ms, fp32 [\d.]+ ms, attention of 16 rows", said)


def test_a_variant_that_is_not_there_is_named() -> None:
    assert not native.build(variant="avx1024")
    assert "this processor has no avx1024; it has" in native.reason()


def test_disabling_takes_the_torch_path() -> None:
    native.disable("switched off by --native off")
    assert native.path_for(torch.ones(1)) == "torch"
    assert native.reason() == "switched off by --native off"
