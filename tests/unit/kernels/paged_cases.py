"""A pool of pages filled in a shuffled order, and steps over it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    scale: float

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return (
            self.q,
            self.k_pages,
            self.v_pages,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            self.scale,
        )


def paged_case(
    generator: torch.Generator,
    *,
    counts: list[int],
    contexts: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedCase:
    """Rows with `counts` query tokens at the end of `contexts`; unowned places hold NaN."""
    blocks_of = [-(-context // block_size) for context in contexts]
    pool = sum(blocks_of) + 2
    shape = (pool, kv_heads, block_size, head_dim)
    order = torch.randperm(pool, generator=generator).int()
    tables = torch.full((len(counts), max([1, *blocks_of])), -7, dtype=torch.int32)
    pages = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    taken = 0
    for row, (blocks, context) in enumerate(zip(blocks_of, contexts, strict=True)):
        tables[row, :blocks] = order[taken : taken + blocks]
        taken += blocks
        for position in range(context):
            block = int(tables[row, position // block_size])
            for page in pages:
                values = torch.randn(kv_heads, head_dim, generator=generator)
                page[block, :, position % block_size] = values.to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn(sum(counts), heads, head_dim, generator=generator).to(dtype)
    return PagedCase(
        q=q,
        k_pages=pages[0],
        v_pages=pages[1],
        block_tables=tables,
        query_starts=starts,
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        scale=head_dim**-0.5,
    )


def dense_attention(case: PagedCase) -> Tensor:
    """The formula in float64, one query vector at a time: nothing shared with the kernel."""
    out = torch.zeros_like(case.q, dtype=torch.float64)
    block_size, group = case.k_pages.size(2), case.q.size(1) // case.k_pages.size(1)
    starts = case.query_starts.tolist()
    for row, context in enumerate(case.context_lengths.tolist()):
        for token in range(starts[row], starts[row + 1]):
            seen = context - (starts[row + 1] - token) + 1
            at = torch.arange(seen)
            blocks = case.block_tables[row].long()[at // block_size]
            for head in range(case.q.size(1)):
                keys = case.k_pages[blocks, head // group, at % block_size].double()
                values = case.v_pages[blocks, head // group, at % block_size].double()
                weights = (keys @ case.q[token, head].double() * case.scale).softmax(0)
                out[token, head] = weights @ values
    return out
