"""rope_write_kv: the way of a step's q, k, v from their projection to attention, in one pass.

formula  q, k := rms_norm of each head, if the model has that; then rope; then write_kv
shapes   q          [tokens, heads, head_dim]      floats (float32, bfloat16 or float16),
         k, v       [tokens, kv_heads, head_dim]   last two dimensions dense, views are welcome
         positions  [tokens] int64
         cos_sin    [positions_max, 2, half] float32
         k_pages, v_pages [blocks, kv_heads, block_size, head_dim]   contiguous
         slot_mapping      [tokens] int64; -1 = padding, not stored
         q_norm, k_norm   [head_dim] or None (both or neither)
returns  the rotated queries, [tokens, heads, head_dim]: q itself, in place, unless it is normed
         scales     [2, kv_heads] float32 if the pages are fp8 (kernels.kv.fp8)
writes   k_pages and v_pages; k: on the Triton path what the pages hold of it, unless they are fp8
         (for `paged_attention(own=...)`), elsewhere anything
math     float32, rounded to the dtype after the norm and after the rotation, as the parts round
cost     reads q, k, v and writes them once: memory bound. Apart, the four kernels move k three
         times and q twice, and cost three launches more
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.checks import require, require_like
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.kv import fp8
from kernels.kv.write_kv import check_write_kv, write_kv, write_kv_reference
from kernels.norms_rope.rms_norm import rms_norm, rms_norm_reference
from kernels.norms_rope.rope import check_rope, rope, rope_reference


def rope_write_kv_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
) -> Tensor:
    """The definition of correct: one after the other."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    rope_reference(q, k, positions, cos_sin)
    write_kv_reference(k, v, k_pages, v_pages, slot_mapping, scales)
    return q


def _rope_write_kv_apart(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
) -> Tensor:
    """The parts, each on its own path."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    rope(q, k, positions, cos_sin)
    write_kv(k, v, k_pages, v_pages, slot_mapping, scales)
    return q


@jit.compiled
def _normed(
    first: pointer, second: pointer, rest: pointer, norm: pointer,
    dim: pointer, rest_dim: pointer, eps: scalar, HEAD_DIM: constexpr, HALF: constexpr,
) -> pointer:  # fmt: skip
    """The norm of heads that are held in three parts, rounded as it would be when stored."""
    squares = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    kind = norm.dtype.element_ty
    weight = tl.load(norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    first = (first * scale * weight).to(kind).to(tl.float32)
    weight = tl.load(norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    second = (second * scale * weight).to(kind).to(tl.float32)
    weight = tl.load(norm + rest_dim, mask=rest_dim < HEAD_DIM, other=0.0).to(tl.float32)
    rest = (rest * scale * weight).to(kind).to(tl.float32)
    return first, second, rest


@jit.compiled
def _put(
    out: pointer, k_to: pointer, v_to: pointer, value: pointer, source: pointer,
    first: pointer, second: pointer, rest: pointer, dim: pointer, rest_dim: pointer,
    is_in: pointer, is_rest: pointer, is_kept: scalar, is_q: scalar, HALF: constexpr,
) -> None:  # fmt: skip
    """A tile of heads to where it belongs, and if it is of keys, its values with it."""
    target = tl.where(is_q, out, k_to)
    tl.store(target + dim, first, mask=is_in & is_kept)
    tl.store(target + HALF + dim, second, mask=is_in & is_kept)
    tl.store(target + rest_dim, rest, mask=is_rest & is_kept)
    if not is_q:
        tl.store(source + dim, first, mask=is_in)
        tl.store(source + HALF + dim, second, mask=is_in)
        tl.store(source + rest_dim, rest, mask=is_rest)
        tl.store(v_to + dim, tl.load(value + dim, mask=is_in), mask=is_in & is_kept)
        tl.store(v_to + HALF + dim, tl.load(value + HALF + dim, mask=is_in), mask=is_in & is_kept)
        tl.store(v_to + rest_dim, tl.load(value + rest_dim, mask=is_rest), mask=is_rest & is_kept)


@jit.compiled
def _put_codes(
    out: pointer, k_to: pointer, v_to: pointer, value: pointer,
    first: pointer, second: pointer, rest: pointer,
    k_scale: pointer, v_scale: pointer, is_head: pointer, dim: pointer, rest_dim: pointer,
    is_in: pointer, is_rest: pointer, is_kept: scalar, is_q: scalar, HALF: constexpr,
) -> None:  # fmt: skip
    """The same for fp8 pages; queries stay as they are."""
    if is_q:
        tl.store(out + dim, first, mask=is_in)
        tl.store(out + HALF + dim, second, mask=is_in)
        tl.store(out + rest_dim, rest, mask=is_rest)
    else:
        scale = tl.load(k_scale, mask=is_head, other=1.0)
        _store_codes(k_to + dim, first, scale, is_in & is_kept)
        _store_codes(k_to + HALF + dim, second, scale, is_in & is_kept)
        _store_codes(k_to + rest_dim, rest, scale, is_rest & is_kept)
        scale = tl.load(v_scale, mask=is_head, other=1.0)
        _store_codes(v_to + dim, tl.load(value + dim, mask=is_in), scale, is_in & is_kept)
        more = tl.load(value + HALF + dim, mask=is_in)
        _store_codes(v_to + HALF + dim, more, scale, is_in & is_kept)
        more = tl.load(value + rest_dim, mask=is_rest)
        _store_codes(v_to + rest_dim, more, scale, is_rest & is_kept)


@jit.compiled
def _store_codes(at: pointer, value: pointer, scale: pointer, mask: pointer) -> None:
    tl.store(at, fp8.encoded(value.to(tl.float32), scale), mask=mask)


@jit.compiled
def _rope_write_kv_kernel(
    q: pointer, k: pointer, v: pointer, q_out: pointer, positions: pointer, cos_sin: pointer,
    k_pages: pointer, v_pages: pointer, slot_mapping: pointer, q_norm: pointer, k_norm: pointer,
    scales: pointer,
    positions_max: scalar, slots_max: scalar, eps: scalar,
    q_stride: stride, k_stride: stride, v_stride: stride, q_out_stride: stride,
    HEADS: constexpr, KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr,
    HALF: constexpr, HEADS_TILE: constexpr, HALF_TILE: constexpr, REST_TILE: constexpr,
    NORMS: constexpr, IS_FP8: constexpr,
) -> None:  # fmt: skip
    """A token's tile of heads: those of q come first, then those of k with v beside them."""
    token = tl.program_id(0).to(tl.int64)
    q_tiles = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    is_q = tl.program_id(1) < q_tiles
    tile = tl.where(is_q, tl.program_id(1), tl.program_id(1) - q_tiles)
    head = (tile * HEADS_TILE + tl.arange(0, HEADS_TILE))[:, None]
    is_head = head < tl.where(is_q, HEADS, KV_HEADS)
    # A head is [0, HALF) [HALF, 2 HALF) and a rest that is not rotated.
    dim = tl.arange(0, HALF_TILE)[None, :]
    rest_dim = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
    is_in, is_rest = is_head & (dim < HALF), is_head & (rest_dim < HEAD_DIM)
    source = tl.where(is_q, q + token * q_stride, k + token * k_stride) + head * HEAD_DIM
    first = tl.load(source + dim, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim, mask=is_in, other=0.0).to(tl.float32)
    rest = tl.load(source + rest_dim, mask=is_rest, other=0.0).to(tl.float32)
    if NORMS:
        norm = tl.where(is_q, q_norm, k_norm)
        first, second, rest = _normed(
            first, second, rest, norm, dim, rest_dim, eps, HEAD_DIM=HEAD_DIM, HALF=HALF
        )
    position = tl.load(positions + token)
    is_known = (position >= 0) & (position < positions_max)
    table = cos_sin + position * (2 * HALF) + dim
    cos = tl.load(table, mask=(dim < HALF) & is_known, other=1.0)
    sin = tl.load(table + HALF, mask=(dim < HALF) & is_known, other=0.0)
    kind = q.dtype.element_ty
    turned, turned_half = first * cos - second * sin, second * cos + first * sin
    slot = tl.load(slot_mapping + token)
    is_kept = is_q | ((slot >= 0) & (slot < slots_max))
    # int64 from the slot on: block * elements of a block passes 2^31 in a large pool.
    place = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    place = place * HEAD_DIM
    out = q_out + token * q_out_stride + head * HEAD_DIM
    turned, turned_half, rest = turned.to(kind), turned_half.to(kind), rest.to(kind)
    value = v + token * v_stride + head * HEAD_DIM
    if IS_FP8:
        _put_codes(
            out, k_pages + place, v_pages + place, value, turned, turned_half, rest,
            scales + head, scales + KV_HEADS + head, is_head,
            dim, rest_dim, is_in, is_rest, is_kept, is_q, HALF,
        )  # fmt: skip
    else:
        _put(
            out, k_pages + place, v_pages + place, value, source, turned, turned_half, rest,
            dim, rest_dim, is_in, is_rest, is_kept, is_q, HALF,
        )  # fmt: skip


