"""write_kv: put this step's keys and values into their paged slots.

shapes   k, v      [tokens, kv_heads, head_dim]   float32 | bfloat16, last two dimensions dense
         k_pages,  [blocks, kv_heads, block_size, head_dim]   same dtype, contiguous: one dense tile
         v_pages   per block and head
         slots     [tokens] int64, slot = block * block_size + offset; -1 = padding, skipped
writes   k_pages and v_pages in place; slots must be distinct (two writers to one slot is undefined)
cost     reads 2*T*H*D, writes 2*T*H*D elements; memory bound
"""

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_float, require_ids, require_like


def write_kv_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> None:
    """The definition of correct."""
    slots_max = k_pages.size(0) * k_pages.size(2)
    if slots.numel() and int(slots.max()) >= slots_max:
        raise IndexError(f"slots: {int(slots.max())} is outside the pool of {slots_max}")
    kept = (slots >= 0).nonzero().squeeze(1)
    blocks = torch.div(slots[kept], k_pages.size(2), rounding_mode="floor")
    offsets = slots[kept] - blocks * k_pages.size(2)
    k_pages[blocks, :, offsets] = k[kept]
    v_pages[blocks, :, offsets] = v[kept]


def _write_kv_native(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    native.compiled().write_kv(k, v, k_pages, v_pages, slots)


_PATHS = {"native": _write_kv_native, "torch": write_kv_reference}


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store row i at slots[i]; a slot beyond the pool is an IndexError before any write."""
    require_pages(k_pages, v_pages)
    for x, name in ((k, "k"), (v, "v")):
        require_float(x, name, dim=3)
        require_like(x, k_pages, name, "k_pages")
        require(x.shape == k.shape, name, "must have the shape of k")
        require(x.size(1) == k_pages.size(1), name, "must have the kv_heads of k_pages")
        require(x.size(2) == k_pages.size(3), name, "must have the head_dim of k_pages")
        require(x.stride(1) == x.size(2), name, "heads must be dense (stride(1) == head_dim)")
    require_ids(slots, "slots", dtype=torch.int64, shape=(k.size(0),))
    _PATHS[native.path_for(k)](k, v, k_pages, v_pages, slots)


def require_pages(k_pages: Tensor, v_pages: Tensor) -> None:
    """The pool's layout, shared with paged attention."""
    require_float(k_pages, "k_pages", dim=4)
    require(k_pages.is_contiguous(), "k_pages", "must be contiguous")
    require(v_pages.shape == k_pages.shape, "v_pages", "must have the shape of k_pages")
    require_like(v_pages, k_pages, "v_pages", "k_pages")
    require(v_pages.is_contiguous(), "v_pages", "must be contiguous")
