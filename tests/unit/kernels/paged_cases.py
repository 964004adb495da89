"""A pool of pages filled in a shuffled order, and steps over it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.support.tolerances import POWER, UNIT, Exact, gamma


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
        at = torch.arange(context)
        blocks_at = tables[row].long()[at // block_size]
        for page in pages:
            values = torch.randn(context, kv_heads, head_dim, generator=generator)
            page[blocks_at, :, at % block_size] = values.to(dtype)
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


def dense_attention(case: PagedCase, weights: torch.dtype, *, truncates: bool = False) -> Exact:
    """Row by row without pages: nothing shared with the kernels.

    `weights` is the dtype to which the kernel may round the weights of a softmax, and `truncates`
    whether it does so towards zero. The slack of out = sum of w v over a context of n, |w| = 1:
      a score       gamma(head_dim + 8) * scale * sum of |q| |k|, for its sum, its products with the
                    scale and of a logarithm of 2, and the top that is taken from it: an error in an
                    exponent, so a relative one of the weight
      a weight      that, the power's own, and its rounding. Normalised, an error e of all weights
                    moves the result by at most e (sum of w |v| + |out|)
      two sums      of w v and of w: over n terms and the partial sums of splits, each of which is
                    scaled twice, fewer than n + 8 operations more
    """
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    slack = torch.zeros_like(out)
    block_size, group = case.k_pages.size(2), case.q.size(1) // case.k_pages.size(1)
    starts = case.query_starts.tolist()
    rounding = UNIT[weights] * (2 if truncates else 1)
    for row, context in enumerate(case.context_lengths.tolist()):
        tokens, count = slice(starts[row], starts[row + 1]), starts[row + 1] - starts[row]
        if not count:
            continue
        at = torch.arange(context)
        blocks = case.block_tables[row].long()[at // block_size]
        # [heads, context, head_dim]
        keys, values = (
            page[blocks, :, at % block_size]
            .double()
            .repeat_interleave(group, dim=1)
            .transpose(0, 1)
            for page in (case.k_pages, case.v_pages)
        )
        q = case.q[tokens].double().transpose(0, 1)
        is_future = at > torch.arange(context - count, context).unsqueeze(1)
        scores = (q @ keys.mT * case.scale).masked_fill(is_future, -torch.inf)
        sizes = (q.abs() @ keys.abs().mT * case.scale).masked_fill(is_future, 0.0)
        share = scores.softmax(-1)
        mixed, mixed_sizes = share @ values, share @ values.abs()
        score = gamma(case.q.size(2) + 8) * sizes.amax(-1, keepdim=True)
        weight = score + POWER[weights] + rounding
        out[tokens] = mixed.transpose(0, 1)
        slack[tokens] = (
            1.02 * weight * (mixed_sizes + mixed.abs()) + 2 * gamma(2 * context + 8) * mixed_sizes
        ).transpose(0, 1)
    return Exact(value=out, slack=slack)


def excess_over(case: PagedCase, result: Tensor) -> float:
    """Of the Triton kernel in its interpreter, which rounds to bfloat16 towards zero.

    Weights are rounded to the dtype of the values; read from codes, those are float16.
    """
    is_wide = case.k_pages.dtype == torch.float64 and result.dtype == torch.bfloat16
    weights = torch.float16 if is_wide else result.dtype
    truncates = result.dtype == torch.bfloat16
    exact = dense_attention(case, weights, truncates=truncates and not is_wide)
    return exact.excess(result, truncates=truncates)


def widened(case: PagedCase, scales: Tensor) -> PagedCase:
    """A step over fp8 pages as one over the numbers that the codes stand for, in float64."""
    pages = [
        page.double() * scale.double()[:, None, None]
        for page, scale in zip((case.k_pages, case.v_pages), scales, strict=True)
    ]
    return replace(case, k_pages=pages[0], v_pages=pages[1])
