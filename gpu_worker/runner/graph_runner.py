"""The model runner that holds the rows itself and computes ahead of the host (`AheadRunner`).

A step is launched with what the host knows of it and no more than a few kilobytes sent, mostly
none; the device works out positions and places from its rows, applies their rules, samples, and
moves its rows on, so the next step can be launched at once. Only the sampled tokens come back,
beside the computing. Steps are recorded by size (`step_graphs`), and then one launch each; where
rows have grammars two, between which their masks come from the host.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import (
    AnyArray,
    BlockPairs,
    IntArray,
    PromptLogprobTokens,
    PromptTokenLogprobs,
    RowChanges,
    StepInputs,
    StepSamples,
)
from gpu_worker.model.decoder import Decoder, Queries, States, StepTensors
from gpu_worker.runner.block_copies import BlockCopies
from gpu_worker.runner.device_rows import DeviceRows, staging_bytes
from gpu_worker.runner.device_streams import DeviceStreams
from gpu_worker.runner.eager_runner import rank_prompt, rank_samples
from gpu_worker.runner.results import Result, Results, results_bytes
from gpu_worker.runner.staging import Staging
from gpu_worker.runner.step_graphs import Bounds, Bucket, StepGraphs, buckets_of
from kernels.kv.fp8 import as_bytes
from kernels.rows.advance_rows import ABSENT, advance_rows
from kernels.rows.edit_rows import edit_rows
from kernels.rows.step_rows import Asked, RowStep, step_rows
from kernels.sampling.edited_rows import EditedRows
from kernels.sampling.logprobs import K_MAX, LogprobBuffers
from kernels.sampling.sample import SamplingBuffers, sample, token_logprobs

_NOTHING: Final = (
    np.zeros(0, np.float32),
    np.zeros((0, 0), np.int64),
    np.zeros((0, 0), np.float32),
)

# What became of each row, and three of its log-probabilities.
_OF_SAMPLES: Final = 4
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
        host_blocks: Tensor | None = None,
        buckets: Sequence[Bucket] | None = None,
    ) -> None:
        """`host_blocks` are pinned. `buckets`: the steps to record, if not those of
        `step_graphs.buckets_of`.
        """
        self._decoder = decoder
        decoder.reserve(rows=limits.slots, tokens=limits.step_tokens)
        self.limits = limits
        self._streams = streams
        self._staging = Staging(streams, staging_bytes(limits))
        self._results = Results(streams, results_bytes(limits))
        self._copies = BlockCopies(
            as_bytes(pages), None if host_blocks is None else as_bytes(host_blocks)
        )
        slots, vocab, device = limits.slots, limits.vocab_size, streams.device
        self.rows = DeviceRows(limits, self._staging, device)
        # Of every step, recorded or not: as the model made them, and of rows with rules apart.
        self._logits = torch.zeros((slots, vocab), dtype=decoder.logits_dtype, device=device)
        self._edited = EditedRows.of(slots, vocab, device)
        self._contexts = torch.zeros(slots, dtype=torch.int32, device=device)
        self._sampling = SamplingBuffers.of(slots, vocab, device)
        self._logprobs = LogprobBuffers.of(slots, vocab, min(K_MAX, vocab), device)
        self._order = torch.arange(slots + 1, device=device)
        self._one_each = self._order.int()
        buckets = buckets_of(limits) if buckets is None else buckets
        self._graphs = StepGraphs(
            buckets, limits, self._forward, self._sample, streams, self._staging
        )
        # Weights, pages and rows were written on another stream than steps run on.
        streams.finish()

    def finish(self) -> None:
        self._streams.finish()

    def record(self, on_recorded: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Record the steps of each bucket; before the first row joins."""
        with self._streams.computing():
            self._graphs.record(on_recorded)

    def clear(self) -> None:
        with self._streams.computing():
            self.rows.clear()

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        with self._streams.computing():
            self.rows.apply(changes)
            for pairs in self._sendable(swaps):
                # Host blocks have the higher numbers.
                own = np.array([min(pair) for pair in pairs], np.int64)
                self._copies.swap(pairs, self._staging.upload(own)[0])
            for pairs in self._sendable(copies):
                self._copies.copy(*self._staging.upload(np.array(pairs, np.int64).T)[0])

    def _sendable(self, pairs: BlockPairs) -> Iterator[BlockPairs]:
        step = self._staging.size_bytes // _COPY_BYTES
        return (pairs[start : start + step] for start in range(0, len(pairs), step))

    def launch(self, step: StepInputs) -> "StepFlight":
        with self._streams.computing():
            begun = self._streams.begun()
            wanted = 1 if (step.sampling.logprobs < 0).all() else _OF_SAMPLES
            sample_all = None if _is_odd(step) else self._graphs.launch(step)
            is_graph = sample_all is not None
            if sample_all is None:
                asked = self.rows.ask(step)
                if step.sampling.masks is not None:
                    # Masks may take more uploads than what was sent before them lasts for.
                    asked = replace(asked, slots=asked.slots.clone(), starts=asked.starts.clone())
                row_step, states = self._forward(asked, _bounds(step), step)
                sample_all = partial(self._sample, asked, _Odd(step, row_step, states))
            if step.sampling.masks is not None:
                masks = step.sampling.masks()
                self.rows.mask(step.slots[step.sampled_rows[masks.rows]], masks.bits)
            # Rows change last: a launch that fails has left them as they were.
            computed = sample_all()
            fetched = computed[:wanted] + computed[_OF_SAMPLES:]
            return StepFlight(step, self._results.fetch(fetched, begun), is_graph=is_graph)

    def _forward(
        self, asked: Asked, bounds: Bounds, odd: StepInputs | None = None
    ) -> tuple[RowStep, States]:
        """The logits and contexts of a step's rows, into the buffers of all steps.

        As in `_sample`, the same launches whatever rows want, so that they can be recorded. What is
        `odd` in a step (`_is_odd`) is computed besides, and is not.
        """
        rows = asked.slots.numel()
        contexts = self._contexts[:rows]
        step = step_rows(self.rows.state, asked, self.limits.block_size, contexts)
        has_prompt = odd is not None and odd.prompt_logprobs is not None
        # In the last layer too, tokens go on that have logits which anybody wants.
        is_narrowed = not has_prompt and bounds.row_max > 1
        states = self._decoder.forward(self._tensors(asked, step, bounds, is_narrowed=is_narrowed))
        last_tokens = self._order[:rows] if is_narrowed else step.last_tokens
        self._decoder.logits(states, last_tokens, self._logits[:rows])
        return step, states

    def _sample(self, asked: Asked, odd: "_Odd | None" = None) -> list[Tensor]:
        """What became of each row, log-probabilities of samples, and of prompts."""
        rows = asked.slots.numel()
        logits, edited = self._logits[:rows], self._edited.first(rows)
        wanted = self.rows.samples(asked, self._contexts[:rows])
        edit_rows(logits, edited, self.rows.state, self.rows.rules, wanted.slots)
        token_ids, is_ok = sample(logits, wanted.params, self._sampling, edited)
        told = self._likeliest(logits, token_ids, wanted.logprobs, odd)
        if odd is not None and (prompt := odd.inputs.prompt_logprobs) is not None:
            ends = odd.inputs.query_starts[1:].astype(np.int64)
            told += self._rank_prompt(prompt, ends, odd.states, odd.step)
        return [advance_rows(self.rows.state, self.rows.rules, asked, token_ids, is_ok), *told]

    def _likeliest(
        self, logits: Tensor, token_ids: Tensor, wanted: Tensor, odd: "_Odd | None"
    ) -> list[Tensor]:
        """Of all rows: logprob, ids and log-probabilities of the likeliest."""
        most = 0 if odd is None else int(odd.inputs.sampling.logprobs.max(initial=0))
        if most > K_MAX:
            return list(rank_samples(logits, token_ids, self._order[: len(logits)], most))
        k = self._logprobs.top_ids.size(1)
        return list(token_logprobs(logits, token_ids, k, wanted, self._logprobs))

    def _rank_prompt(
        self, prompt: PromptLogprobTokens, ends: IntArray, states: States, step: RowStep
    ) -> list[Tensor]:
        """`ends` [R] of the rows as the host knew them."""
        rows, before_end, token_ids = self._staging.upload(
            prompt.rows, ends[prompt.rows] - prompt.computed, prompt.token_ids
        )
        # Of a row that the host did not know to have ended: of any token, and ignored.
        tokens = (step.query_starts[rows + 1] - before_end).clamp_min(0)
        return list(rank_prompt(self._decoder, states, tokens, token_ids, int(prompt.tops.max())))

    def _tensors(
        self, asked: Asked, step: RowStep, bounds: Bounds, *, is_narrowed: bool
    ) -> StepTensors:
        rows, narrowed = asked.slots.numel(), None
        if is_narrowed:
            # Of a row that has ended: of any token, and ignored.
            last = Queries(
                starts=self._one_each[: rows + 1],
                context_lengths=step.context_lengths.clamp_min(1),
                row_max=1,
            )
            narrowed = step.last_tokens, last
        return StepTensors(
            token_ids=step.token_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            queries=Queries(
                starts=step.query_starts,
                context_lengths=step.context_lengths,
                row_max=bounds.row_max,
            ),
            block_tables=self.rows.block_tables(asked),
            logits_indices=narrowed,
            context_max=bounds.context_max,
        )


