"""Which binary of the compiled kernels serves a processor, and where it comes from.

A variant is a set of instructions, compiled with fixed flags: never for "this machine", so that a
binary can be carried to another. The best one that the processor has is taken: prebuilt, if the
package holds it (`make wheel`), else compiled once per machine by whatever C++ compiler there is.
Of those of ARM nobody knows which is the best: they are timed (native.build).

The name of a binary holds a hash of all it is made of, sources, flags and compiler: one that was
made of anything else is not found.
"""

import fcntl
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
PREBUILT: Final = SOURCES / "prebuilt"
# -ffp-contract=off: see simd.h.
_FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
)
# GCC's and Clang's; a name that a machine has for its own comes first.
_COMPILERS: Final = ("c++", "g++", "clang++")
_COMPILE_S_MAX: Final = 300
# Each takes 0.4 GB for some seconds.
_COMPILERS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]  # as Linux names them
    # Nobody has measured whether it is better than those after it.
    is_timed: bool = False


# What Linux says of x86-64-v3 and -v4 (psABI) beyond what every such processor has.
_V3: Final = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4: Final = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_V4_BF16: Final = _V4 | {"avx512_bf16"}
_BF16_FLAGS: Final = ("-march=x86-64-v4", "-mavx512bf16")
_GENERIC: Final = Variant("generic", (), frozenset())
# The best first.
X86: Final = (
    Variant(
        "avx512-amx",
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"),
        _V4_BF16 | {"amx_tile", "amx_bf16"},
    ),
    Variant("avx512-bf16", _BF16_FLAGS, _V4_BF16),
    Variant("avx512", ("-march=x86-64-v4",), _V4),
    Variant("avx2", ("-march=x86-64-v3",), _V3),
    _GENERIC,
)


# Every 64-bit ARM has NEON.
ARM: Final = (
    Variant("neon-bf16", ("-march=armv8.2-a+bf16",), frozenset(["asimd", "bf16"]), is_timed=True),
    Variant("neon", ("-march=armv8-a",), frozenset()),
)
_OF_MACHINE: Final = {"x86_64": X86, "aarch64": ARM, "arm64": ARM}


def every(machine: str | None = None) -> tuple[Variant, ...]:
    """Those of an architecture (`platform.machine()`), or of this machine's; the best first."""
    return _OF_MACHINE.get(machine or platform.machine(), (_GENERIC,))


@cache
def variants() -> tuple[Variant, ...]:
    """Those that this processor can run, the best first."""
    flags = _cpu_flags()
    return tuple(variant for variant in every() if variant.needs <= flags)


def rivals() -> tuple[Variant, ...]:
    """The best one that this processor can run, and all that may be as good."""
    found = variants()
    best = next((i for i, variant in enumerate(found, 1) if not variant.is_timed), len(found))
    return found[:best]


def variant_named(name: str) -> Variant:
    """ValueError if this processor cannot run it."""
    found = {variant.name: variant for variant in variants()}
    if name not in found:
        raise ValueError(f"this processor has no {name}; it has {', '.join(found)}")
    return found[name]


def prebuilt(variant: Variant) -> Path:
    """Where the package has it, if it does."""
    return PREBUILT / f"{variant.name}-{_digest(variant)}.so"


def compiled(variant: Variant, cache_dir: Path | None = None) -> Path:
    """Compile it, unless this machine has; processes that start together wait for one of them.

    RuntimeError says why not, and names the log.
    """
    compiler = find_compiler()
    if cache_dir is None:
        cache_dir = Path.home() / ".cache" / "kaiten" / "native"
    target = cache_dir / f"{variant.name}-{_digest(variant, _version(compiler))}.so"
    with _locked(target):
        if not target.exists():
            compile_to(target, variant, compiler)
    return target


def find_compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise RuntimeError("no C++ compiler (install g++ to use the compiled kernels)")


def compile_to(target: Path, variant: Variant, compiler: str, *link_flags: str) -> None:
    """Write the variant's library. RuntimeError: the compiler failed, and where its log is."""
    flags = (*_FLAGS, *variant.flags)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = _source_files(".cpp")
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        # A process that dies here leaves no half library under the name of a whole one.
        library = Path(folder, target.name)
        with ThreadPoolExecutor(_COMPILERS_AT_ONCE) as runners:
            told = list(runners.map(_ran, commands))
        told.append(_ran([compiler, *flags, "-shared", *link_flags, *objects, "-o", str(library)]))
        if failed := "".join(filter(None, told)):
            log = target.with_suffix(".log")
            log.write_text(failed)
            raise RuntimeError(f"the compiler failed, see {log}")
        library.replace(target)


def _ran(command: list[str]) -> str:
    """What it said, if it failed."""
    done = _run(command)
    return done.stdout + done.stderr + f"exit code {done.returncode}\n" if done.returncode else ""


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_S_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"compiling took longer than {_COMPILE_S_MAX} s") from error


def _digest(variant: Variant, compiler: str = "") -> str:
    made_of = hashlib.sha256("\0".join((*_FLAGS, *variant.flags, compiler)).encode())
    for path in _source_files(".cpp", ".h"):
        name = path.relative_to(SOURCES).as_posix()
        made_of.update(f"\0{name}\0".encode() + path.read_bytes())
    return made_of.hexdigest()[:16]


def _source_files(*suffixes: str) -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One builder at a time, across processes; a killed one leaves no lock behind."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with target.with_suffix(".flock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    # Those of ARM are called features.
    said = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(word for line in said for word in line.split())
