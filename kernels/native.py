"""The compiled CPU path: C++ in kernels/cpp, built once per machine into a cache folder.

Nothing happens at import. A worker calls `build()` once at its start; until then, and where that
fails, launchers take their torch path and `reason()` says why. The folder's name holds the torch
version and a hash of sources, flags and processor, so no two of them ever share a binary.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

_NAME: Final = "kaiten_native"
_SOURCES: Final = Path(__file__).parent / "cpp"
# -ffp-contract=off: see cpp/simd.h. -fopenmp when compiling only: the symbols are those of torch's
# own runtime, whose threads at::parallel_for shares.
_FLAGS: Final = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-Wno-psabi",
)
_COMPLETE: Final = "complete"
_COMPILE_S_MAX: Final = 300
_COMPILE_SCRIPT: Final = """
import json, sys
from torch.utils import cpp_extension
build = json.loads(sys.argv[2])
cpp_extension.load(name=sys.argv[1], sources=build["sources"], extra_cflags=build["flags"],
                   build_directory=build["folder"], verbose=True)
"""


@dataclass(slots=True)
class _State:
    module: ModuleType | None = None
    reason: str = "not built: native.build() has not been called"


_state = _State()


def available() -> bool:
    """Whether the launchers take the compiled path on CPU."""
    return _state.module is not None


def reason() -> str:
    """One line for people: which instructions the compiled path uses, or why there is none."""
    return _state.reason


def disable(why: str) -> None:
    """Take the torch path from now on; `build()` may be called again later."""
    _state.module, _state.reason = None, why


def build(cache_dir: Path | None = None) -> bool:
    """Load the compiled path, compiling it first if this machine has not yet (about half a minute).

    Processes that start together wait for one build. False, with `reason()`, when it cannot be had.
    """
    if available():
        return True
    try:
        module = _load_or_compile(_build_folder(cache_dir))
        _check(module)
    except (OSError, RuntimeError, ImportError) as error:
        disable(f"torch path: {_first_line(error)}")
        return False
    _state.module, _state.reason = module, f"compiled for {module.instructions()}"
    return True


def module_for(x: Tensor) -> ModuleType | None:
    """The compiled kernels when `x` is theirs to compute, else None."""
    return _state.module if x.device.type == "cpu" else None


def path_for(x: Tensor) -> str:
    """The key into a launcher's table of paths."""
    return "torch" if module_for(x) is None else "native"


def compiled() -> ModuleType:
    """The compiled kernels; only after `path_for` said "native"."""
    assert _state.module is not None, "native path chosen while it is not available"
    return _state.module


def _build_folder(cache_dir: Path | None) -> Path:
    root = cache_dir if cache_dir is not None else Path.home() / ".cache" / "kaiten" / "native"
    python = sys.implementation.cache_tag or sys.version
    digest = hashlib.sha256("\0".join((*_FLAGS, python, _cpu_features())).encode())
    for path in _source_files("*"):
        digest.update(path.read_bytes())
    return root / f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"


def _source_files(pattern: str) -> list[Path]:
    return sorted(path for path in _SOURCES.glob(pattern) if path.suffix in (".cpp", ".h"))


def _cpu_features() -> str:
    """What -march=native looks at: a shared home must not hand a binary to another processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join((platform.machine(), platform.processor(), *sorted(set(known))))


def _load_or_compile(folder: Path) -> ModuleType:
    with _locked(folder):
        if not (folder / _COMPLETE).exists():
            _compile(folder)
            (folder / _COMPLETE).touch()
    return _load(folder / f"{_NAME}.so")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One builder at a time, across processes; a killed one leaves no lock behind."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "build.flock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(folder: Path) -> None:
    """Run torch's build tools in a child, so that even a binary that crashes crashes there."""
    # A build that was killed leaves torch's own lock file, for which the next would wait forever.
    (folder / "lock").unlink(missing_ok=True)
    # The ninja wheel puts its command beside the interpreter, which need not be on PATH.
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    if shutil.which("c++", path=search) is None:
        raise RuntimeError("no C++ compiler (install g++ to use the compiled kernels)")
    sources = [str(path) for path in _source_files("*.cpp")]
    arguments = json.dumps({"sources": sources, "flags": _FLAGS, "folder": str(folder)})
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", _COMPILE_SCRIPT, _NAME, arguments],
            env={**os.environ, "PATH": search},
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_S_MAX,
        )
    except subprocess.CalledProcessError as error:
        log = folder / "build.log"
        log.write_text(error.stdout + error.stderr)
        raise RuntimeError(f"the compiler failed, see {log}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"compiling took longer than {_COMPILE_S_MAX} s") from error


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(module: ModuleType) -> None:
    """A binary that loads may still be wrong for this machine: let it compute something known."""
    ones = torch.ones(3, 40)
    if not torch.allclose(module.rms_norm(ones, torch.full((40,), 2.0), 0.0), ones * 2.0):
        raise RuntimeError("the compiled kernels gave a wrong result")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