_HEADS_TILE = 8


def _rope_write_kv_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
) -> Tensor:
    (tokens, heads, head_dim), kv_heads, half = q.shape, k.size(1), cos_sin.size(2)
    is_normed = q_norm is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if is_normed else q
    if tokens == 0:
        return out
    tiles = -(-heads // _HEADS_TILE) + -(-kv_heads // _HEADS_TILE)
    _rope_write_kv_kernel[(tokens, tiles)](
        q, k, v, out, positions, cos_sin,
        fp8.as_bytes(k_pages), fp8.as_bytes(v_pages), slot_mapping,
        q_norm if is_normed else q, k_norm if is_normed else k,
        slot_mapping if scales is None else scales,
        cos_sin.size(0), k_pages.size(0) * k_pages.size(2), eps,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_pages.size(2),
        HALF=half, HEADS_TILE=_HEADS_TILE, HALF_TILE=jit.power_of_two(half),
        REST_TILE=jit.power_of_two(head_dim - 2 * half),
        NORMS=is_normed, IS_FP8=scales is not None,
    )  # fmt: skip
    return out


_PATHS = {
    "triton": _rope_write_kv_triton,
    "native": _rope_write_kv_apart,
    "torch": _rope_write_kv_apart,
}


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> Tensor:
    """The queries for attention; this step's keys and values are in their pages afterwards."""
    check_rope_write_kv(
        q, k, v, positions, cos_sin, k_pages, v_pages, slot_mapping, q_norm, k_norm, scales
    )
    path = _PATHS[dispatch.path_for(q)]
    return path(
        q, k, v, positions, cos_sin, k_pages, v_pages, slot_mapping, q_norm, k_norm, eps, scales
    )


def check_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    scales: Tensor | None,
) -> None:
    """ValueError naming what does not fit."""
    check_rope(q, k, positions, cos_sin)
    check_write_kv(k, v, k_pages, v_pages, slot_mapping, scales)
    require((q_norm is None) == (k_norm is None), "k_norm", "must be given if q_norm is")
    for weight, name in ((q_norm, "q_norm"), (k_norm, "k_norm")):
        if weight is not None:
            require(weight.shape == q.shape[-1:], name, "must have shape [head_dim]")
            require(weight.is_contiguous(), name, "must be contiguous")
            require_like(weight, q, name, "q")
