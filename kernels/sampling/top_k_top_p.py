"""top_k_top_p: what a row's tempered logits must reach to be drawn: top_k, top_p, min_p.

formula  t = logits / temperature
         top_k   keep t >= k-th largest t                                   (0: off)
         top_p   keep t if the kept mass strictly above it is < top_p        (1: off)
         min_p   keep t >= max t + log(min_p)                               (0: off)
         Each filter keeps what is above a bound, so equal logits share their fate: of flat
         logits every token stays, even with top_k 1 or the smallest top_p. top_p renormalises over
         what top_k kept.
shapes   logits [rows, vocab] -> bounds [rows] float32; -inf where no filter is on. The reference
         takes float32, the kernels what `edited_rows` reads
triton   No sort. Counts and masses above LEVELS levels, which the chunks' largest logits suggest,
         say below which level no bound lies; what is above it is gathered, in order, and there the
         bound is bisected over the bits of a float32. Rows whose levels leave more than KEPT logits
         (flat ones) bisect over the whole row. Sums are taken in a fixed order: the bits of a bound
         depend on the row alone. Masses are float32: a mass within about 1e-6 of top_p may fall on
         its other side
cost     reads the logits twice, with 3 * LEVELS operations each; ~30 passes over KEPT in registers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import jit
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.sampling.edited_rows import logits_at
from kernels.sampling.params import SamplingTensors
from kernels.sampling.sortable_keys import CHUNK, chunks_of, key_of, value_of_key

# Levels whose counts are taken, the last of which is -inf.
LEVELS: Final = 16
# Logits that one program bisects in its registers.
KEPT: Final = 8192
_WARPS: Final = 8


def top_k_top_p(tempered: Tensor, params: SamplingTensors) -> Tensor:
    """The definition of correct: [rows] float32; a row keeps its tempered logits >= bound."""
    bounds = tempered.amax(-1) + torch.log(params.min_p)
    is_sorted = (params.top_k > 0) | (params.top_p < 1.0)
    rows = is_sorted.nonzero().squeeze(1)
    if rows.numel():
        sorted_bounds = _sorted_bounds(tempered[rows], params.top_k[rows], params.top_p[rows])
        bounds[rows] = torch.maximum(bounds[rows], sorted_bounds)
    return bounds


def _sorted_bounds(tempered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The bound of top_k and then top_p, which renormalises over what top_k kept."""
    vocab = tempered.size(1)
    ordered = tempered.sort(dim=-1, descending=True).values
    count = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).unsqueeze(1)
    bound_k = ordered.gather(1, count - 1)
    mass = torch.where(ordered >= bound_k, (ordered - ordered[:, :1]).double().exp(), 0.0)
    above = mass.cumsum(-1) - mass
    is_kept = (above < top_p.double().unsqueeze(1) * mass.sum(-1, keepdim=True)) & (mass > 0.0)
    # At least the largest stays, also at top_p = 0.
    last = (is_kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    return torch.maximum(ordered.gather(1, last), bound_k).squeeze(1)


@jit.compiled
def _is_filtered(
    temperature: pointer, top_k: pointer, top_p: pointer, row: scalar, vocab: scalar
) -> scalar:
    k = tl.load(top_k + row)
    is_on = ((k > 0) & (k < vocab)) | (tl.load(top_p + row) < 1.0)
    return is_on & (tl.load(temperature + row) > 0.0)


@jit.compiled
def _levels(
    tops: pointer, row: scalar, chunks: scalar, LEVELS: constexpr, CHUNKS: constexpr
) -> pointer:
    """(largest logit, [LEVELS] falling): even steps to the least top of a chunk, and as far again.

    Above the least of the chunks' largest there are about as many logits as chunks, times a few.
    """
    at = tl.arange(0, CHUNKS)
    top = tl.load(tops + row * chunks + at, mask=at < chunks, other=float("-inf"))
    highest = tl.max(top, 0)
    lowest = tl.min(tl.where(top == float("-inf"), highest, top), 0)
    step = tl.arange(0, LEVELS)
    levels = highest - (highest - lowest) * (step + 1) * (2.0 / LEVELS)
    return highest, tl.where(step == LEVELS - 1, float("-inf"), levels)


@jit.compiled
def _count_kernel(
    logits: pointer, edited: pointer, is_edited: pointer,
    tops: pointer, temperature: pointer, top_k: pointer, top_p: pointer,
    counts: pointer, masses: pointer,
    vocab: stride, chunks: scalar,
    CHUNK: constexpr, LEVELS: constexpr, CHUNKS: constexpr,
) -> None:  # fmt: skip
    """Of a chunk: how many logits reach each level, and the mass of those."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if _is_filtered(temperature, top_k, top_p, row, vocab):
        highest, levels = _levels(tops, row, chunks, LEVELS, CHUNKS)
        # Exponents of 2, and one multiplication instead of a division per logit.
        scale = 1.4426950408889634 / tl.load(temperature + row)
        count = tl.zeros([LEVELS], tl.int32)
        mass = tl.zeros([LEVELS], tl.float32)
        for start in range(0, CHUNK, 1024):
            first = chunk * CHUNK + start
            token = first + tl.arange(0, 1024)
            logit = logits_at(
                logits, edited, is_edited, row, vocab, first, vocab, float("-inf"), 1024
            )
            weight = tl.exp2((logit - highest) * scale)
            is_reached = (logit[:, None] >= levels[None, :]) & (token < vocab)[:, None]
            count += tl.sum(is_reached.to(tl.int32), 0)
            mass += tl.sum(tl.where(is_reached, weight[:, None], 0.0), 0)
        at = (row * chunks + chunk) * LEVELS + tl.arange(0, LEVELS)
        tl.store(counts + at, count)
        tl.store(masses + at, mass)


@jit.compiled
def _gather_kernel(
    logits: pointer, edited: pointer, is_edited: pointer,
    tops: pointer, temperature: pointer, top_k: pointer, top_p: pointer,
    counts: pointer, masses: pointer, kept: pointer, found_of: pointer, floors: pointer,
    vocab: stride, chunks: scalar,
    CHUNK: constexpr, LEVELS: constexpr, CHUNKS: constexpr, KEPT: constexpr,
) -> None:  # fmt: skip
    """Of a chunk: its logits at or above the level below which no bound lies, in token order."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if _is_filtered(temperature, top_k, top_p, row, vocab):
        _, levels = _levels(tops, row, chunks, LEVELS, CHUNKS)
        step, other = tl.arange(0, LEVELS), tl.arange(0, CHUNKS)[:, None]
        at = (row * chunks + other) * LEVELS + step[None, :]
        count = tl.load(counts + at, mask=other < chunks, other=0)
        total = tl.sum(count, 0)
        k = tl.load(top_k + row)
        mass = tl.sum(tl.load(masses + at, mask=other < chunks, other=0.0), 0)
        whole = tl.max(mass, 0)
        is_enough = tl.where(k > 0, total >= k, mass >= tl.load(top_p + row) * whole)
        chosen = tl.min(tl.where(is_enough, step, LEVELS - 1), 0)
        is_chosen = step == chosen
        found = tl.sum(tl.where(is_chosen, total, 0), 0)
        # More than fits: the row itself is bisected.
        found = tl.where(found <= KEPT, found, -1)
        level = tl.max(tl.where(is_chosen, levels, float("-inf")), 0)
        if chunk == 0:
            tl.store(found_of + row, found)
            tl.store(floors + 2 * row, level)
            tl.store(floors + 2 * row + 1, whole)
        mine = tl.sum(tl.sum(tl.where((other == chunk) & is_chosen[None, :], count, 0), 0), 0)
        if (found >= 0) & (mine > 0):
            before = tl.where((other < chunk) & is_chosen[None, :], count, 0)
            target = kept + row * KEPT + tl.sum(tl.sum(before, 0), 0)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            logit = logits_at(
                logits, edited, is_edited, row, vocab, chunk * CHUNK, vocab, float("-inf"), CHUNK
            )
            is_kept = (logit >= level) & (token < vocab)
            place = tl.cumsum(is_kept.to(tl.int32), 0) - 1
            tl.store(target + place, logit, mask=is_kept)


@jit.compiled
def _reached(
    logits: pointer, edited: pointer, is_edited: pointer, row: scalar, vocab: scalar,
    tile: pointer, length: scalar, level: scalar, highest: scalar, scale: scalar,
    COUNTS: constexpr, KEPT: constexpr,
) -> scalar:  # fmt: skip
    """How many of the row's candidates are >= level (COUNTS), or their mass."""
    weight = tl.full([KEPT], 1.0, tl.float32)
    if not COUNTS:
        weight = tl.exp2((tile - highest) * scale)
    sums = tl.where(tile >= level, weight, 0.0)
    # Beyond the tile only where nothing could be gathered, so of the whole row.
    for start in range(KEPT, length, KEPT):
        rest = logits_at(logits, edited, is_edited, row, vocab, start, vocab, float("nan"), KEPT)
        if not COUNTS:
            weight = tl.exp2((rest - highest) * scale)
        sums += tl.where(rest >= level, weight, 0.0)
    return tl.sum(sums, 0)


@jit.compiled
def _bisected(
    logits: pointer, edited: pointer, is_edited: pointer, row: scalar, vocab: scalar,
    tile: pointer, length: scalar, low: scalar, highest: scalar, scale: scalar,
    wanted: scalar, COUNTS: constexpr, KEPT: constexpr,
) -> scalar:  # fmt: skip
    """The largest key >= low at which `wanted` is still reached: that of the least kept logit."""
    high = key_of(highest) + 1
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        level = value_of_key(middle)
        reached = _reached(
            logits, edited, is_edited, row, vocab,
            tile, length, level, highest, scale, COUNTS, KEPT,
        )  # fmt: skip
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached >= wanted, high, middle)
    return low


