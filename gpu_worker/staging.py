"""The way of small arrays to the device: packed into pinned memory, one copy, no waiting.

Two buffers take turns. One is written again only when the copy from it has been made, two uploads
later: in practice long since.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.accelerator import Accelerator
from gpu_worker.device import AnyArray

_ALIGN_BYTES: Final = 16
_BUFFERS: Final = 2


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
        """The arrays on the device, until the next upload but one. Together they must fit."""
        assert packed_bytes(arrays) <= self.size_bytes, "larger than the staging buffer"
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        self._copied[turn]()
        host, device = self._hosts[turn], self._devices[turn]
        views, at = [], 0
        for array in arrays:
            end = at + array.nbytes
            source = torch.from_numpy(np.ascontiguousarray(array))
            host[at:end].view(source.dtype).view(source.shape).copy_(source)
            views.append(device[at:end].view(source.dtype).view(source.shape))
            at = end + -end % _ALIGN_BYTES
        device[:at].copy_(host[:at], non_blocking=True)
        self._copied[turn] = self._accelerator.mark()
        return tuple(views)
