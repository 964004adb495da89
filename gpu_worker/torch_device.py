"""The device that computes: decoder, KV pages and sampler behind the `Device` protocol."""

import time
from dataclasses import fields
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.decoder import Decoder, StepTensors
from gpu_worker.device import LogitEdits, SamplingColumns, StepInputs, StepSamples
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
            logits = self._decoder.forward(self._on_device(step))
            forward_ns = time.perf_counter_ns()
            return self._sample(logits, step.sampling, started_ns, forward_ns)

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

    def _sample(
        self, logits: Tensor, columns: SamplingColumns, started_ns: int, forward_ns: int
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
        # A few rows at a time: ranking takes several times the memory of the logits it ranks.
        step = max(1, RANKED_AT_ONCE // raw.size(1))
        parts = []
        for start in range(0, len(rows), step):
            index = self._tensor(rows[start : start + step])
            parts.append(token_logprobs(raw[index], token_ids[index], k))
        logprob, top_ids, top = zip(*parts, strict=True)
        return torch.cat(logprob), torch.cat(top_ids), torch.cat(top)

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        """On the CPU the same memory; the arrays of a step are never written again."""
        return torch.from_numpy(array).to(self._device)
