"""The CPU kernels of ARM: compiled as a wheel ships them, and run by an emulated processor. And
those that use AMX, whose instructions a header plays.

`self_test.cpp` calls them through their door and compares with plain loops. It is run on this
machine's own kernels as well, so that what it finds is the kernels' and not its own.
"""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kernels import native
from kernels.cpp import build
from tools import prebuilt

CXX: Final = "aarch64-linux-gnu-g++"
QEMU: Final = "qemu-aarch64"
SYSROOT: Final = "/usr/aarch64-linux-gnu"
# The oldest that a variant is for, so that an instruction it lacks ends the program.
PROCESSORS: Final = {"neon": "cortex-a53", "neon-bf16": "max"}
HERE: Final = Path(__file__).parent

pytestmark = [pytest.mark.arm, pytest.mark.timeout(900)]


def missing() -> str:
    return ", ".join(name for name in (CXX, QEMU) if not shutil.which(name))


def self_test(folder: Path, library: Path, compiler: str) -> str:
    """The program, for one library."""
    words = [str(HERE / "self_test.cpp"), str(library), f"-Wl,-rpath,{library.parent}"]
    return compiled(folder, compiler, *words)


def compiled(folder: Path, compiler: str, *words: str) -> str:
    program = str(folder / "program")
    given = ("-std=c++20", "-O1", "-pthread", f"-I{build.SOURCES}", f"-I{HERE}")
    done = subprocess.run(
        [compiler, *given, *words, "-o", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return program


def held(words: list[str], instructions: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{instructions}: "), done.stdout
    assert "FAILED" not in done.stdout


@pytest.mark.skipif(bool(missing()), reason=f"no {missing()} here")
@pytest.mark.parametrize(
    "variant",
    # Without products of pairs there is less to go wrong, and each takes half a minute to compile.
    [pytest.param(v, marks=[] if v.name == "neon-bf16" else [pytest.mark.slow]) for v in build.ARM],
    ids=lambda variant: variant.name,
)
def test_kernels_compute_what_they_say_and_exactly(variant: build.Variant, tmp_path: Path) -> None:
    program = self_test(tmp_path, prebuilt.write(tmp_path, variant, CXX), CXX)
    held([QEMU, "-L", SYSROOT, "-cpu", PROCESSORS[variant.name], program], variant.name)


LINEARS: Final = ("linear/linear", "linear/linear_int8", "linear/linear_int4", "parallel")


def amx_test(folder: Path, compiler: str, *flags: str) -> str:
    sources = [
        str(HERE / "amx_test.cpp"),
        *(str(build.SOURCES / f"{name}.cpp") for name in LINEARS),
    ]
    return compiled(
        folder, compiler, "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", *flags, *sources
    )


@pytest.mark.skipif(bool(missing()), reason=f"no {missing()} here")
def test_kernels_in_tiles_are_what_they_say(tmp_path: Path) -> None:
    neon = next(variant for variant in build.ARM if variant.name == "neon-bf16")
    played = replace(neon, flags=(*neon.flags, f'-DKAITEN_AMX_PLAYED_BY="{HERE / "played_amx.h"}"'))
    emulated = (QEMU, "-L", SYSROOT, "-cpu", "max")
    held([*emulated, amx_test(tmp_path, CXX, *played.flags)], "amx")
    library = prebuilt.write(tmp_path, played, CXX)
    held([*emulated, self_test(tmp_path, library, CXX)], neon.name)


@pytest.mark.skipif("avx512-amx" not in {each.name for each in build.variants()}, reason="no AMX")
def test_so_they_are_on_a_processor_that_has_them(tmp_path: Path) -> None:
    program = amx_test(tmp_path, build.find_compiler(), *build.variant_named("avx512-amx").flags)
    held([program], "amx")


def test_so_do_those_of_this_machine(tmp_path: Path) -> None:
    if not native.build():
        pytest.skip(native.reason())
    library = native.compiled()
    held([self_test(tmp_path, library.path, build.find_compiler())], library.instructions())
