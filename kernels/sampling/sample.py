"""sampling: one token id per row, greedy or seeded.

formula  t = logits / temperature
         id = argmax over kept t of t + gumbel(seed, choice, position, id); temperature 0: argmax of
         the logits. Kept is what reaches the row's bound (top_k_top_p), noise is that of gumbel
shapes   logits       [rows, vocab] float32, or bfloat16 | float16: as if widened, contiguous;
                      rows that rules have changed: of `EditedRows`, if given
         SamplingTensors, each [rows]: temperature (0, or >= 1e-5 so that the division is finite;
         < 0: the row is padding and its outputs stay as they are),
         top_p, min_p float32; the others int64
returns  sample -> (token_ids [rows] int64, ok [rows] bool); ok is False where a row holds NaN, +inf
         or only -inf (its id is 0); ties go to the lowest id
triton   Fixed launches: a row is cut into chunks, a program each; what they found is combined by
         (value, lowest id), which no order can change. With `SamplingBuffers` nothing is allocated
         and nothing waits for the device, so the launches may be captured in a graph
cost     greedy: reads the logits once, as wide as they are, memory bound; plain: twice, ~60
         operations per logit; top_k or top_p: four times, where only chunks that hold a kept logit
         are read the fourth time
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch, jit, native
from kernels.checks import require
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.sampling.edited_rows import EditedRows, logits_at, sampled_logits
from kernels.sampling.gumbel import gumbel_noise, gumbel_tile
from kernels.sampling.logprobs import require_logits, token_logprobs
from kernels.sampling.params import SamplingTensors
from kernels.sampling.sortable_keys import CHUNK, chunks_of, ranked, token_of
from kernels.sampling.top_k_top_p import FilterScratch, launch_bounds, top_k_top_p

__all__ = ["SamplingBuffers", "SamplingTensors", "sample", "sample_reference", "token_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBuffers:
    """Outputs and device memory of `sample`, for up to `rows` rows of `vocab` logits."""

    token_ids: Tensor
    ok: Tensor
    # Of each chunk: its largest logit, and the best draw so far as (key of value, lowest id).
    tops: Tensor
    best: Tensor
    filters: FilterScratch
    # Zeros: nobody has edited.
    unedited: Tensor

    @classmethod
    def of(cls, rows: int, vocab: int, device: torch.device) -> SamplingBuffers:
        """Ids 0 and ok False: what rows that are only padding keep."""
        chunks = chunks_of(vocab)
        return cls(
            token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            ok=torch.zeros(rows, dtype=torch.bool, device=device),
            tops=torch.empty((rows, chunks), dtype=torch.float32, device=device),
            best=torch.empty((rows, chunks), dtype=torch.int64, device=device),
            filters=FilterScratch.of(rows, vocab, device),
            unedited=torch.zeros(rows, dtype=torch.int32, device=device),
        )


def sample_reference(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """The definition of correct; of padding, ids 0 and not ok."""
    ok = logits.amax(-1).isfinite() & (params.temperature >= 0.0)
    token_ids = logits.argmax(-1)
    rows = ((params.temperature > 0.0) & ok).nonzero().squeeze(1)
    if rows.numel():
        chosen = params.rows(rows)
        tempered = logits[rows] / chosen.temperature.unsqueeze(1)
        is_kept = tempered >= top_k_top_p(tempered, chosen).unsqueeze(1)
        noisy = tempered + gumbel_noise(chosen, logits.size(1))
        token_ids[rows] = noisy.masked_fill(~is_kept, -math.inf).argmax(-1)
    return token_ids.masked_fill(~ok, 0), ok


@jit.compiled
def _survey_kernel(
    logits: pointer, edited: pointer, is_edited: pointer,
    temperature: pointer, tops: pointer, best: pointer,
    vocab: stride, chunks: scalar, CHUNK: constexpr,
) -> None:  # fmt: skip
    """Of a chunk: the largest logit (+inf if there is a NaN) and its rank; greedy rows are done."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(temperature + row) >= 0.0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = logits_at(
            logits, edited, is_edited, row, vocab, chunk * CHUNK, vocab, float("-inf"), CHUNK
        )
        rank = tl.max(ranked(logit, token), 0)
        is_bad = tl.max((logit != logit).to(tl.int32), 0) > 0
        top = tl.where(is_bad, float("inf"), tl.max(logit, 0))
        tl.store(tops + row * chunks + chunk, top)
        tl.store(best + row * chunks + chunk, rank)


