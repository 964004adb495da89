"""Which path computes a tensor: one small table by device, which tests may overrule.

cuda                         triton
cpu                          native when it is built (kernels.native), else torch; torch for float16
cpu in Triton's interpreter  triton
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from kernels import jit, native

PATHS: Final = ("triton", "native", "torch")


class _Choice:
    forced: str | None = None


_choice = _Choice()


def force(path: str | None) -> None:
    """Take this path for every tensor; None: by device again."""
    if path is not None and path not in PATHS:
        raise ValueError(f"path: must be one of {', '.join(PATHS)}")
    if path == "triton" and not jit.IS_THERE:
        raise ValueError("path: triton needs a CUDA device, or TRITON_INTERPRET=1")
    _choice.forced = path


@contextmanager
def forced(path: str) -> Iterator[None]:
    """Inside, take this path for every tensor."""
    before = _choice.forced
    force(path)
    try:
        yield
    finally:
        _choice.forced = before


def path_for(x: Tensor) -> str:
    """The key into a launcher's table of paths."""
    if _choice.forced is not None:
        return _choice.forced
    if x.is_cuda or jit.IS_INTERPRETED:
        return "triton"
    return "torch" if x.dtype is torch.float16 else native.path_for(x)
