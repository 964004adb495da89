"""write_kv: put this step's keys and values into their paged slot_mapping.

shapes   k, v      [tokens, kv_heads, head_dim]   floats, last two dimensions dense
         k_pages,  [blocks, kv_heads, block_size, head_dim]   same dtype, contiguous: one dense tile
         v_pages   per block and head
         slot_mapping     [tokens] int64, slot = block * block_size + offset; -1 = padding, skipped
         floats are float32, bfloat16 or float16; pages may be fp8 instead (kernels.kv.fp8), and
         then scales [2, kv_heads] float32 go with them
writes   k_pages and v_pages in place; its slots must be distinct (two writers to one is undefined)
         a slot beyond the pool is an IndexError on a CPU; a GPU, which cannot stop for it, skips it
cost     reads 2*T*H*D, writes 2*T*H*D elements; memory bound
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch, jit, native
from kernels.checks import require, require_float, require_ids, require_like
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.kv import fp8


def write_kv_reference(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    """The definition of correct."""
    slots_max = k_pages.size(0) * k_pages.size(2)
    if slot_mapping.numel() and int(slot_mapping.max()) >= slots_max:
        raise IndexError(
            f"slot_mapping: {int(slot_mapping.max())} is outside the pool of {slots_max}"
        )
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    blocks = torch.div(slot_mapping[kept], k_pages.size(2), rounding_mode="floor")
    offsets = slot_mapping[kept] - blocks * k_pages.size(2)
    k, v = k[kept], v[kept]
    if scales is not None:
        k, v = (fp8.encode(x, scale) for x, scale in zip((k, v), scales, strict=True))
        # Few operations know fp8, so bytes are moved.
        k, v, k_pages, v_pages = (x.view(torch.uint8) for x in (k, v, k_pages, v_pages))
    k_pages[blocks, :, offsets] = k
    v_pages[blocks, :, offsets] = v


def _write_kv_native(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    if scales is None:
        native.compiled().write_kv(k, v, k_pages, v_pages, slot_mapping)
    else:
        write_kv_reference(k, v, k_pages, v_pages, slot_mapping, scales)


@jit.compiled
def _write_kv_kernel(
    k: pointer,
    v: pointer,
    k_pages: pointer,
    v_pages: pointer,
    slot_mapping: pointer,
    scales: pointer,
    slots_max: scalar,
    k_stride: stride,
    v_stride: stride,
    HEADS: constexpr,
    BLOCK_SIZE: constexpr,
    HEAD_DIM: constexpr,
    HEADS_TILE: constexpr,
    DIM_TILE: constexpr,
    IS_FP8: constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, HEADS_TILE)[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    is_in = (head < HEADS) & (dim < HEAD_DIM) & (slot >= 0) & (slot < slots_max)
    source = head * HEAD_DIM + dim
    # int64 from the slot on: block * elements of a block passes 2^31 in a large pool.
    tile = slot // BLOCK_SIZE * HEADS + head
    target = (tile * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dim
    keys = tl.load(k + token * k_stride + source, mask=is_in)
    values = tl.load(v + token * v_stride + source, mask=is_in)
    if IS_FP8:
        scale = scales + head
        keys = fp8.encoded(keys.to(tl.float32), tl.load(scale, mask=head < HEADS, other=1.0))
        scale += HEADS
        values = fp8.encoded(values.to(tl.float32), tl.load(scale, mask=head < HEADS, other=1.0))
    tl.store(k_pages + target, keys, mask=is_in)
    tl.store(v_pages + target, values, mask=is_in)


def _write_kv_triton(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    blocks, heads, block_size, head_dim = k_pages.shape
    if k.size(0) == 0:
        return
    _write_kv_kernel[(k.size(0),)](
        k,
        v,
        fp8.as_bytes(k_pages),
        fp8.as_bytes(v_pages),
        slot_mapping,
        slot_mapping if scales is None else scales,
        blocks * block_size,
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEADS_TILE=jit.power_of_two(heads),
        DIM_TILE=jit.power_of_two(head_dim),
        IS_FP8=scales is not None,
    )


_PATHS = {"triton": _write_kv_triton, "native": _write_kv_native, "torch": write_kv_reference}


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Store row i at slot_mapping[i]; beyond the pool: IndexError before any write, or skipped."""
    check_write_kv(k, v, k_pages, v_pages, slot_mapping, scales)
    _PATHS[dispatch.path_for(k)](k, v, k_pages, v_pages, slot_mapping, scales)


def check_write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None,
) -> None:
    """Shared with the fused kernel."""
    require_pages(k_pages, v_pages)
    fp8.require_scales(scales, k_pages)
    for x, name in ((k, "k"), (v, "v")):
        require_float(x, name, dim=3)
        require_like(
            x, k_pages if scales is None else k, name, "k_pages" if scales is None else "k"
        )
        require(x.shape == k.shape, name, "must have the shape of k")
        require(x.stride()[1] == x.shape[2], name, "heads must be dense (stride(1) == head_dim)")
    tokens, kv_heads, head_dim = k.shape
    _, pool_heads, _, pool_head_dim = k_pages.shape
    require(kv_heads == pool_heads, "k", "must have the kv_heads of k_pages")
    require(head_dim == pool_head_dim, "k", "must have the head_dim of k_pages")
    require_ids(slot_mapping, "slot_mapping", dtype=torch.int64, shape=(tokens,))


def require_pages(k_pages: Tensor, v_pages: Tensor) -> None:
    """The pool's layout, shared with paged attention."""
    if k_pages.dtype != fp8.DTYPE:
        require_float(k_pages, "k_pages", dim=4)
    require(k_pages.dim() == 4, "k_pages", "must have 4 dimensions")
    require(k_pages.is_contiguous(), "k_pages", "must be contiguous")
    require(v_pages.shape == k_pages.shape, "v_pages", "must have the shape of k_pages")
    require_like(v_pages, k_pages, "v_pages", "k_pages")
    require(v_pages.is_contiguous(), "v_pages", "must be contiguous")
