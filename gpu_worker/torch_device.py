"""The device that computes: decoder, KV pages and sampler behind the `Device` protocol."""

import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.decoder import Decoder, States, StepTensors
from gpu_worker.device import (
    ExplainedTokens,
    Explanations,
    LogitEdits,
    SamplingColumns,
    StepInputs,
    StepSamples,
)
from kernels.logit_edits import EditTensors, edit_logits
from kernels.sampling import SamplingTensors, sample, token_logprobs

# Logits, about 40 bytes each while they are ranked: 160 MB, whatever the batch and vocabulary.
RANKED_AT_ONCE: Final = 1 << 22


class TorchDevice:
    def __init__(self, decoder: Decoder, pages: Tensor) -> None:
        self._decoder = decoder
        self._pages = pages
        self._device = pages.device

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        sources, targets = torch.tensor(pairs, device=self._device).T
        with torch.inference_mode():
            # All sources are read before any target is written.
            self._pages[:, :, targets] = self._pages[:, :, sources]

    def execute(self, step: StepInputs) -> StepSamples:
        started_ns = time.perf_counter_ns()
        with torch.inference_mode():
            tensors = self._on_device(step)
            states = self._decoder.forward(tensors)
            logits = self._decoder.logits(states, tensors.sampled_tokens)
            forward_ns = time.perf_counter_ns()
            explained = self._explain(states, step.explained)
            return self._sample(logits, step.sampling, explained, started_ns, forward_ns)

    def _on_device(self, step: StepInputs) -> StepTensors:
        return StepTensors(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(step.positions),
            kv_slots=self._tensor(step.kv_slots),
            query_starts=self._tensor(step.query_starts),
            context_lengths=self._tensor(step.context_lengths),
            block_tables=self._tensor(step.block_tables),
            sampled_tokens=self._tensor(step.sampled_tokens),
        )

    def _explain(self, states: States, wanted: ExplainedTokens | None) -> Explanations | None:
        """A prompt has as many rows of logits as tokens: they are made and ranked in parts."""
        if wanted is None:
            return None
        k = int(wanted.tops.max())
        parts = []
        for part in _ranked_parts(len(wanted.rows), self._decoder.vocab_size):
            logits = self._decoder.logits(states, self._tensor(wanted.computed[part]))
            parts.append(token_logprobs(logits, self._tensor(wanted.token_ids[part]), k))
        logprob, top_ids, top = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
        return Explanations(logprob=logprob, top_token_ids=top_ids, top_logprobs=top)

    def _sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        explained: Explanations | None,
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
        if columns.edits is not None:
            # Log-probabilities are of the model's own logits: whoever changes them does it apart.
            logits = logits.clone() if len(rows) else logits
            edit_logits(logits, self._edits(columns.edits))
        token_ids, is_ok = sample(logits, params)
        logprob, top_ids, top = self._logprobs(raw, token_ids, columns, rows)
        return StepSamples(
            token_ids=token_ids.cpu().numpy(),
            is_ok=is_ok.cpu().numpy(),
            logprob_rows=rows,
            logprob=logprob.cpu().numpy(),
            top_token_ids=top_ids.cpu().numpy(),
            top_logprobs=top.cpu().numpy(),
            forward_us=(forward_ns - started_ns) // 1000,
            sample_us=(time.perf_counter_ns() - forward_ns) // 1000,
            explained=explained,
        )

    def _edits(self, edits: LogitEdits) -> EditTensors:
        arrays = {field.name: getattr(edits, field.name) for field in fields(edits)}
        return EditTensors(**{name: self._tensor(array) for name, array in arrays.items()})

    def _logprobs(
        self,
        raw: Tensor,
        token_ids: Tensor,
        columns: SamplingColumns,
        rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not len(rows):
            return raw.new_empty(0), token_ids.new_empty((0, 0)), raw.new_empty((0, 0))
        k = int(columns.logprobs[rows].max())
        parts = []
        for part in _ranked_parts(len(rows), raw.size(1)):
            index = self._tensor(rows[part])
            parts.append(token_logprobs(raw[index], token_ids[index], k))
        logprob, top_ids, top = zip(*parts, strict=True)
        return torch.cat(logprob), torch.cat(top_ids), torch.cat(top)

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        """On the CPU the same memory; the arrays of a step are never written again."""
        return torch.from_numpy(array).to(self._device)


def _ranked_parts(rows: int, vocab_size: int) -> Iterator[slice]:
    """A few rows at a time: ranking takes several times the memory of the logits it ranks."""
    step = max(1, RANKED_AT_ONCE // vocab_size)
    return (slice(start, start + step) for start in range(0, rows, step))
