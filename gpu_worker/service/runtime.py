"""What a process must settle before torch is loaded into it: how its compute threads wait, how long
they wait for a core, how a GPU's memory is cut, and what of torch is not imported.

OpenMP's threads spin between the operators of a step, by default for milliseconds. On a machine
that the worker shares with gateway, scheduler and store that takes the cores from the very
processes it waits for, and with more ready threads than cores a step can take many times longer.
About a hundred microseconds bridge the gap between two operators; whoever waits longer sleeps.

A thread that wakes on a busy core waits until the one running there has had its turn, 3 ms by
default, and all the others wait for it at the operator's end: in a step of a few hundred operators
that adds up. Linux lets a thread ask for shorter turns; it then comes on as soon as it wakes, and
gets no more of the core than before.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import MutableMapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final

_DEFAULTS: Final = {
    # Of libgomp, which the torch wheels bring: turns of its waiting loop.
    "GOMP_SPINCOUNT": "5000",
    # Of LLVM's and Intel's runtime, in other builds of torch: milliseconds.
    "KMP_BLOCKTIME": "0",
    # numpy only moves small columns about; its matrix library needs no threads of its own.
    "OPENBLAS_NUM_THREADS": "1",
}
# Steps of every size take turns: memory that one gives back in large pieces must fit the next one's
# other sizes, or after Ready the device is asked for more.
_ALLOCATOR: Final = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_BEFORE: Final = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE: Final = "expandable_segments:True"


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the operator has not set. Without effect once torch is imported."""
    if _ALLOCATOR_BEFORE not in environ:
        environ.setdefault(_ALLOCATOR, _EXPANDABLE)
    if "OMP_WAIT_POLICY" in environ:
        return
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)


# What torch imports for its compiler alone, a third of its import: what operators say of tensors
# without data, and programs that are exported.
COMPILERS: Final = ("torch._meta_registrations", "torch.export")


class Later(ModuleType):
    """Stands for a module, which is imported when somebody asks for something in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_itself(self), name)


def _itself(later: ModuleType) -> ModuleType:
    """What it stands for."""
    if sys.modules.get(later.__name__) is later:
        del sys.modules[later.__name__]
    return import_module(later.__name__)


class WithTheCompiler(MetaPathFinder):
    """Finds nothing. Who imports the compiler after all, as torch's profiler does, has what was
    left out before: else its parts are imported in an order that they do not bear.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in ("torch._dynamo", "torch._inductor"):
            sys.meta_path.remove(self)
            for name in COMPILERS:
                if isinstance(left_out := sys.modules.get(name), Later):
                    _itself(left_out)


def leave_out_the_compiler() -> bool:
    """True: from now on. Of a build of torch for CPUs, before it is imported: a GPU's kernels are
    compiled ahead by tensors without data.
    """
    if "torch" in sys.modules or not version("torch").endswith("+cpu"):
        return False
    sys.modules.update({name: Later(name) for name in COMPILERS})
    sys.meta_path.insert(0, WithTheCompiler())
    return True


TURN_NS: Final = 100_000  # The shortest that Linux grants.
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
# size, policy, flags, nice, priority, runtime, deadline, period, and two hints not given.
_SCHED_ATTR: Final = "=IIQiIQQQII"


def take_short_turns() -> bool:
    """For this thread and all that it starts from now on. False where it cannot be had.

    Honoured by Linux 6.12 and later; earlier ones accept it and change nothing.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    is_ordinary = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    if number is None or not is_ordinary:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    size = struct.calcsize(_SCHED_ATTR)
    wish = struct.pack(_SCHED_ATTR, size, os.SCHED_OTHER, 0, nice, 0, TURN_NS, 0, 0, 0, 0)
    refused: int = ctypes.CDLL(None).syscall(number, 0, ctypes.c_char_p(wish), 0)
    return not refused


def return_freed_memory() -> None:
    """Give back what loading has freed: the allocator (glibc's) keeps some of it for later."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
