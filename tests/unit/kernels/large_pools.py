"""Pools of more than 2^31 elements a side, of which memory is taken for what is written only.

A place that was reckoned in 32 bits lies ahead of where it should, and of the pool. There lie 2^32
bytes that are nobody's, so that such a fault is seen and not a crash.
"""

import mmap
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from tests.unit.kernels.paged_cases import PagedCase

_GUARD_BYTES: Final = 1 << 32
# Linux: who asks for more than there is gets it, as long as nobody writes it (MAP_NORESERVE, of
# which Python knows the name from 3.13 on).
_UNRESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Moved:
    """A step over blocks on both sides of 2^31 elements, and where they were before."""

    case: PagedCase
    # Of each block of the small pool.
    blocks: Tensor

    def slots(self, slots: Tensor) -> Tensor:
        """Where they are now."""
        block_size = self.case.k_pages.size(2)
        moved = self.blocks[slots // block_size] * block_size + slots % block_size
        return torch.where(slots < 0, slots, moved)

    def back(self, pages: Tensor) -> Tensor:
        """What is in the blocks of the small pool."""
        return pages[self.blocks]


def beyond(dtype: torch.dtype) -> int:
    """Elements before those whose number takes more than 31 bits, also if counted in pairs of
    codes: as signed 32 bits it is negative either way.
    """
    return 3 << 31 if dtype.itemsize == 1 else 1 << 31


def moved(case: PagedCase) -> Moved:
    """Every second block goes beyond 2^31 elements, the others stay low."""
    count = case.k_pages.size(0)
    first_beyond = beyond(case.k_pages.dtype) // case.k_pages[0].numel() + 1
    low = torch.arange(count)
    blocks = torch.where(low % 2 == 1, low + first_beyond, low)
    pools = [_moved(pages, blocks, first_beyond + count) for pages in (case.k_pages, case.v_pages)]
    tables = case.block_tables.long()
    tables = torch.where(tables < 0, tables, blocks[tables.clamp_min(0)]).int()
    return Moved(
        case=replace(case, k_pages=pools[0], v_pages=pools[1], block_tables=tables), blocks=blocks
    )


def _moved(pages: Tensor, blocks: Tensor, count: int) -> Tensor:
    pool = empty_pool(count, pages[0])
    as_bytes = pool.view(torch.uint8) if pages.itemsize == 1 else pool
    as_bytes[blocks] = pages.view(torch.uint8) if pages.itemsize == 1 else pages
    return pool


def empty_pool(count: int, block: Tensor) -> Tensor:
    """So many blocks like this one: of zeros, or on a GPU of whatever is there."""
    size = _GUARD_BYTES + count * block.nbytes
    if block.is_cuda:
        taken = torch.empty(size, dtype=torch.uint8, device=block.device)
        return taken[_GUARD_BYTES:].view(block.dtype).view(count, *block.shape)
    memory = mmap.mmap(-1, size, flags=_UNRESERVED)
    pool = torch.frombuffer(memory, dtype=block.dtype, offset=_GUARD_BYTES)
    return pool.view(count, *block.shape)
