"""Steps recorded once per size, and then launched in one call: forward pass and sampling.

decode    every row computes and samples one token: recorded by rows
mixed     any other step: recorded by tokens, of as many rows as there are slots

A step runs in the least recorded one that holds it; rows and tokens beyond are padding, which
computes nothing that is kept, writes nothing and counts for nothing. What a recorded step reads
lies in buffers that stay: the rows themselves, which of them are asked for, and their tokens.

Where the sampling waits for the host, the step is told that it samples nobody, and a second call
samples: that of its number of rows, which reads what every step leaves in the same place. So a
forward pass is recorded once, and a sampling, which is a few launches, once more for each number
of rows (docs/adr/0014).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import IntArray, StepInputs
from gpu_worker.runner.device_streams import DeviceStreams, NotRecorded
from gpu_worker.runner.staging import Staging
from kernels.rows.step_rows import Asked

log = structlog.get_logger()

# (from this many on, sizes are multiples of this): padding costs little where a step reads weights
# and contexts anyway, and each size takes a fraction of a second to record. Fewer than 8 rows are
# padded: on an H200 a step of one row of qwen3 0.6b takes a tenth less so, as cuBLAS has better
# products of 8 rows, and of llama 8b a hundredth more.
_ROW_STEPS: Final = ((8, 8), (64, 16), (256, 64))
ROWS_MIN: Final = _ROW_STEPS[0][0]
_TOKEN_STEPS: Final = ((1, 31), (32, 32), (128, 64), (512, 128), (1024, 256))
# Beyond, the device computes for longer than the host takes to launch.
RECORDED_TOKENS_MAX: Final = 2048
_PADDING: Final = -1


class Bucket(NamedTuple):
    """The size of a recorded step."""

    rows: int
    tokens: int
    # One token of each row, which samples.
    is_decode: bool


class Bounds(NamedTuple):
    """What the host knows of a step's rows: tokens and positions of the longest."""

    row_max: int
    context_max: int


def graph_sizes(most: int, steps: Sequence[tuple[int, int]] = _ROW_STEPS) -> tuple[int, ...]:
    """Ascending; the last one is `most`."""
    sizes, size = [], steps[0][0]
    while size < most:
        sizes.append(size)
        size += max(step for start, step in steps if start <= size)
    return (*sizes, most)


def buckets_of(limits: RowLimits) -> tuple[Bucket, ...]:
    """Those of a worker."""
    tokens = graph_sizes(min(limits.step_tokens, RECORDED_TOKENS_MAX), _TOKEN_STEPS)
    mixed = [Bucket(limits.slots, size, is_decode=False) for size in tokens]
    return (*decode_buckets(graph_sizes(limits.slots)), *mixed)


def decode_buckets(rows: Sequence[int]) -> list[Bucket]:
    return [Bucket(size, size, is_decode=True) for size in rows]


class _Recorded:
    """What is launched in one call, and what it computes, until the next launch."""

    def __init__(self, compute: Callable[[], list[Tensor]], streams: DeviceStreams) -> None:
        """Raises NotRecorded."""
        self._compute = compute
        self._computed: list[Tensor] = []
        self._launch = streams.record(self._keep_computed)

    def __call__(self) -> list[Tensor]:
        self._launch()
        return self._computed

    def _keep_computed(self) -> None:
        self._computed = self._compute()


