"""logprobs: log-probabilities of the drawn tokens and of each row's k likeliest, untempered.

formula  logprob(id) = (logits[id] - max) - log(sum exp(logits - max))
         the k likeliest are ordered by falling logit, then rising id
shapes   logits [rows, vocab] float32, or bfloat16 | float16: as if widened, contiguous;
         token_ids [rows] int64, in range;
         wanted [rows] int64 or None: a row below 0 is passed over, and its outputs stay
returns  (logprob [rows], top_ids [rows, k] int64, top_logprobs [rows, k])
triton   No sort: a chunk of a row takes its largest k times over, a second kernel does so among
         what the chunks took, and adds up their sums in their order. k up to K_MAX; beyond, torch
cost     reads the logits once, in (1 + k) passes over registers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.checks import require, require_ids
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.sampling.edited_rows import widened
from kernels.sampling.sortable_keys import CHUNK, chunks_of, ranked, token_of, value_of

# The front door admits 20.
K_MAX: Final = 32
_WARPS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobBuffers:
    """Outputs and device memory of `token_logprobs`, for up to `rows` rows and `k` likeliest."""

    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    tops: Tensor
    sums: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, rows: int, vocab: int, k: int, device: torch.device) -> LogprobBuffers:
        """8 k bytes per 4096 logits for each row, and the outputs."""
        chunks = chunks_of(vocab)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            logprob=zeros(rows),
            top_ids=zeros(rows, k, dtype=torch.int64),
            top_logprobs=zeros(rows, k),
            tops=zeros(rows, chunks),
            sums=zeros(rows, chunks),
            ranks=zeros(rows, chunks, max(1, k), dtype=torch.int64),
        )


def token_logprobs_reference(
    logits: Tensor, token_ids: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of correct, of every row."""
    logprobs = logits.log_softmax(-1)
    top_ids = (
        _likeliest(logits, k) if k else logits.new_empty((logits.size(0), 0), dtype=torch.int64)
    )
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return chosen, top_ids, logprobs.gather(1, top_ids)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """[rows, k] ids by falling logit, then rising id."""
    top = logits.topk(k, dim=-1)
    # Among equals topk chooses by chance, so all that reach the last one's logit are ranked.
    reaching = int((logits >= top.values[:, -1:]).sum(-1).max()) if logits.size(0) else 0
    if reaching > k:
        top = logits.topk(reaching, dim=-1)
    ids, by_id = top.indices.sort(dim=-1)
    by_logit = top.values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, by_logit)[:, :k].contiguous()


@jit.compiled
def _rank_kernel(
    logits: pointer, wanted: pointer, tops: pointer, sums: pointer, ranks: pointer,
    vocab: stride, chunks: scalar, k: scalar, CHUNK: constexpr,
) -> None:  # fmt: skip
    """Of a chunk: its largest logit, the sum of exponentials below it, and its k likeliest."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(wanted + row) >= 0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = token < vocab
        logit = widened(logits, row, vocab, chunk * CHUNK, vocab, float("-inf"), CHUNK)
        top = tl.max(logit, 0)
        # -inf - -inf would be NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        part = row * chunks + chunk
        tl.store(tops + part, top)
        tl.store(sums + part, tl.sum(tl.exp(logit - base), 0))
        rank = tl.where(is_in, ranked(logit, token), -(2**63))
        for step in range(0, k):
            best = tl.max(rank, 0)
            tl.store(ranks + part * k + step, best)
            rank = tl.where(rank == best, -(2**63), rank)


@jit.compiled
def _merge_kernel(
    logits: pointer, token_ids: pointer, wanted: pointer, tops: pointer, sums: pointer,
    ranks: pointer, logprob: pointer, top_ids: pointer, top_logprobs: pointer,
    vocab: stride, chunks: scalar, k: scalar, CHUNKS: constexpr, RANKS: constexpr,
) -> None:  # fmt: skip
    """Of a row: the chunks' sums in their order, and the k likeliest of their likeliest."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + row) >= 0:
        at = tl.arange(0, CHUNKS)
        top = tl.load(tops + row * chunks + at, mask=at < chunks, other=float("-inf"))
        part = tl.load(sums + row * chunks + at, mask=at < chunks, other=0.0)
        highest = tl.max(top, 0)
        total = tl.sum(part * tl.exp(top - highest), 0)
        below = tl.log(total)
        own = tl.load(logits + row * vocab + tl.load(token_ids + row)).to(tl.float32)
        tl.store(logprob + row, own - highest - below)
        place = tl.arange(0, RANKS)
        rank = tl.load(ranks + row * chunks * k + place, mask=place < chunks * k, other=-(2**63))
        for step in range(0, k):
            best = tl.max(rank, 0)
            tl.store(top_ids + row * k + step, token_of(best))
            tl.store(top_logprobs + row * k + step, value_of(best) - highest - below)
            rank = tl.where(rank == best, -(2**63), rank)


