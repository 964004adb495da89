"""sample_rows: which rows of a step sample, and how each wants to.

formula  a row samples if it knows no tokens beyond those it computes: contexts[r] == num_tokens,
         at position num_tokens - prompt. One that has ended has a context of 0, and does not; nor
         does padding, or one in mid-prompt
shapes   RowState, RuleState and SamplingState, one entry per slot; slots [R] int64, -1 = padding;
         contexts [R] int32, those of the step's `RowStep`
returns  RowSamples: of a row that does not sample the temperature is PADDING and its slot and
         logprobs are -1; the rest of it is anything
reads    nothing back to the host: the launch depends on R only
cost     one launch; 80 bytes read and as many written per row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import dispatch, jit
from kernels.checks import require_ids
from kernels.jit import constexpr, pointer, scalar, tl
from kernels.rows.edit_rows import RuleState
from kernels.rows.step_rows import RowState
from kernels.sampling.params import SamplingTensors

NOBODY: Final = -1
# A temperature that nothing is sampled with.
PADDING: Final = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """How the rows on the device want their tokens, by slot; as `SamplingTensors`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.temperature.shape)
        for name in ("temperature", "top_p", "min_p"):
            require_ids(getattr(self, name), name, dtype=torch.float32, shape=shape)
        for name in ("top_k", "seed", "choice"):
            require_ids(getattr(self, name), name, dtype=torch.int64, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSamples:
    """What each of R rows wants of its step."""

    slots: Tensor  # [R] int64, -1: the row does not sample
    params: SamplingTensors
    logprobs: Tensor  # [R] int64, how many likeliest; -1: none at all


def sample_rows_reference(
    state: RowState, rules: RuleState, wanted: SamplingState, slots: Tensor, contexts: Tensor
) -> RowSamples:
    """The definition of correct."""
    at = slots.clamp_min(0)
    known = state.num_tokens[at]
    samples = (slots >= 0) & (contexts == known)
    return RowSamples(
        slots=torch.where(samples, slots, NOBODY),
        params=SamplingTensors(
            temperature=torch.where(samples, wanted.temperature[at], PADDING),
            top_k=wanted.top_k[at],
            top_p=wanted.top_p[at],
            min_p=wanted.min_p[at],
            seed=wanted.seed[at],
            choice=wanted.choice[at],
            position=known - rules.prompt[at],
        ),
        logprobs=torch.where(samples, rules.logprobs[at], NOBODY),
    )


@jit.compiled
def _sample_rows_kernel(
    slots: pointer, contexts: pointer, num_tokens: pointer, prompt: pointer, wants: pointer,
    temperature: pointer, top_k: pointer, top_p: pointer, min_p: pointer, seed: pointer,
    choice: pointer,
    own_slots: pointer, own_temperature: pointer, own_top_k: pointer, own_top_p: pointer,
    own_min_p: pointer, own_seed: pointer, own_choice: pointer, own_position: pointer,
    own_wants: pointer,
    rows: scalar, NOBODY: constexpr, PADDING: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_in = row < rows
    slot = tl.load(slots + row, mask=is_in, other=-1)
    is_there = slot >= 0
    known = tl.load(num_tokens + slot, mask=is_there, other=0)
    context = tl.load(contexts + row, mask=is_in, other=0)
    samples = is_there & (context == known)
    degree = tl.load(temperature + slot, mask=samples, other=PADDING)
    tl.store(own_slots + row, tl.where(samples, slot, NOBODY), mask=is_in)
    tl.store(own_temperature + row, degree, mask=is_in)
    tl.store(own_top_k + row, tl.load(top_k + slot, mask=samples, other=0), mask=is_in)
    tl.store(own_top_p + row, tl.load(top_p + slot, mask=samples, other=1.0), mask=is_in)
    tl.store(own_min_p + row, tl.load(min_p + slot, mask=samples, other=0.0), mask=is_in)
    tl.store(own_seed + row, tl.load(seed + slot, mask=samples, other=0), mask=is_in)
    tl.store(own_choice + row, tl.load(choice + slot, mask=samples, other=0), mask=is_in)
    before = tl.load(prompt + slot, mask=samples, other=0)
    tl.store(own_position + row, known - before, mask=is_in)
    tl.store(own_wants + row, tl.load(wants + slot, mask=samples, other=NOBODY), mask=is_in)


_TILE = 128


def _sample_rows_triton(
    state: RowState, rules: RuleState, wanted: SamplingState, slots: Tensor, contexts: Tensor
) -> RowSamples:
    rows = slots.numel()

    def ints() -> Tensor:
        # One by one: a view may begin where Triton would compile anew for it.
        return torch.empty_like(slots)

    def floats() -> Tensor:
        return torch.empty(rows, dtype=torch.float32, device=slots.device)

    own = RowSamples(
        slots=ints(),
        params=SamplingTensors(
            temperature=floats(),
            top_k=ints(),
            top_p=floats(),
            min_p=floats(),
            seed=ints(),
            choice=ints(),
            position=ints(),
        ),
        logprobs=ints(),
    )
    params = own.params
    _sample_rows_kernel[(-(-rows // _TILE),)](
        slots, contexts, state.num_tokens, rules.prompt, rules.logprobs,
        wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p, wanted.seed, wanted.choice,
        own.slots, params.temperature, params.top_k, params.top_p, params.min_p, params.seed,
        params.choice, params.position, own.logprobs,
        rows, NOBODY=NOBODY, PADDING=PADDING, TILE=_TILE,
    )  # fmt: skip
    return own


_PATHS = {
    "triton": _sample_rows_triton,
    "native": sample_rows_reference,
    "torch": sample_rows_reference,
}


def sample_rows(
    state: RowState, rules: RuleState, wanted: SamplingState, slots: Tensor, contexts: Tensor
) -> RowSamples:
    """What each row that samples in this step wants of it; there is at least one row."""
    rows = slots.numel()
    require_ids(slots, "slots", dtype=torch.int64, shape=(rows,))
    require_ids(contexts, "contexts", dtype=torch.int32, shape=(rows,))
    return _PATHS[dispatch.path_for(slots)](state, rules, wanted, slots, contexts)
