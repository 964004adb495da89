"""The one door to Triton: imported where it can run, so that a CPU install needs none.

    from kernels import jit
    from kernels.jit import constexpr, pointer, scalar, stride, tl

Triton comes in when this process has a CUDA device, when TRITON_INTERPRET=1 asks for its
interpreter (kernels run as Python over CPU tensors: for tests, thousands of times slower), or when
KAITEN_TRITON=1 asks for it without either, to compile ahead of time. Elsewhere `compiled` leaves a
kernel the plain function it was, and no path leads to it. The modules that use it keep their
annotations unevaluated, so that `constexpr` is a word only Triton reads.
"""

import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kernels import variants

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of an extra: who has a GPU may do without it, by --device cpu.
IS_INSTALLED = find_spec("triton") is not None
IS_THERE = IS_INSTALLED and (
    IS_INTERPRETED or os.environ.get("KAITEN_TRITON") == "1" or torch.cuda.is_available()
)


class _Word:
    # Triton looks up the words of annotations, and lets pass only what is its own.
    __triton_builtin__ = True


# Kinds of parameters: device memory; a number that changes from step to step, for which nothing
# may be compiled anew; a distance that a model fixes, so that its divisibility may be compiled in;
# a number that is compiled in.
if TYPE_CHECKING:
    pointer: TypeAlias = Any
    scalar: TypeAlias = Any
    stride: TypeAlias = Any
    constexpr: TypeAlias = Any
else:
    pointer = scalar = stride = constexpr = _Word

if TYPE_CHECKING or IS_THERE:
    import triton
    import triton.language

    tl: Any = triton.language
else:
    tl = None


def compiled(function: Callable[..., Any]) -> Any:
    """`triton.jit` where Triton is, else the function unchanged."""
    if not IS_THERE:
        return function
    changing = [name for name, kind in function.__annotations__.items() if kind == "scalar"]
    return triton.jit(function, do_not_specialize=changing)


def constant(value: bool) -> Any:
    """A name of a module that kernels may read."""
    return tl.constexpr(value) if IS_THERE else value


def driver_problem() -> str | None:
    """Why Triton cannot launch on the GPU of this process; None: it can.

    Before its first launch it compiles a piece of C against Python's headers, and keeps that in its
    cache folder. Without a compiler, headers or libcuda that ends as four kinds of exceptions.
    """
    from triton.runtime import driver

    try:
        return None if driver.active is not None else "it knows no driver"
    except subprocess.CalledProcessError as error:
        program = Path(error.cmd[0]).name
        return f"{program} failed: Python's headers (Python.h) or libcuda.so may be missing"
    except (RuntimeError, AssertionError, OSError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".!")


def is_compilers(error: BaseException) -> bool:
    """Whether Triton raised it: of a kernel that it cannot compile, or that asks for more than the
    device has, of a cache that it cannot write.

    By where it was raised: what its compiler's passes and its tools say are exceptions of any kind.
    """
    return any(module.partition(".")[0] == "triton" for module in _raised_in(error))


def is_of_a_program(error: BaseException) -> bool:
    """Whether it was raised while a program was started."""
    return "subprocess" in _raised_in(error)


def _raised_in(error: BaseException) -> set[str]:
    """The names of all modules that it passed through."""
    trace, modules = error.__traceback__, set[str]()
    while trace is not None:
        modules.add(str(trace.tb_frame.f_globals.get("__name__")))
        trace = trace.tb_next
    return modules


def watch_compiles(note: Callable[[str], None]) -> None:
    """From now on tell `note` of each kernel that Triton compiles, or loads: its name and key."""
    assert IS_THERE
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def compiled_one(**told: Any) -> None:
        note(f"{told['fn'].name} {told['key']}")
        if before is not None:
            before(**told)

    runtime.jit_post_compile_hook = compiled_one


@contextmanager
def compiling_ahead(device: torch.device, threads: int) -> Iterator[None]:
    """Inside, launches launch nothing: what they would is compiled for `device`, so many kernels at
    a time, and all that can be is there in the end. What cannot says so when it is launched.

    Tensors need no memory: of them only kinds, and how they are aligned, are compiled in.
    """
    global arch_elsewhere, processors_elsewhere
    from triton.runtime._async_compile import AsyncCompileMode

    run, before = triton.JITFunction.run, (arch_elsewhere, processors_elsewhere)

    def asked(kernel: Any, *args: Any, **named: Any) -> Any:
        return run(kernel, *args, **{**named, "warmup": True})

    major, minor = _capability(device)
    triton.JITFunction.run = asked
    arch_elsewhere, processors_elsewhere = 10 * major + minor, _processors(device)
    try:
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        triton.JITFunction.run = run
        arch_elsewhere, processors_elsewhere = before


def power_of_two(count: int) -> int:
    """The least power of two >= count, at least 1: tiles have no other sizes."""
    return 1 << max(0, count - 1).bit_length()


def is_widened(x: torch.Tensor) -> bool:
    """Whether tl.dot needs float32: the interpreter multiplies the bits of bfloat16 as integers."""
    return IS_INTERPRETED and x.dtype == torch.bfloat16


@compiled
def wait_for_neighbour(PDL: constexpr) -> None:
    """Before it reads anything: until what the kernel before wrote is there."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def neighbourly(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel that calls `wait_for_neighbour`, and of its launch."""
    if IS_INTERPRETED or not variants.is_on("programmatic-launch"):
        return {"PDL": False}
    has_it = device.type != "cuda" or _capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if has_it else {"PDL": False}


# Of a device that is no GPU: the processor that is compiled for, or played.
arch_elsewhere = 90
# How many of them; none: three programs share every launch, so that each has several turns.
processors_elsewhere: int | None = None


def is_sm_90(device: torch.device) -> bool:
    """Whether the device is of the kind of which H100 and H200 are."""
    if device.type != "cuda":
        return arch_elsewhere == 90
    return _capability(device) == (9, 0)


def programs(device: torch.device, per_processor: int) -> int:
    """How many programs of a persistent kernel share the work of a launch."""
    if device.type == "cuda":
        return per_processor * _processors(device)
    return 3 if processors_elsewhere is None else per_processor * processors_elsewhere


# Asked in every launch, and the answer is always the same.
@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
