"""The model runner that launches operator by operator: decoder, KV pages and sampler."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.logits_indices import LogitsIndices, logits_indices
from gpu_worker.batch.step_types import (
    BlockPairs,
    LogitEdits,
    PromptTokenLogprobs,
    SamplingColumns,
    StepInputs,
    StepSamples,
)
from gpu_worker.model.decoder import Decoder, Queries, States, StepTensors
from kernels.kv.fp8 import as_bytes
from kernels.sampling.logit_edits import EditTensors, edit_logits
from kernels.sampling.sample import SamplingTensors, sample, token_logprobs
from kernels.sampling.token_masks import mask_logits

# Logits, about 40 bytes each while they are ranked: 160 MB, whatever the batch and vocabulary.
RANKED_AT_ONCE: Final = 1 << 22


class EagerRunner:
    def __init__(self, decoder: Decoder, pages: Tensor, host_blocks: Tensor | None = None) -> None:
        self._decoder = decoder
        self._pages = as_bytes(pages)
        self._host_blocks = None if host_blocks is None else as_bytes(host_blocks)
        self._device = pages.device

    def swap_blocks(self, pairs: BlockPairs) -> None:
        """On a CPU. By numpy, which copies runs of bytes as memcpy does, and torch much slower."""
        assert self._host_blocks is not None
        own, host = (each.view(torch.uint8).numpy() for each in (self._pages, self._host_blocks))
        count = own.shape[2]
        for pair in pairs:
            source, target = (
                own[:, :, number] if number < count else host[number - count] for number in pair
            )
            np.copyto(target, source)

    def copy_blocks(self, pairs: BlockPairs) -> None:
        sources, targets = torch.tensor(pairs, device=self._device).T
        with torch.inference_mode():
            self._pages[:, :, targets] = self._pages[:, :, sources]

    def execute(self, step: StepInputs) -> StepSamples:
        started_ns = time.perf_counter_ns()
        with torch.inference_mode():
            indices = logits_indices(step)
            states = self._decoder.forward(self._on_device(step, indices))
            logits = self._decoder.logits(states, self._tensor(indices.sampled))
            forward_ns = time.perf_counter_ns()
            prompt_logprobs = None
            if (wanted := step.prompt_logprobs) is not None:
                parts = rank_prompt(
                    self._decoder,
                    states,
                    self._tensor(indices.prompt),
                    self._tensor(wanted.token_ids),
                    int(wanted.tops.max()),
                )
                logprob, top_ids, top = (part.cpu().numpy() for part in parts)
                prompt_logprobs = PromptTokenLogprobs(
                    logprob=logprob, top_token_ids=top_ids, top_logprobs=top
                )
            return self._sample(logits, step.sampling, prompt_logprobs, started_ns, forward_ns)

    def _on_device(self, step: StepInputs, indices: LogitsIndices) -> StepTensors:
        contexts, ends = self._tensor(step.context_lengths), step.query_starts[1:]
        last_ones = None
        if len(indices.rows) < step.token_count:
            starts = self._tensor(indices.starts)
            last_ones = (
                self._tensor(ends[indices.rows] - indices.before_end),
                Queries(starts=starts, context_lengths=contexts, row_max=indices.row_max),
            )
        starts, most = self._tensor(step.query_starts), int(step.counts.max())
        tables = step.tables()
        return StepTensors(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(step.positions),
            slot_mapping=self._tensor(tables.slot_mapping),
            queries=Queries(starts=starts, context_lengths=contexts, row_max=most),
            block_tables=self._tensor(tables.block_tables),
            logits_indices=last_ones,
            context_max=int(step.context_lengths.max()),
        )

    def _sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        prompt_logprobs: PromptTokenLogprobs | None,
        started_ns: int,
        forward_ns: int,
    ) -> StepSamples:
        params = SamplingTensors(
            temperature=self._tensor(columns.temperature),
            top_k=self._tensor(columns.top_k),
            top_p=self._tensor(columns.top_p),
            min_p=self._tensor(columns.min_p),
            seed=self._tensor(columns.seed),
            choice=self._tensor(columns.choice),
            position=self._tensor(columns.position),
        )
        rows = np.flatnonzero(columns.logprobs >= 0)
        raw = logits
        edits = columns.edits()
        if edits is not None or columns.masks is not None:
            # Log-probabilities are of the model's own logits: whoever changes them does it apart.
            logits = logits.to(torch.float32, copy=len(rows) > 0)
        if edits is not None:
            arrays = (self._tensor(array) for array in edits.arrays)
            edit_logits(logits, _edit_tensors(arrays))
        if columns.masks is not None:
            masks = columns.masks()
            mask_logits(logits, self._tensor(masks.rows), self._tensor(masks.bits))
        token_ids, is_ok = sample(logits, params)
        most = int(columns.logprobs.max(initial=0))
        logprob, top_ids, top = rank_samples(raw, token_ids, self._tensor(rows), max(0, most))
        return StepSamples(
            token_ids=token_ids.cpu().numpy(),
            is_ok=is_ok.cpu().numpy(),
            logprob_rows=rows,
            logprob=logprob.cpu().numpy(),
            top_token_ids=top_ids.cpu().numpy(),
            top_logprobs=top.cpu().numpy(),
            forward_us=(forward_ns - started_ns) // 1000,
            sample_us=(time.perf_counter_ns() - forward_ns) // 1000,
            prompt_logprobs=prompt_logprobs,
        )

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        """On the CPU the same memory; the arrays of a step are never written again."""
        return torch.from_numpy(array).to(self._device)


def _edit_tensors(tensors: Iterable[Tensor]) -> EditTensors:
    """Of the arrays of some, on the device."""
    names = (field.name for field in fields(LogitEdits))
    return EditTensors(**dict(zip(names, tensors, strict=True)))


def rank_prompt(
    decoder: Decoder, states: States, tokens: Tensor, token_ids: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `PromptTokenLogprobs`, of `token_ids`; `tokens`: where the states before are.

    A prompt has as many rows of logits as tokens: they are made and ranked in parts.
    """
    told = _room_for(len(token_ids), k, tokens.device)
    for part in _ranked_parts(len(token_ids), decoder.vocab_size):
        _rank(decoder.logits(states, tokens[part]), token_ids[part], told, part)
    return told


def rank_samples(
    raw: Tensor, token_ids: Tensor, rows: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, k top ids, top logprobs) of these rows, as `StepSamples` has them."""
    told = _room_for(len(rows), k, raw.device)
    for part in _ranked_parts(len(rows), raw.size(1)):
        index = rows[part]
        _rank(raw[index], token_ids[index], told, part)
    return told


def _room_for(rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Taken before the first part.

    A result kept between the logits of two parts would keep malloc from using their place again.
    """
    return (
        torch.empty(rows, device=device),
        torch.empty((rows, k), dtype=torch.int64, device=device),
        torch.empty((rows, k), device=device),
    )


def _rank(
    logits: Tensor, token_ids: Tensor, told: tuple[Tensor, Tensor, Tensor], part: slice
) -> None:
    found = token_logprobs(logits, token_ids, told[1].size(1))
    for target, source in zip(told, found, strict=True):
        target[part] = source


def _ranked_parts(rows: int, vocab_size: int) -> Iterator[slice]:
    """A few rows at a time: ranking takes several times the memory of the logits it ranks.

    An even number, so that each part begins where Triton need not compile anew for it.
    """
    step = max(2, RANKED_AT_ONCE // vocab_size // 2 * 2)
    return (slice(start, start + step) for start in range(0, rows, step))