def _token_logprobs_triton(
    logits: Tensor, token_ids: Tensor, k: int, wanted: Tensor, buffers: LogprobBuffers
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, vocab), chunks = logits.shape, chunks_of(logits.size(1))
    logprob, top_ids, top = buffers.logprob, buffers.top_ids, buffers.top_logprobs
    parts = buffers.tops, buffers.sums, buffers.ranks
    if rows:
        _rank_kernel[(chunks, rows)](
            logits, wanted, *parts, vocab, chunks, k, CHUNK=CHUNK, num_warps=_WARPS
        )
        _merge_kernel[(rows,)](
            logits, token_ids, wanted, *parts, logprob, top_ids, top, vocab, chunks, k,
            CHUNKS=max(2, jit.power_of_two(chunks)),
            # Whatever this k: a step that asks for more must not compile anew.
            RANKS=jit.power_of_two(chunks) * K_MAX,
        )  # fmt: skip
    return logprob[:rows], top_ids[:rows], top[:rows]


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    k: int,
    wanted: Tensor | None = None,
    buffers: LogprobBuffers | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob [rows], top_ids [rows, k] int64, top_logprobs [rows, k]), untempered.

    With `buffers`, made for this k, the answer is their first rows, on every path.
    """
    require_logits(logits, torch.bfloat16, torch.float16)
    rows, vocab = logits.shape
    require_ids(token_ids, "token_ids", dtype=torch.int64, shape=(rows,))
    require(0 <= k <= vocab, "k", "must be between 0 and the vocabulary size")
    if wanted is not None:
        require_ids(wanted, "wanted", dtype=torch.int64, shape=(rows,))
    if buffers is not None:
        fits = buffers.logprob.size(0) >= rows and buffers.top_ids.size(1) == k
        fits = fits and buffers.tops.size(1) == chunks_of(vocab)
        require(fits, "buffers", "must have been made for these rows, this k and this vocabulary")
    if dispatch.path_for(logits) == "triton" and k <= K_MAX:
        buffers = buffers or LogprobBuffers.of(rows, vocab, k, logits.device)
        # Any tensor of numbers >= 0 says that every row wants them.
        every = token_ids if wanted is None else wanted
        return _token_logprobs_triton(logits, token_ids, k, every, buffers)
    found = token_logprobs_reference(logits.float(), token_ids, k)
    return found if buffers is None else _into(buffers, found, wanted)


def _into(
    buffers: LogprobBuffers, found: tuple[Tensor, Tensor, Tensor], wanted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = found[0].size(0)
    own = buffers.logprob[:rows], buffers.top_ids[:rows], buffers.top_logprobs[:rows]
    for target, source in zip(own, found, strict=True):
        is_wanted = slice(None) if wanted is None else wanted >= 0
        target[is_wanted] = source[is_wanted]
    return own


def require_logits(logits: Tensor, *others: torch.dtype) -> None:
    """Shared by those who read logits; `others` are taken besides float32."""
    dtypes = (torch.float32, *others)
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    require(logits.dtype in dtypes, "logits", f"must be {names}")
    require(logits.dim() == 2 and logits.size(1) >= 1, "logits", "must be [rows, vocab]")
    require(logits.is_contiguous(), "logits", "must be contiguous")
