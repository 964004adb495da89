"""torch without its compiler, for a process that computes with transformers and compiles nothing.

    without_compiler.install()        before transformers is imported

transformers marks functions for the compiler, by `torch._dynamo`: an import of sympy and of half
of torch, which costs more CPU than what the smaller models say. Here each mark leaves its function
as it is, which is what it means to who does not compile.
"""

import sys
from types import ModuleType
from typing import Any

import torch


class _NoCompiler(ModuleType):
    def is_compiling(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _as_it_is


def _as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    """Of a mark, and of one that was told something first."""
    return _as_it_is if function is None else function


def install() -> None:
    name = "torch._dynamo"
    assert name not in sys.modules, "it was imported already"
    # The last is torchvision's, which transformers imports where it is.
    for each in (name, f"{name}._trace_wrapped_higher_order_op", f"{name}.utils"):
        sys.modules[each] = _NoCompiler(each)
    vars(sys.modules[name])["__path__"] = []
    vars(torch)["_dynamo"] = sys.modules[name]
    vars(torch.compiler)["disable"] = _as_it_is
    torch.distributed.is_available = lambda: False
