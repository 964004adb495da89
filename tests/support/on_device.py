"""The device that tests of `tests/gpu` compute on, and what makes others' tests compute there.

KAITEN_TEST_DEVICE=cpu takes the CPU in place of a GPU: so what needs none of a GPU's own can be run
to its end anywhere, with TRITON_INTERPRET=1 the kernels, too.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE: Final = torch.device(os.environ.get("KAITEN_TEST_DEVICE", "cuda:0"))
IS_GPU: Final = DEVICE.type == "cuda"


def missing() -> str:
    """Why nothing can be computed there; empty: it can."""
    if not IS_GPU or torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no accelerator: torch {torch.__version__}, {built}, finds none"


# What a CPU has not.
OF_A_GPU: Final = pytest.mark.skipif(not IS_GPU, reason=f"{DEVICE} is no GPU")


class MadeOn(TorchFunctionMode):
    """Inside, what is made on no device in particular is made on this one.

    Numbers are drawn by the generators that draw them anywhere, a CPU's, so they are the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if (
            function not in _device_constructors()
            or named.get("device") is not None
            # Memory of the host.
            or named.get("pin_memory")
        ):
            return function(*args, **named)
        if named.get("generator") is not None:
            return function(*args, **{**named, "device": "cpu"}).to(self._device)
        return function(*args, **{**named, "device": self._device})
