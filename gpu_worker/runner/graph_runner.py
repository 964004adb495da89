"""The device that holds the rows itself and computes ahead of the host (`device.AheadRunner`).

A step is launched with what the host knows of it and no more than a few kilobytes sent, mostly
none; the device works out positions and places from its rows, samples, and moves its rows on, so
the next step can be launched at once. Only the sampled tokens come back, beside the computing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.logits_indices import LogitsIndices, logits_indices
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import (
    AnyArray,
    PromptTokenLogprobs,
    RowChanges,
    StepInputs,
    StepSamples,
)
from gpu_worker.model.decoder import Decoder, Queries, StepTensors
from gpu_worker.runner.block_copies import BlockCopies
from gpu_worker.runner.device_rows import DeviceRows, staging_bytes
from gpu_worker.runner.device_streams import DeviceStreams
from gpu_worker.runner.eager_runner import edit_tensors, rank_prompt, rank_samples
from gpu_worker.runner.logits_processors import edits_bytes, in_parts
from gpu_worker.runner.results import Result, Results, results_bytes
from gpu_worker.runner.staging import Staging
from gpu_worker.runner.step_graphs import Sampled, StepGraphs
from kernels.kv.fp8 import as_bytes
from kernels.rows.advance_rows import ABSENT, advance_rows
from kernels.rows.step_rows import Asked, RowStep, step_rows
from kernels.sampling.logit_edits import EditBuffers, edit_logits
from kernels.sampling.sample import sample

_NOTHING: Final = (
    np.zeros(0, np.float32),
    np.zeros((0, 0), np.int64),
    np.zeros((0, 0), np.float32),
)

# Two int64 each.
_COPY_BYTES: Final = 16


class GraphRunner:
    def __init__(
        self,
        decoder: Decoder,
        pages: Tensor,
        limits: RowLimits,
        streams: DeviceStreams,
        *,
        graph_sizes: Sequence[int],
    ) -> None:
        self._decoder = decoder
        decoder.reserve(rows=limits.slots, tokens=limits.step_tokens)
        self.limits = limits
        self._streams = streams
        self._staging = Staging(streams, staging_bytes(limits))
        # Their own, as there may be more parts than anything else in a step has buffers. Two: for
        # the step that is launched and the one that runs.
        self._edits = Staging(streams, edits_bytes(limits), buffers=2)
        self._results = Results(streams, results_bytes(limits))
        self._copies = BlockCopies(as_bytes(pages))
        device = streams.device
        # An allowed token is sent as its row and its id.
        self._edit_buffers = EditBuffers.of(limits.slots, self._edits.size_bytes // 16, device)
        self.rows = DeviceRows(limits, self._staging, device)
        # Of the rows of a recorded step: one for all sizes.
        self._logits = torch.empty((max(graph_sizes), limits.vocab_size), device=device)
        self._graphs = StepGraphs(graph_sizes, self._forward, self._sample, streams, self._staging)
        # Weights, pages and rows were written on another stream than steps run on.
        streams.finish()

    def finish(self) -> None:
        self._streams.finish()

    def record(self, on_recorded: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record the decode steps; before the first row joins."""
        with self._streams.computing():
            self._graphs.record(on_recorded)

    def clear(self) -> None:
        with self._streams.computing():
            self.rows.clear()

    def apply(self, changes: RowChanges, copies: tuple[tuple[int, int], ...]) -> None:
        with self._streams.computing():
            self.rows.apply(changes)
            step = self._staging.size_bytes // _COPY_BYTES
            for start in range(0, len(copies), step):
                some = np.array(copies[start : start + step], np.int64)
                self._copies.copy(*self._staging.upload(some.T)[0])

    def launch(self, step: StepInputs) -> "StepFlight":
        with self._streams.computing():
            begun = self._streams.begun()
            is_recorded = _only_decodes(step) and self._graphs.size_for(step.row_count) is not None
            tensors = self._recorded(step) if is_recorded else self._mixed(step)
            return StepFlight(step, self._results.fetch(tensors, begun))

    def _forward(self, asked: Asked) -> None:
        """One token of each row: its logits."""
        step = step_rows(self.rows.state, asked, self.limits.block_size)
        states = self._decoder.forward(
            self._tensors(asked, step, row_max=1, context_max=self.limits.context_tokens)
        )
        self._decoder.logits(states, step.sampled_tokens, self._logits[: asked.sample_count])

    def _sample(self, asked: Asked) -> Sampled:
        slots = asked.slots.clamp_min(0)
        return sample(self._logits[: asked.sample_count], self.rows.sampling(slots))

    def _recorded(self, inputs: StepInputs) -> list[Tensor]:
        """As `_mixed`, of rows that compute and sample one token each."""
        asked = self._graphs.forward(inputs.slots)
        raw = self._edit(inputs, self._logits[: inputs.row_count])
        token_ids, is_ok = self._graphs.sample(asked)
        told = self._likeliest(inputs, raw, token_ids)
        result = advance_rows(self.rows.state, asked, token_ids, is_ok)
        return [result[: inputs.row_count], *told]

    def _mixed(self, inputs: StepInputs) -> list[Tensor]:
        """Any step: what became of each sample, then all log-probabilities that are wanted.

        Rows change last: a launch that fails has left them as they were.
        """
        asked = self.rows.ask(inputs)
        step = step_rows(self.rows.state, asked, self.limits.block_size)
        indices = logits_indices(inputs)
        tokens, queries, sampled, prompt = self._upload_indices(indices, step)
        states = self._decoder.forward(
            self._tensors(
                asked,
                step,
                row_max=int(inputs.counts.max()),
                context_max=int(inputs.context_lengths.max()),
                logits_indices=(tokens, queries),
            )
        )
        logits = self._decoder.logits(states, sampled)
        raw = self._edit(inputs, logits)
        token_ids, is_ok = sample(logits, self.rows.sampling(step.sampled_slots))
        told = self._likeliest(inputs, raw, token_ids)
        if (wanted := inputs.prompt_logprobs) is not None:
            its_ids = self._staging.upload(wanted.token_ids)[0]
            told += rank_prompt(self._decoder, states, prompt, its_ids, int(wanted.tops.max()))
        return [advance_rows(self.rows.state, asked, token_ids, is_ok), *told]

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
        return list(rank_samples(raw, token_ids, self._staging.upload(rows)[0], most))

    def _upload_indices(
        self, indices: LogitsIndices, step: RowStep
    ) -> tuple[Tensor, Queries, Tensor, Tensor]:
        """Tokens with logits and how they attend; which are sampled, which are the prompt's."""
        rows, before_end, starts, sampled, prompt = self._staging.upload(
            indices.rows,
            indices.before_end,
            indices.starts,
            indices.sampled,
            indices.prompt,
        )
        # Rows that the host did not know to have ended have none: what they get here is ignored.
        tokens = (step.query_starts[rows + 1] - before_end).clamp_min(0)
        contexts = torch.maximum(step.context_lengths, starts.diff())
        queries = Queries(starts=starts, context_lengths=contexts, row_max=indices.row_max)
        return tokens, queries, sampled, prompt

    def _tensors(
        self,
        asked: Asked,
        step: RowStep,
        *,
        row_max: int,
        context_max: int,
        logits_indices: tuple[Tensor, Queries] | None = None,
    ) -> StepTensors:
        queries = Queries(
            starts=step.query_starts, context_lengths=step.context_lengths, row_max=row_max
        )
        return StepTensors(
            token_ids=step.token_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            queries=queries,
            block_tables=self.rows.block_tables(asked),
            logits_indices=logits_indices,
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
        prompt_logprobs = None
        if self._step.prompt_logprobs is not None:
            of_prompt, ids_of_prompt, tops_of_prompt = _three(arrays)
            prompt_logprobs = PromptTokenLogprobs(
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
            prompt_logprobs=prompt_logprobs,
        )


def _three(arrays: list[AnyArray]) -> list[Any]:
    """Taken from the front."""
    return [arrays.pop(0) for _ in range(3)]


def _only_decodes(step: StepInputs) -> bool:
    """Whether every row computes and samples one token, and none wants prompt logprobs."""
    is_one_each = len(step.sampled_rows) == step.token_count == step.row_count
    return is_one_each and step.prompt_logprobs is None
