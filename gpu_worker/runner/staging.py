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

from gpu_worker.batch.step_types import AnyArray
from gpu_worker.runner.device_streams import DeviceStreams

ALIGN_BYTES: Final = 16
# A plan and its first step: rows, block places, swaps, copies, the step, logits indices, who wants
# log-probabilities, of samples and of prompts.
_BUFFERS: Final = 2 * 8


def aligned(size_bytes: int) -> int:
    """With what is left free behind it, so that kernels need not be compiled anew for the next."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def packed_bytes(arrays: Sequence[AnyArray]) -> int:
    """What the arrays take in a buffer."""
    return sum(aligned(array.nbytes) for array in arrays)


class Staging:
    def __init__(self, streams: DeviceStreams, size_bytes: int, buffers: int = _BUFFERS) -> None:
        self._streams = streams
        self.size_bytes = size_bytes
        self._hosts = [streams.host_buffer(size_bytes) for _ in range(buffers)]
        self._devices = [
            torch.empty(size_bytes, dtype=torch.uint8, device=streams.device)
            for _ in range(buffers)
        ]
        self._copied = [streams.mark() for _ in range(buffers)]
        self._turn = 0

    def upload(self, *arrays: AnyArray) -> tuple[Tensor, ...]:
        """The arrays on the device, until there were as many more uploads as there are buffers."""
        size_bytes = packed_bytes(arrays)
        assert size_bytes <= self.size_bytes, f"{size_bytes} bytes are too many to send at once"
        turn, self._turn = self._turn, (self._turn + 1) % len(self._hosts)
        self._copied[turn]()
        views = _moved(arrays, self._hosts[turn], self._devices[turn])
        self._copied[turn] = self._streams.mark()
        return views

    def send(self, array: AnyArray, target: Tensor) -> None:
        """To memory that stays, after everything launched so far."""
        target.copy_(self.upload(array)[0])


def _moved(arrays: Sequence[AnyArray], host: Tensor, device: Tensor) -> tuple[Tensor, ...]:
    """Begin to copy the arrays by way of `host`; where they will be in `device`."""
    views, at = [], 0
    for array in arrays:
        end = at + array.nbytes
        source = torch.from_numpy(np.ascontiguousarray(array))
        host[at:end].view(source.dtype).view(source.shape).copy_(source)
        views.append(device[at:end].view(source.dtype).view(source.shape))
        at = aligned(end)
    device[:at].copy_(host[:at], non_blocking=True)
    return tuple(views)