@jit.compiled
def _draw_kernel(
    logits: pointer, edited: pointer, is_edited: pointer,
    temperature: pointer, seed: pointer, choice: pointer, position: pointer,
    tops: pointer, bounds: pointer, best: pointer,
    vocab: stride, chunks: scalar, CHUNK: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    """Of a chunk of a sampled row: the best of what reaches the bound, noise added."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    degree = tl.load(temperature + row)
    if degree > 0.0:
        bound = tl.load(bounds + row)
        rank = tl.full((), -(2**63), tl.int64)
        if tl.div_rn(tl.load(tops + row * chunks + chunk), degree) >= bound:
            for start in range(0, CHUNK, TILE):
                first = chunk * CHUNK + start
                token = first + tl.arange(0, TILE)
                logit = logits_at(
                    logits, edited, is_edited, row, vocab, first, vocab, float("-inf"), TILE
                )
                tempered = tl.div_rn(logit, degree)
                is_kept = (tempered >= bound) & (token < vocab)
                if tl.max(is_kept.to(tl.int32), 0) > 0:
                    noise = gumbel_tile(
                        tl.load(seed + row), tl.load(choice + row), tl.load(position + row),
                        first, TILE,
                    )  # fmt: skip
                    noisy = tl.where(is_kept, tempered + noise, float("-inf"))
                    rank = tl.maximum(rank, tl.max(ranked(noisy, token), 0))
        tl.store(best + row * chunks + chunk, rank)


@jit.compiled
def _choose_kernel(
    temperature: pointer, tops: pointer, best: pointer, token_ids: pointer, ok: pointer,
    chunks: scalar, CHUNKS: constexpr,
) -> None:  # fmt: skip
    """Of a row: the best of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature + row) >= 0.0:
        at = tl.arange(0, CHUNKS)
        is_in = at < chunks
        top = tl.max(tl.load(tops + row * chunks + at, mask=is_in, other=float("-inf")), 0)
        rank = tl.max(tl.load(best + row * chunks + at, mask=is_in, other=-(2**63)), 0)
        is_ok = (top > float("-inf")) & (top < float("inf"))
        tl.store(token_ids + row, tl.where(is_ok, token_of(rank), 0))
        tl.store(ok + row, is_ok)


# Of a chunk: noise for so many tokens at a time.
_TILE = 1024
_WARPS = 8


def _sample_triton(
    logits: Tensor, params: SamplingTensors, buffers: SamplingBuffers, edited: EditedRows | None,
    *, sorts: bool, draws: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, vocab = logits.shape
    token_ids, ok, tops, best = buffers.token_ids, buffers.ok, buffers.tops, buffers.best
    chunks = chunks_of(vocab)
    if rows == 0:
        return token_ids[:0], ok[:0]
    cut = {"CHUNK": CHUNK, "num_warps": _WARPS}
    # Where nobody has edited, any float32: it is not read.
    apart = (tops, buffers.unedited) if edited is None else (edited.logits, edited.is_edited)
    sources = logits, *apart
    _survey_kernel[(chunks, rows)](*sources, params.temperature, tops, best, vocab, chunks, **cut)
    if draws:
        bounds = launch_bounds(sources, params, tops, buffers.filters, sorts=sorts)
        _draw_kernel[(chunks, rows)](
            *sources, params.temperature, params.seed, params.choice, params.position,
            tops, bounds, best, vocab, chunks, **cut, TILE=_TILE,
        )  # fmt: skip
    _choose_kernel[(rows,)](
        params.temperature, tops, best, token_ids, ok,
        chunks, CHUNKS=max(2, jit.power_of_two(chunks)), num_warps=1,
    )  # fmt: skip
    return token_ids[:rows], ok[:rows]


def _sample_native(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    return native.compiled().sample(
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.choice,
        params.position,
    )


_PATHS = {"native": _sample_native, "torch": sample_reference}


def sample(
    logits: Tensor,
    params: SamplingTensors,
    buffers: SamplingBuffers | None = None,
    edited: EditedRows | None = None,
    *,
    sorts: bool = True,
    draws: bool = True,
) -> tuple[Tensor, Tensor]:
    """(token_ids [rows] int64, ok [rows] bool). Rows are independent; greedy ones need no noise.

    With `buffers` the answer is their first rows, on every path. `sorts` and `draws` are what the
    host knows, and spare launches: False says that no row has a top_k or top_p, and that every
    row is greedy; nothing notices that a row was forgotten.
    """
    require_logits(logits, torch.bfloat16, torch.float16)
    path = dispatch.path_for(logits)
    (rows, vocab), temperature = logits.shape, params.temperature
    if edited is not None:
        require(edited.logits.shape == logits.shape, "edited", "must have the shape of logits")
    require(temperature.size(0) == rows, "params", "must have a row per logits row")
    if buffers is not None:
        fits = buffers.token_ids.size(0) >= rows and buffers.tops.size(1) == chunks_of(vocab)
        require(fits, "buffers", "must have been made for these rows and this vocabulary")
    if path == "triton":
        buffers = buffers or SamplingBuffers.of(rows, vocab, logits.device)
        return _sample_triton(logits, params, buffers, edited, sorts=sorts, draws=draws)
    if edited is not None or path != "native" or logits.dtype != torch.bfloat16:
        logits = sampled_logits(logits, edited)
    token_ids, ok = _PATHS[path](logits, params)
    if buffers is None:
        return token_ids, ok
    is_live = temperature >= 0.0
    own_ids, own_ok = buffers.token_ids[:rows], buffers.ok[:rows]
    own_ids.copy_(torch.where(is_live, token_ids, own_ids))
    own_ok.copy_(torch.where(is_live, ok, own_ok))
    return own_ids, own_ok
