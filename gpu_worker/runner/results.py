"""The way of a step's results to the host: into pinned memory, a few buffers of which take turns.

The next step may write over what this one computed, so it is first put aside on the device.

A result lies in its buffer until it is read. One that is not read when its turn comes again is read
then: steps may be launched, and results forgotten, in any number.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.runner.device_streams import DeviceStreams, Fetch
from gpu_worker.runner.staging import aligned
from kernels.sampling.logprobs import K_MAX

# One is computed while the one before is read; a step that fails is tried again row by row.
_BUFFERS: Final = 4


class Result:
    """Of one step."""

    def __init__(self, places: Sequence[Tensor], fetch: Fetch) -> None:
        self._places = places
        self._fetch: Fetch | None = fetch
        self._read: tuple[list[Any], int] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `read` would not wait."""
        return self._fetch is None or self._fetch.is_done

    def read(self) -> tuple[list[Any], int]:
        """Its arrays, the reader's own, and the microseconds of the step. Raises DeviceLost."""
        if self._read is None:
            assert self._fetch is not None
            elapsed_us = self._fetch.wait()
            self._read = [place.numpy().copy() for place in self._places], elapsed_us
            # With it goes what it keeps alive on the device.
            self._fetch, self._places = None, ()
        return self._read


class Results:
    def __init__(self, streams: DeviceStreams, size_bytes: int) -> None:
        self._streams = streams
        self.size_bytes = size_bytes
        self._buffers = [streams.host_buffer(size_bytes) for _ in range(_BUFFERS)]
        self._aside = [
            torch.empty(size_bytes, dtype=torch.uint8, device=streams.device)
            for _ in range(_BUFFERS)
        ]
        self._newest: list[Result | None] = [None] * _BUFFERS
        self._turn = 0

    def fetch(self, tensors: Sequence[Tensor], begun: Any) -> Result:
        """Begin to copy them; `begun` is where the step began, of the streams."""
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        if (before := self._newest[turn]) is not None:
            before.read()
        places = _places(tensors, self._buffers[turn])
        aside = _places(tensors, self._aside[turn])
        for target, tensor in zip(aside, tensors, strict=True):
            target.copy_(tensor)
        result = Result(places, self._streams.fetch(aside, places, begun))
        self._newest[turn] = result
        return result


def _places(tensors: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """One after the other in the buffer."""
    if sum(aligned(tensor.nbytes) for tensor in tensors) > len(buffer):
        # More likeliest tokens than kernels rank, which the front door can be told to admit: memory
        # that is not pinned, and a host that waits.
        return [torch.empty_like(tensor, device=buffer.device) for tensor in tensors]
    places, at = [], 0
    for tensor in tensors:
        place = buffer[at : at + prod(tensor.shape) * tensor.itemsize]
        places.append(place.view(tensor.dtype).view(tensor.shape))
        at += aligned(tensor.nbytes)
    return places


def results_bytes(limits: RowLimits) -> int:
    """The most that a step answers: all rows sample, all tokens have logprobs, K_MAX each."""
    k = min(K_MAX, limits.vocab_size)
    told = [aligned(8 * limits.slots)]
    for rows in (limits.slots, limits.step_tokens):
        told += [aligned(4 * rows), aligned(8 * rows * k), aligned(4 * rows * k)]
    return sum(told)