class StepGraphs:
    """`forward` launches a step up to its logits; `sample` the rest, and returns what is read.

    What goes from the one to the other lies in buffers that stay.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        limits: RowLimits,
        forward: Callable[[Asked, Bounds], object],
        sample: Callable[[Asked], list[Tensor]],
        streams: DeviceStreams,
        staging: Staging,
    ) -> None:
        slots, device = limits.slots, streams.device
        self._buckets = sorted(set(buckets), key=lambda each: (each.tokens, each.rows))
        self._limits = limits
        self._forward = forward
        self._sample = sample
        self._streams = streams
        self._staging = staging
        # Slots, those of them that sample, starts and token ids of a mixed step, side by side where
        # kernels need not be compiled anew for them.
        self._starts_at = 2 * _even(slots)
        self._tokens_at = self._starts_at + _even(slots + 1)
        most = max((bucket.tokens for bucket in self._buckets), default=0)
        self._asked_for = torch.zeros(self._tokens_at + most, dtype=torch.int64, device=device)
        # Of a decode step likewise: one token of each row, and none that the device has not.
        self._slots = torch.full((2 * _even(slots),), _PADDING, dtype=torch.int64, device=device)
        self._order = torch.arange(slots + 1, device=device)
        self._no_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._sent: tuple[int, bool, IntArray] = (0, False, np.zeros(0, np.int64))
        self._steps: dict[Bucket, _Recorded] = {}
        self._samplings: dict[Bucket, _Recorded] = {}

    def record(self, on_recorded: Callable[[int, int], None]) -> None:
        """Record every size, the largest first, so that the smaller ones find their memory taken.

        `on_recorded(done, total)` after each. The rows are padding meanwhile. What cannot be
        recorded is launched operator by operator: right, slower, and said.
        """
        self._asked_for[: self._starts_at].fill_(_PADDING)
        for done, bucket in enumerate(reversed(self._buckets), start=1):
            try:
                self._record(bucket)
            except NotRecorded as error:
                log.warning(
                    "worker.unrecorded",
                    rows=bucket.rows,
                    tokens=bucket.tokens,
                    reason=f"steps of this size cannot be recorded ({error}); they and smaller "
                    "ones are launched operator by operator, and the GPU waits for the host",
                )
                return
            on_recorded(done, len(self._buckets))

    def _record(self, bucket: Bucket) -> None:
        self._steps[bucket] = _Recorded(partial(self._compute, bucket), self._streams)
        alike = _sampling_of(bucket)
        if self._limits.reads_grammars and alike not in self._samplings:
            sample = partial(self._sample, self._asked(bucket))
            self._samplings[alike] = _Recorded(sample, self._streams)

    def launch(self, step: StepInputs) -> Callable[[], list[Tensor]] | None:
        """What is returned launches the step, and returns what was computed, until the next launch.

        Where masks are to come in between the forward pass is launched at once, and that samples.
        None: no recorded step holds this one.
        """
        if (bucket := self._bucket_for(step)) is None:
            return None
        has_masks = step.sampling.masks is not None
        if bucket.is_decode:
            self._send_slots(step.slots, bucket.rows, has_masks=has_masks)
        else:
            self._send(step, has_masks=has_masks)
        if not has_masks:
            return self._steps[bucket]
        self._steps[bucket]()
        return self._samplings[_sampling_of(bucket)]

    def _bucket_for(self, step: StepInputs) -> Bucket | None:
        decodes = len(step.sampled_rows) == step.token_count == step.row_count
        has_masks = step.sampling.masks is not None
        fits = (
            each
            for each in self._buckets
            if each in self._steps
            and (not has_masks or _sampling_of(each) in self._samplings)
            and each.is_decode == decodes
            and each.rows >= step.row_count
            and each.tokens >= step.token_count
        )
        return next(fits, None)

    def _compute(self, bucket: Bucket) -> list[Tensor]:
        row_max = 1 if bucket.is_decode else bucket.tokens
        asked = self._asked(bucket)
        self._forward(asked, Bounds(row_max=row_max, context_max=self._limits.context_tokens))
        samples = (self._slots if bucket.is_decode else self._asked_for)[_even(bucket.rows) :]
        return self._sample(replace(asked, slots=samples[: bucket.rows]))

    def _asked(self, bucket: Bucket) -> Asked:
        rows, tokens, is_decode = bucket
        if is_decode:
            return Asked(
                slots=self._slots[:rows],
                starts=self._order[: rows + 1],
                token_ids=self._no_tokens[:rows],
            )
        starts, given = self._asked_for[self._starts_at :], self._asked_for[self._tokens_at :]
        return Asked(
            slots=self._asked_for[:rows], starts=starts[: rows + 1], token_ids=given[:tokens]
        )

    def _send(self, step: StepInputs, *, has_masks: bool) -> None:
        """Of a mixed step."""
        tokens = step.token_count
        given = np.full(self._tokens_at + tokens, tokens, np.int64)
        given[: self._starts_at] = _twice(step.slots, self._limits.slots, has_masks=has_masks)
        given[self._starts_at :][: step.row_count + 1] = step.query_starts
        given[self._tokens_at :] = step.token_ids
        self._staging.send(given, self._asked_for[: len(given)])

    def _send_slots(self, slots: IntArray, rows: int, *, has_masks: bool) -> None:
        """Of a decode step; the same as before need not be sent again."""
        *alike, sent = self._sent
        if alike == [rows, has_masks] and np.array_equal(slots, sent):
            return
        given = _twice(slots, rows, has_masks=has_masks)
        self._staging.send(given, self._slots[: len(given)])
        self._sent = (rows, has_masks, slots)


def _twice(slots: IntArray, rows: int, *, has_masks: bool) -> IntArray:
    """The slots of so many rows, and those of them that sample, with padding."""
    given = np.full((2, _even(rows)), _PADDING, np.int64)
    given[0 if has_masks else slice(None), : len(slots)] = slots
    return given.ravel()


def _even(count: int) -> int:
    """So that what comes next begins where Triton need not compile anew for it."""
    return count + count % 2


def _sampling_of(bucket: Bucket) -> Bucket:
    """Steps of as many rows sample alike."""
    return bucket if bucket.is_decode else bucket._replace(tokens=bucket.rows)