@jit.compiled
def _bound_kernel(
    logits: pointer, edited: pointer, is_edited: pointer,
    tops: pointer, temperature: pointer, top_k: pointer, top_p: pointer,
    min_p: pointer, kept: pointer, found_of: pointer, floors: pointer, bounds: pointer,
    vocab: stride, chunks: scalar,
    CHUNKS: constexpr, KEPT: constexpr, SORTS: constexpr,
) -> None:  # fmt: skip
    """A row's bound. NaN is below every level, so it stands for what is not there."""
    row = tl.program_id(0).to(tl.int64)
    degree = tl.load(temperature + row)
    if degree > 0.0:
        at = tl.arange(0, CHUNKS)
        top = tl.load(tops + row * chunks + at, mask=at < chunks, other=float("-inf"))
        highest = tl.max(top, 0)
        least = tl.load(min_p + row)
        bound = tl.div_rn(highest, degree) + tl.log(tl.where(least > 0.0, least, 1.0))
        bound = tl.where(least > 0.0, bound, float("-inf"))
        if SORTS and _is_filtered(temperature, top_k, top_p, row, vocab):
            found = tl.load(found_of + row)
            length = tl.where(found >= 0, found, vocab)
            within = tl.arange(0, KEPT)
            gathered = tl.load(kept + row * KEPT + within, mask=within < found, other=float("nan"))
            # Where nothing could be gathered, the first of the row itself.
            limit = tl.where(found < 0, vocab, 0)
            tile = logits_at(logits, edited, is_edited, row, vocab, 0, limit, float("nan"), KEPT)
            tile = tl.where(found < 0, tile, gathered)
            scale = 1.4426950408889634 / degree
            low, whole = key_of(tl.load(floors + 2 * row)), tl.load(floors + 2 * row + 1)
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            if (k > 0) & (k < vocab):
                wanted = k.to(tl.float32)
                low = _bisected(
                    logits, edited, is_edited, row, vocab,
                    tile, length, low, highest, scale, wanted, True, KEPT,
                )  # fmt: skip
                level = value_of_key(low)
                whole = _reached(
                    logits, edited, is_edited, row, vocab,
                    tile, length, level, highest, scale, False, KEPT,
                )  # fmt: skip
            if p < 1.0:
                low = _bisected(
                    logits, edited, is_edited, row, vocab,
                    tile, length, low, highest, scale, p * whole, False, KEPT,
                )  # fmt: skip
            bound = tl.maximum(bound, tl.div_rn(value_of_key(low), degree))
        tl.store(bounds + row, bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterScratch:
    """Device memory of one launch, for up to `rows` rows of `vocab` logits."""

    counts: Tensor
    masses: Tensor
    kept: Tensor
    found: Tensor
    floors: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, rows: int, vocab: int, device: torch.device) -> FilterScratch:
        """About 32 KiB + 32 bytes per 1024 logits, for each row."""
        chunks = chunks_of(vocab)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            counts=empty(rows, chunks, LEVELS, dtype=torch.int32),
            masses=empty(rows, chunks, LEVELS),
            kept=empty(rows, KEPT),
            found=empty(rows, dtype=torch.int32),
            floors=empty(rows, 2),
            bounds=empty(rows),
        )


