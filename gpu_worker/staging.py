"""The way of small arrays to the device: packed into pinned memory, one copy, no waiting.

A few buffers take turns. One is written again only when the copy from it has been made. Copies are
made in the order of the steps, so those of the step that is launched wait for the one that runs:
there are buffers for both, and the host need not wait for either.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.accelerator import Accelerator
from gpu_worker.device import AnyArray

_ALIGN_BYTES: Final = 16
# A plan and its first step: rows, block places, copies, the step, the tokens looked at, edits, who
# wants log-probabilities, what is explained.
_BUFFERS: Final = 2 * 8


def packed_bytes(arrays: Sequence[AnyArray]) -> int:
    """What the arrays take in a buffer."""
    return sum(-(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for array in arrays)


class Staging:
    def __init__(self, accelerator: Accelerator, size_bytes: int) -> None:
        self._accelerator = accelerator
        self.size_bytes = size_bytes
        self._hosts = [accelerator.host_buffer(size_bytes) for _ in range(_BUFFERS)]
        self._devices = [
            torch.empty(size_bytes, dtype=torch.uint8, device=accelerator.device)
            for _ in range(_BUFFERS)
        ]
        self._copied = [accelerator.mark() for _ in range(_BUFFERS)]
        self._turn = 0

    def upload(self, *arrays: AnyArray) -> tuple[Tensor, ...]:
        """The arrays on the device, until `_BUFFERS` uploads later at the earliest."""
        size_bytes = packed_bytes(arrays)
        if size_bytes > self.size_bytes:
            # Rare, as the penalties of many long rows: memory of its own, kept until it is copied.
            device = torch.empty(size_bytes, dtype=torch.uint8, device=self._accelerator.device)
            return _moved(arrays, self._accelerator.host_buffer(size_bytes), device)
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        self._copied[turn]()
        views = _moved(arrays, self._hosts[turn], self._devices[turn])
        self._copied[turn] = self._accelerator.mark()
        return views


def _moved(arrays: Sequence[AnyArray], host: Tensor, device: Tensor) -> tuple[Tensor, ...]:
    """Begin to copy the arrays by way of `host`; where they will be in `device`."""
    views, at = [], 0
    for array in arrays:
        end = at + array.nbytes
        source = torch.from_numpy(np.ascontiguousarray(array))
        host[at:end].view(source.dtype).view(source.shape).copy_(source)
        views.append(device[at:end].view(source.dtype).view(source.shape))
        at = end + -end % _ALIGN_BYTES
    device[:at].copy_(host[:at], non_blocking=True)
    return tuple(views)
