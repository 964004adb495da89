"""Copies of blocks on the device, by way of memory of their own: no plan asks for more.

A few blocks at a time are read, then written. No block is both read and written by one plan
(`batch.plan_validation`), so it does not matter which go first.
"""

from typing import Final

import torch
from torch import Tensor

# On its way at once; larger blocks go one by one.
_ROOM_BYTES: Final = 32 << 20


class BlockCopies:
    def __init__(self, pages: Tensor) -> None:
        """`pages` as in `kv_cache`."""
        layers, both, blocks, *tile = pages.shape
        self._pages = pages
        self._rows = layers * both
        self._tile = tuple(tile)
        self._block = pages[:, :, 0].numel()
        self._at_once = min(blocks, max(1, _ROOM_BYTES // (self._block * pages.itemsize)))
        self._room = pages.new_empty(self._at_once * self._block)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Block sources[i] to targets[i]; int64 on the device."""
        pages = self._pages.flatten(0, 1)
        for start in range(0, len(sources), self._at_once):
            some, others = (each[start : start + self._at_once] for each in (sources, targets))
            room = self._room[: self._block * len(some)].view(self._rows, len(some), *self._tile)
            torch.index_select(pages, 1, some, out=room)
            pages.index_copy_(1, others, room)