def launch_bounds(
    sources: tuple[Tensor, Tensor, Tensor], params: SamplingTensors, tops: Tensor,
    scratch: FilterScratch, *, sorts: bool,
) -> Tensor:  # fmt: skip
    """The Triton path: [rows] bounds, of rows to be drawn, given the `tops` [rows, chunks].

    `sources`: the logits and the fields of `EditedRows`. Without `sorts` nobody filters by top_k or
    top_p, and only min_p counts.
    """
    (rows, vocab), chunks = sources[0].shape, tops.size(1)
    sizes = {"CHUNKS": max(2, jit.power_of_two(chunks))}
    named = params.temperature, params.top_k, params.top_p
    own = scratch.kept, scratch.found, scratch.floors
    if sorts:
        levels = {**sizes, "CHUNK": CHUNK, "LEVELS": LEVELS}
        _count_kernel[(chunks, rows)](
            *sources, tops, *named, scratch.counts, scratch.masses, vocab, chunks,
            **levels, num_warps=_WARPS,
        )  # fmt: skip
        _gather_kernel[(chunks, rows)](
            *sources, tops, *named, scratch.counts, scratch.masses, *own, vocab, chunks,
            **levels, KEPT=KEPT, num_warps=_WARPS,
        )  # fmt: skip
    _bound_kernel[(rows,)](
        *sources, tops, *named, params.min_p, *own, scratch.bounds, vocab, chunks,
        **sizes, KEPT=KEPT, SORTS=sorts, num_warps=_WARPS,
    )  # fmt: skip
    return scratch.bounds
