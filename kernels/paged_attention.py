"""paged_attention: one varlen causal pass over paged keys and values, decode and prefill alike.

formula  softmax(scale * q k^T over positions [0, p]) v    for a query token at position p
         row r owns query tokens [query_starts[r], query_starts[r+1]); its query i is at position
         p = context_lengths[r] - (query_starts[r+1] - query_starts[r]) + i
                 0 ............ done | ........ this step ........
                 [------------ all in the pages (write_kv) --------]   context_lengths[r] = the end
shapes   q                [tokens, heads, head_dim]   float32 | bfloat16, last two dimensions dense
         k_pages, v_pages [blocks, kv_heads, block_size, head_dim]   same dtype, contiguous;
                          heads is a multiple of kv_heads
         block_tables     [rows, blocks_max] int32; entries beyond a row's context are not read
         query_starts     [rows + 1] int32, ascending from 0 to tokens
         context_lengths  [rows] int32, this step's tokens included
returns  [tokens, heads, head_dim], same dtype
math     scores, softmax and sums in float32
cost     reads 2 * context * kv_heads * head_dim elements per row (memory bound in decode);
         4 * heads * head_dim multiply-adds per (query, position) pair (compute bound in prefill)
"""

import torch
from torch import Tensor

from kernels import native
from kernels.checks import require, require_float, require_ids, require_like
from kernels.write_kv import require_pages


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
) -> Tensor:
    """The definition of correct; row by row, so no row can see or disturb another."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_tables[row, : -(-context // k_pages.size(2))]
        keys = _gather(k_pages, blocks, context)
        values = _gather(v_pages, blocks, context)
        out[start:end] = _attend(q[start:end], keys, values, scale).to(q.dtype)
    return out


def _gather(pages: Tensor, blocks: Tensor, context: int) -> Tensor:
    """[kv_heads, context, head_dim] float32 of one row."""
    tiles = pages.index_select(0, blocks).transpose(0, 1)
    return tiles.reshape(pages.size(1), -1, pages.size(3))[:, :context].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row: q [count, heads, head_dim] against its own context -> same shape, float32."""
    count, heads, head_dim = q.shape
    kv_heads, context, _ = keys.shape
    grouped = q.float().reshape(count, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
    if count > 1:
        last_seen = torch.arange(context - count, context, device=q.device).unsqueeze(1)
        is_future = torch.arange(context, device=q.device) > last_seen
        scores.view(kv_heads, -1, count, context).masked_fill_(is_future, float("-inf"))
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
) -> Tensor:
    out: Tensor = native.compiled().paged_attention(
        q, k_pages, v_pages, block_tables, query_starts, context_lengths, scale
    )
    return out


_NATIVE_HEAD_DIM_MAX = 256
_PATHS = {"native": _paged_attention_native, "torch": paged_attention_reference}


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
) -> Tensor:
    """Attention of this step's query tokens over their rows' pages."""
    _check(q, k_pages, v_pages, block_tables, query_starts, context_lengths)
    # The compiled path packs keys into fixed scratch; wider heads are rare enough for torch.
    path = native.path_for(q) if q.size(2) <= _NATIVE_HEAD_DIM_MAX else "torch"
    return _PATHS[path](q, k_pages, v_pages, block_tables, query_starts, context_lengths, scale)


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
) -> None:
    require_pages(k_pages, v_pages)
    require_float(q, "q", dim=3)
    require_like(q, k_pages, "q", "k_pages")
    require(q.size(2) == k_pages.size(3), "q", "must have the head_dim of k_pages")
    require(q.size(1) % k_pages.size(1) == 0, "q", "heads must be a multiple of kv_heads")
    require(q.stride(1) == q.size(2), "q", "heads must be dense (stride(1) == head_dim)")
    rows = context_lengths.size(0)
    require_ids(context_lengths, "context_lengths", dtype=torch.int32, shape=(rows,))
    require_ids(query_starts, "query_starts", dtype=torch.int32, shape=(rows + 1,))
    require(block_tables.dim() == 2, "block_tables", "must have 2 dimensions")
    require(block_tables.dtype == torch.int32, "block_tables", "must be int32")
    require(block_tables.size(0) == rows, "block_tables", "must have a row for each context length")
    is_dense = block_tables.size(1) <= 1 or block_tables.stride(1) == 1
    require(is_dense, "block_tables", "rows must be dense")
