"""The device that holds the rows itself and computes ahead of the host (`device.AheadDevice`).

A step is launched with what the host knows of it and no more than a few kilobytes sent, mostly
none; the device works out positions and places from its rows, samples, and moves its rows on, so
the next step can be launched at once. Only the sampled tokens come back, beside the computing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.accelerator import Accelerator
from gpu_worker.block_copies import BlockCopies
from gpu_worker.decoder import Decoder, Queries, StepTensors
from gpu_worker.device import AnyArray, Explanations, RowChanges, StepInputs, StepSamples
from gpu_worker.draft import RowLimits
from gpu_worker.edit_parts import edits_bytes, in_parts
from gpu_worker.looked_at import LookedAt, looked_at
from gpu_worker.resident_rows import ResidentRows, staging_bytes
from gpu_worker.results import Result, Results, results_bytes
from gpu_worker.staging import Staging
from gpu_worker.step_graphs import Chosen, StepGraphs
from gpu_worker.torch_device import edit_tensors, explain, likeliest
from kernels.fp8 import as_bytes
from kernels.logit_edits import EditBuffers, edit_logits
from kernels.sampling import sample
from kernels.step_rows import Asked, RowStep, step_rows
from kernels.take_tokens import ABSENT, take_tokens

_NOTHING: Final = (
    np.zeros(0, np.float32),
    np.zeros((0, 0), np.int64),
    np.zeros((0, 0), np.float32),
)

# Two int64 each.
_COPY_BYTES: Final = 16


class ResidentDevice:
    def __init__(
        self,
        decoder: Decoder,
        pages: Tensor,
        limits: RowLimits,
        accelerator: Accelerator,
        *,
        graph_sizes: Sequence[int],
    ) -> None:
        self._decoder = decoder
        decoder.reserve(rows=limits.slots, tokens=limits.step_tokens)
        self.limits = limits
        self._accelerator = accelerator
        self._staging = Staging(accelerator, staging_bytes(limits))
        # Their own, as there may be more parts than anything else in a step has buffers. Two: for
        # the step that is launched and the one that runs.
        self._edits = Staging(accelerator, edits_bytes(limits), buffers=2)
        self._results = Results(accelerator, results_bytes(limits))
        self._copies = BlockCopies(as_bytes(pages))
        device = accelerator.device
        # An allowed token is sent as its row and its id.
        self._edit_buffers = EditBuffers.of(limits.slots, self._edits.size_bytes // 16, device)
        self.rows = ResidentRows(limits, self._staging, device)
        # Of the rows of a recorded step: one for all sizes.
        self._logits = torch.empty((max(graph_sizes), limits.vocab_size), device=device)
        self._graphs = StepGraphs(
            graph_sizes, self._think, self._choose, accelerator, self._staging
        )
        # Weights, pages and rows were written on another stream than steps run on.
        accelerator.finish()

    def finish(self) -> None:
        self._accelerator.finish()

    def record(self, on_recorded: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record the decode steps; before the first row joins."""
        with self._accelerator.computing():
            self._graphs.record(on_recorded)

    def clear(self) -> None:
        with self._accelerator.computing():
            self.rows.clear()

    def apply(self, changes: RowChanges, copies: tuple[tuple[int, int], ...]) -> None:
        with self._accelerator.computing():
            self.rows.apply(changes)
            step = self._staging.size_bytes // _COPY_BYTES
            for start in range(0, len(copies), step):
                some = np.array(copies[start : start + step], np.int64)
                self._copies.copy(*self._staging.upload(some.T)[0])

    def launch(self, step: StepInputs) -> "StepFlight":
        with self._accelerator.computing():
            begun = self._accelerator.begun()
            is_recorded = _only_decodes(step) and self._graphs.size_for(step.row_count) is not None
            tensors = self._recorded(step) if is_recorded else self._mixed(step)
            return StepFlight(step, self._results.fetch(tensors, begun))

    def _think(self, asked: Asked) -> None:
        """One token of each row: its logits."""
        step = step_rows(self.rows.state, asked, self.limits.block_size)
        states = self._decoder.forward(
            self._tensors(asked, step, row_max=1, context_max=self.limits.context_tokens)
        )
        self._decoder.logits(states, step.sampled_tokens, self._logits[: asked.sample_count])

    def _choose(self, asked: Asked) -> Chosen:
        slots = asked.slots.clamp_min(0)
        return sample(self._logits[: asked.sample_count], self.rows.sampling(slots))

    def _recorded(self, inputs: StepInputs) -> list[Tensor]:
        """As `_mixed`, of rows that compute and sample one token each."""
        asked = self._graphs.think(inputs.slots)
        raw = self._edit(inputs, self._logits[: inputs.row_count])
        token_ids, is_ok = self._graphs.choose(asked)
        told = self._likeliest(inputs, raw, token_ids)
        result = take_tokens(self.rows.state, asked, token_ids, is_ok)
        return [result[: inputs.row_count], *told]

    def _mixed(self, inputs: StepInputs) -> list[Tensor]:
        """Any step: what became of each sample, then all log-probabilities that are wanted.

        Rows change last: a launch that fails has left them as they were.
        """
        asked = self.rows.ask(inputs)
        step = step_rows(self.rows.state, asked, self.limits.block_size)
        looked = looked_at(inputs)
        tokens, queries, sampled, explained = self._look(looked, step)
        states = self._decoder.forward(
            self._tensors(
                asked,
                step,
                row_max=int(inputs.counts.max()),
                context_max=int(inputs.context_lengths.max()),
                looked_at=(tokens, queries),
            )
        )
        logits = self._decoder.logits(states, sampled)
        raw = self._edit(inputs, logits)
        token_ids, is_ok = sample(logits, self.rows.sampling(step.sampled_slots))
        told = self._likeliest(inputs, raw, token_ids)
        if (wanted := inputs.explained) is not None:
            its_ids = self._staging.upload(wanted.token_ids)[0]
            told += explain(self._decoder, states, explained, its_ids, int(wanted.tops.max()))
        return [take_tokens(self.rows.state, asked, token_ids, is_ok), *told]

    def _edit(self, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Change them as their rows ask; returns the model's own, if anybody looks at those."""
        if (edits := inputs.sampling.edits) is None:
            return logits
        raw = logits.clone() if (inputs.sampling.logprobs >= 0).any() else logits
        for part in in_parts(edits, self._edits.size_bytes):
            tensors = edit_tensors(self._edits.upload(*part.arrays))
            edit_logits(logits, tensors, self._edit_buffers)
        return raw

    def _likeliest(self, inputs: StepInputs, raw: Tensor, token_ids: Tensor) -> list[Tensor]:
        rows = np.flatnonzero(inputs.sampling.logprobs >= 0)
        if not len(rows):
            return []
        most = int(inputs.sampling.logprobs.max())
        return list(likeliest(raw, token_ids, self._staging.upload(rows)[0], most))

    def _look(self, looked: LookedAt, step: RowStep) -> tuple[Tensor, Queries, Tensor, Tensor]:
        """The tokens looked at and how they attend; which of them are sampled, and explained."""
        rows, before_end, starts, sampled, explained = self._staging.upload(
            looked.rows, looked.before_end, looked.starts, looked.sampled, looked.explained
        )
        # Rows that the host did not know to have ended have none: what they get here is ignored.
        tokens = (step.query_starts[rows + 1] - before_end).clamp_min(0)
        contexts = torch.maximum(step.context_lengths, starts.diff())
        queries = Queries(starts=starts, context_lengths=contexts, row_max=looked.row_max)
        return tokens, queries, sampled, explained

    def _tensors(
        self,
        asked: Asked,
        step: RowStep,
        *,
        row_max: int,
        context_max: int,
        looked_at: tuple[Tensor, Queries] | None = None,
    ) -> StepTensors:
        queries = Queries(
            starts=step.query_starts, context_lengths=step.context_lengths, row_max=row_max
        )
        return StepTensors(
            token_ids=step.token_ids,
            positions=step.positions,
            kv_slots=step.kv_slots,
            queries=queries,
            block_tables=self.rows.block_tables(asked),
            looked_at=looked_at,
            context_max=context_max,
        )


class StepFlight:
    def __init__(self, step: StepInputs, result: Result) -> None:
        self._step = step
        self._result = result

    @property
    def is_done(self) -> bool:
        return self._result.is_done

    def result(self) -> StepSamples:
        found, forward_us = self._result.read()
        result, *arrays = found
        rows = np.flatnonzero(self._step.sampling.logprobs >= 0)
        logprob, top_ids, top = _three(arrays) if len(rows) else _NOTHING
        explained = None
        if self._step.explained is not None:
            of_prompt, ids_of_prompt, tops_of_prompt = _three(arrays)
            explained = Explanations(
                logprob=of_prompt, top_token_ids=ids_of_prompt, top_logprobs=tops_of_prompt
            )
        return StepSamples(
            token_ids=np.maximum(result, 0),
            is_ok=result >= 0,
            is_there=result != ABSENT,
            logprob_rows=rows,
            logprob=logprob,
            top_token_ids=top_ids,
            top_logprobs=top,
            forward_us=forward_us,
            sample_us=0,
            explained=explained,
        )


def _three(arrays: list[AnyArray]) -> list[Any]:
    """Taken from the front."""
    return [arrays.pop(0) for _ in range(3)]


def _only_decodes(step: StepInputs) -> bool:
    """Whether every row computes and samples one token, and none has its prompt explained."""
    is_one_each = len(step.sampled_rows) == step.token_count == step.row_count
    return is_one_each and step.explained is None
