"""paged_attention: one varlen causal pass over paged keys and values, decode and prefill alike.

formula  softmax(s(scale * q k^T) over positions [max(0, p - window + 1), p]) v
         for a query token at position p; without a window from 0 on (sliding window: Beltagy et
         al., Longformer, 2020; Mistral 7B, Jiang et al. 2023)
         s(x) = softcap * tanh(x / softcap), without a softcap x (Gemma 2, 2024)
         row r owns query tokens [query_starts[r], query_starts[r+1]); its query i is at position
         p = context_lengths[r] - (query_starts[r+1] - query_starts[r]) + i
                 0 ............ done | ........ this step ........
                 [------------ all in the pages (write_kv) --------]   context_lengths[r] = the end
shapes   q                [tokens, heads, head_dim]   floats (float32, bfloat16 or float16),
                          last two dimensions dense
         k_pages, v_pages [blocks, kv_heads, block_size, head_dim]   same dtype, contiguous;
                          heads is a multiple of kv_heads
                          or fp8 (kernels.kv.fp8), then with scales [2, kv_heads] float32
         block_tables     [rows, blocks_max] int32; entries beyond a row's context are not read,
                          nor those wholly behind the window of its first query token
         query_starts     [rows + 1] int32, ascending from 0 to tokens
         context_lengths  [rows] int32, this step's tokens included
returns  [tokens, heads, head_dim], same dtype
math     scores, softmax and sums in float32; the compiled path rounds the softmax's weights to
         bfloat16 where keys and values are, and sums what it rounded; the torch path of a CPU in
         float64: libraries sum otherwise for a chunk than for a token alone, and what differs then
         is lost in the rounding, so that a text does not change where a prompt is computed again
triton   `triton_kernels`: tasks of `plan` over persistent programs. A token's bits do
         not depend on batch-mates or timing, nor on where a chunk's own keys are read from
cost     reads 2 * context * kv_heads * head_dim elements per row (memory bound in decode), of a
         context no longer than the window and this step's tokens;
         4 * heads * head_dim multiply-adds per (query, position) pair (compute bound in prefill)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch, native
from kernels.attention.plan import AttentionPlan
from kernels.attention.triton_launch import paged_attention_triton
from kernels.checks import require, require_float, require_ids, require_like, require_shape
from kernels.kv import fp8
from kernels.kv.write_kv import require_pages


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition of correct; row by row, so no row can see or disturb another."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        first, blocks = _seen_blocks(block_tables[row], context, end - start, k_pages, window)
        k_scale, v_scale = (None, None) if scales is None else scales
        keys = _gather(k_pages, blocks, context - first, k_scale)
        values = _gather(v_pages, blocks, context - first, v_scale)
        attended = _attend(q[start:end], keys, values, scale, window, softcap)
        out[start:end] = attended.to(q.dtype)
    return out


def _seen_blocks(
    table: Tensor, context: int, count: int, pages: Tensor, window: int | None
) -> tuple[int, Tensor]:
    """Blocks of a row that its last `count` tokens see anything of, and the first's position."""
    block_size = pages.size(2)
    behind = 0 if window is None else max(0, context - count + 1 - window)
    first = behind // block_size
    return first * block_size, table[first : -(-context // block_size)]


def _gather(pages: Tensor, blocks: Tensor, context: int, scale: Tensor | None) -> Tensor:
    """[kv_heads, context, head_dim] of one row, widened."""
    tiles = fp8.as_bytes(pages).index_select(0, blocks).transpose(0, 1)
    tiles = tiles.reshape(pages.size(1), -1, pages.size(3))[:, :context].view(pages.dtype)
    wide = tiles if scale is None else fp8.decode(tiles, scale)
    return wide.to(_wide(pages))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.device.type == "cpu" else torch.float32


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One row: q [count, heads, head_dim] against its own context -> same shape, widened."""
    count, heads, head_dim = q.shape
    kv_heads, context, _ = keys.shape
    grouped = q.to(keys.dtype).reshape(count, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if count > 1 or window is not None:
        last_seen = torch.arange(context - count, context, device=q.device).unsqueeze(1)
        position = torch.arange(context, device=q.device)
        is_hidden = position > last_seen
        if window is not None:
            is_hidden = is_hidden | (position <= last_seen - window)
        scores.view(kv_heads, -1, count, context).masked_fill_(is_hidden, float("-inf"))
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(kv_heads, -1, count, head_dim).permute(2, 0, 1, 3).reshape_as(q)


def _paged_attention_native(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    rows = block_tables, query_starts, context_lengths
    if scales is not None:
        return _native_over_fp8(q, k_pages, v_pages, *rows, scale, scales, window, softcap)
    return native.compiled().paged_attention(
        q, k_pages, v_pages, *rows, scale, window or 0, softcap or 0.0
    )


def _native_over_fp8(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    scales: Tensor,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Row by row over its pages read into float32, which takes no more than the longest row's."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for row, context in enumerate(context_lengths.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        first, blocks = _seen_blocks(block_tables[row], context, end - start, k_pages, window)
        # Before the first block that is seen there is none: numbers that nobody looks at.
        table = torch.arange(-first // k_pages.size(2), len(blocks), dtype=torch.int32)
        out[start:end] = native.compiled().paged_attention(
            q[start:end].float().contiguous(),
            _widened(k_pages, blocks, scales[0]),
            _widened(v_pages, blocks, scales[1]),
            table.unsqueeze(0),
            torch.tensor([0, end - start], dtype=torch.int32),
            context_lengths[row : row + 1],
            scale,
            window or 0,
            softcap or 0.0,
        )
    return out


def _widened(pages: Tensor, blocks: Tensor, scale: Tensor) -> Tensor:
    """Some blocks of fp8 pages, as pages in float32."""
    tiles = fp8.as_bytes(pages).index_select(0, blocks).view(pages.dtype)
    return tiles.float().mul_(scale.view(-1, 1, 1))


HEAD_DIM_MAX = 256
_PATHS = {
    "native": _paged_attention_native,
    "torch": paged_attention_reference,
}


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    scales: Tensor | None = None,
    own: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this step's query tokens over their rows' pages.

    The result is in `out` if given, [tokens, heads, head_dim] dense. Only the Triton path reads:
    `plan`, of these very rows: spares it a launch per layer, and with `parts` an allocation;
    `own`, this step's (k, v) [tokens, kv_heads, head_dim] as `rope_write_kv` leaves them there: a
    row without a prefix reads them in its pages' stead, the same numbers; not with fp8 pages, of
    which the codes count.
    """
    check_attention(q, k_pages, v_pages, block_tables, query_starts, context_lengths)
    fp8.require_scales(scales, k_pages)
    _check_optional(q, k_pages, own, out)
    require(window is None or window >= 1, "window", "must be at least 1")
    require(softcap is None or softcap > 0, "softcap", "must be above 0")
    given = q, k_pages, v_pages, block_tables, query_starts, context_lengths, scale, plan, scales
    # Both compiled paths hold a whole head close by; wider ones are rare enough for torch.
    path = dispatch.path_for(q) if q.shape[2] <= HEAD_DIM_MAX else "torch"
    if path == "triton":
        return paged_attention_triton(*given, own, out, window=window, softcap=softcap)
    found = _PATHS[path](*given, window=window, softcap=softcap)
    return found if out is None else out.copy_(found)


def _check_optional(
    q: Tensor, k_pages: Tensor, own: tuple[Tensor, Tensor] | None, out: Tensor | None
) -> None:
    if out is not None:
        require(out.shape == q.shape and out.is_contiguous(), "out", "must be dense, of q's shape")
        require_like(out, q, "out", "q")
    for name, x in zip(("own k", "own v"), own or (), strict=False):
        shape = (q.size(0), k_pages.size(1), q.size(2))
        require_shape(x, name, shape)
        require(x.stride(2) == 1 and x.stride(1) == x.size(2), name, "heads must be dense")
        require_like(x, q, name, "q")


def check_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> None:
    """ValueError naming what does not fit."""
    require_pages(k_pages, v_pages)
    require_float(q, "q", dim=3)
    if k_pages.dtype != fp8.DTYPE:
        require_like(q, k_pages, "q", "k_pages")
    _, heads, head_dim = q.shape
    _, kv_heads, _, pool_head_dim = k_pages.shape
    require(head_dim == pool_head_dim, "q", "must have the head_dim of k_pages")
    require(heads % kv_heads == 0, "q", "heads must be a multiple of kv_heads")
    require(q.stride()[1] == head_dim, "q", "heads must be dense (stride(1) == head_dim)")
    rows = context_lengths.shape[0]
    require_ids(context_lengths, "context_lengths", dtype=torch.int32, shape=(rows,))
    require_ids(query_starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    require(block_tables.dim() == 2, "block_tables", "must have 2 dimensions")
    require(block_tables.dtype == torch.int32, "block_tables", "must be int32")
    table_rows, width = block_tables.shape
    require(table_rows == rows, "block_tables", "must have a row for each context length")
    is_dense = width <= 1 or block_tables.stride()[1] == 1
    require(is_dense, "block_tables", "rows must be dense")
