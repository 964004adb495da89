"""Copies of blocks: on the device, by way of memory of its own, and to and from the host's memory.

A few blocks at a time are read, then written. No block is both read and written by one plan's
copies (`batch.plan_validation`), so it does not matter which go first. Swaps are made as if one
after the other; the host reads nothing of them and waits for none.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from gpu_worker.batch.step_types import BlockPairs

# On its way at once; larger blocks go one by one.
_ROOM_BYTES: Final = 32 << 20


class BlockCopies:
    def __init__(self, pages: Tensor, host_blocks: Tensor | None = None) -> None:
        """As in `kv_cache`; None: there are none."""
        layers, both, blocks, *tile = pages.shape
        self._pages = pages
        self._host_blocks = host_blocks
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

    def swap(self, pairs: BlockPairs, own: Tensor) -> None:
        """own[i], int64 on the device: the one of pairs[i] that is no host block."""
        assert self._host_blocks is not None
        blocks, host, count = self._pages.movedim(2, 0), self._host_blocks, self._pages.size(2)
        for part in _batches(pairs, count, self._at_once):
            some = pairs[part]
            room = self._room[: self._block * len(some)].view(len(some), *host.shape[1:])
            if some[0][0] < count:
                torch.index_select(blocks, 0, own[part], out=room)
                for one, (_, target) in zip(room, some, strict=True):
                    host[target - count].copy_(one, non_blocking=True)
            else:
                for one, (source, _) in zip(room, some, strict=True):
                    one.copy_(host[source - count], non_blocking=True)
                blocks.index_copy_(0, own[part], room)


def _batches(pairs: BlockPairs, block_count: int, most: int) -> Iterator[slice]:
    """Swaps of one direction, of which none undoes another: all may be read before any is written.

    The sources of a direction are none of its targets.
    """
    start, targets = 0, set[int]()
    for index, (source, target) in enumerate(pairs):
        turns = (source < block_count) != (pairs[start][0] < block_count)
        if turns or target in targets or index - start == most:
            yield slice(start, index)
            start, targets = index, set()
        targets.add(target)
    yield slice(start, len(pairs))