class _Odd(NamedTuple):
    """A step that is launched one by one, between its forward pass and its sampling."""

    inputs: StepInputs
    step: RowStep
    # Of all tokens, where log-probabilities of prompts are wanted.
    states: States


class StepFlight:
    def __init__(self, step: StepInputs, result: Result, *, is_graph: bool) -> None:
        self._step, self._is_graph = step, is_graph
        self._result = result

    @property
    def is_done(self) -> bool:
        return self._result.is_done

    def result(self) -> StepSamples:
        found, forward_us = self._result.read()
        result, *arrays = found
        result = result[self._step.sampled_rows]
        rows = np.flatnonzero(self._step.sampling.logprobs >= 0)
        logprob, top_ids, top = _NOTHING
        if len(rows):
            its_rows = self._step.sampled_rows[rows]
            logprob, top_ids, top = (each[its_rows] for each in _three(arrays))
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
            is_graph=self._is_graph,
            prompt_logprobs=prompt_logprobs,
        )


def _three(arrays: list[AnyArray]) -> list[Any]:
    """Taken from the front."""
    return [arrays.pop(0) for _ in range(3)]


def _is_odd(step: StepInputs) -> bool:
    """Whether it wants what is not recorded, as its size differs from step to step."""
    return step.prompt_logprobs is not None or int(step.sampling.logprobs.max(initial=-1)) > K_MAX


def _bounds(step: StepInputs) -> Bounds:
    return Bounds(
        row_max=int(step.counts.max()), context_max=int(step.context_lengths.max(initial=1))
    )
