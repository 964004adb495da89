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
        # Of a class nothing is an instance: accelerate asks of each module whether it is compiled.
        return type(name, (), {}) if name[0].isupper() else _as_it_is


def _as_it_is(function: Any = None, *_: object, **__: object) -> Any:
    """Of a mark, and of one that was told something first."""
    return _as_it_is if function is None else function


def install() -> None:
    name = "torch._dynamo"
    assert name not in sys.modules, "it was imported already"
    package = sys.modules[name] = _NoCompiler(name)
    vars(package)["__path__"] = []
    # The last two are torchvision's and accelerate's, which transformers imports where they are.
    for part in ("_trace_wrapped_higher_order_op", "utils", "eval_frame"):
        vars(package)[part] = sys.modules[f"{name}.{part}"] = _NoCompiler(f"{name}.{part}")
    vars(torch)["_dynamo"] = package
    # Who saves a model asks whether a tensor is one of these, which takes half of the compiler.
    sys.modules["torch.distributed.tensor"] = _NoCompiler("torch.distributed.tensor")
    vars(torch.compiler)["disable"] = _as_it_is
    torch.distributed.is_available = lambda: False
