"""A pool of pages filled in a shuffled order, and steps over it."""

from dataclasses import dataclass, replace
from typing import Any

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
    window: int | None = None
    softcap: float | None = None

    def options(self) -> dict[str, Any]:
        """What a layer may ask for besides."""
        return {"window": self.window, "softcap": self.softcap}

    def behind(self, row: int) -> int:
        """Positions that no query of the row sees any more."""
        count = int(self.query_starts[row + 1] - self.query_starts[row])
        context = int(self.context_lengths[row])
        return 0 if self.window is None else max(0, context - count + 1 - self.window)

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
    window: int | None = None,
    softcap: float | None = None,
) -> PagedCase:
    """Rows with `counts` query tokens at the end of `contexts`; unowned places hold NaN, and so do
    those of blocks that every query's window has left, which the table does not name.
    """
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
    case = PagedCase(
        q=q,
        k_pages=pages[0],
        v_pages=pages[1],
        block_tables=tables,
        query_starts=starts,
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
    )
    for row, count in enumerate(counts):
        given_back = case.behind(row) // block_size if count else 0
        for page in pages:
            page[tables[row, :given_back].long()] = float("nan")
        tables[row, :given_back] = -7
    return case


def dense_attention(case: PagedCase, weights: torch.dtype, *, truncates: bool = False) -> Exact:
    """Row by row without pages: nothing shared with the kernels.

    `weights` is the dtype to which the kernel may round the weights of a softmax, and `truncates`
    whether it does so towards zero. The slack of out = sum of w v over a context of n, |w| = 1:
      a score       gamma(head_dim + 8) * scale * sum of |q| |k|, for its sum, its products with the
                    scale and of a logarithm of 2, and the top that is taken from it: an error in an
                    exponent, so a relative one of the weight; capped, which only makes an error
                    smaller, gamma(8) * softcap more: of 1 - 2 / (e^2x + 1), of about 1
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
        # What nobody sees may be another's: the first place that is seen stands in for it.
        place = at.clamp(min=case.behind(row))
        blocks = case.block_tables[row].long()[place // block_size]
        # [heads, context, head_dim]
        blocks[: case.behind(row)] = blocks[case.behind(row)]  # Whatever is there is not looked at.
        keys, values = (
            page[blocks, :, place % block_size]
            .double()
            .repeat_interleave(group, dim=1)
            .transpose(0, 1)
            for page in (case.k_pages, case.v_pages)
        )
        q = case.q[tokens].double().transpose(0, 1)
        own = torch.arange(context - count, context).unsqueeze(1)
        is_hidden = at > own
        if case.window is not None:
            is_hidden |= at <= own - case.window
        scores = q @ keys.mT * case.scale
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        scores = scores.masked_fill(is_hidden, -torch.inf)
        sizes = (q.abs() @ keys.abs().mT * case.scale).masked_fill(is_hidden, 0.0)
        share = scores.softmax(-1)
        mixed, mixed_sizes = share @ values, share @ values.abs()
        score = gamma(case.q.size(2) + 8) * sizes.amax(-1, keepdim=True)
        score = score + gamma(8) * (case.softcap or 0.0)
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
