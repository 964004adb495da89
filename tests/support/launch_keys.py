"""What Triton would compile for each launch that its interpreter makes.

Keys are made by Triton's own binder, for a GPU that need not be there: the kinds of the arguments,
which of them are divisible by 16, what is compiled in, and the options. A key that was not there
before is a compile.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class LaunchKeys:
    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._binders: dict[str, Any] = {}

    def note(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        _, key, options = self._binder(kernel)(*args, **named)
        self.seen.add(f"{kernel.__name__} {key} {sorted(options.items())}")

    def _binder(self, kernel: Any) -> Any:
        name = f"{kernel.fn.__module__}.{kernel.__name__}"
        if name not in self._binders:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            self._binders[name] = create_function_from_signature(
                compiled.signature, compiled.params, _BACKEND
            )
        return self._binders[name]


@contextmanager
def launch_keys(left_out: Collection[str] = ()) -> Iterator[LaunchKeys]:
    """Of every launch inside, which is made too, unless its kernel is `left_out`.

    Those leave zeros in what they call `out` or `y`, and all else as it is.
    """
    keys, run = LaunchKeys(), InterpretedFunction.run

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        keys.note(kernel, args, named)
        if kernel.__name__ in left_out:
            for name, value in zip(kernel.arg_names, args, strict=False):
                if name in ("out", "y"):
                    value.zero_()
            return None
        return run(kernel, *args, grid=grid, warmup=warmup, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", noted)
        yield keys
