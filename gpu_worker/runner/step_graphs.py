"""Steps recorded once per size, and then launched in two calls: forward pass, then sampling.

decode    every row computes and samples one token: recorded by rows
mixed     any other step: recorded by tokens, of as many rows as there are slots

A step runs in the least recorded one that holds it; rows and tokens beyond are padding, which
computes nothing that is kept, writes nothing and counts for nothing. What a recorded step reads
lies in buffers that stay: the rows themselves, which of them are asked for, and their tokens. What
comes between the two calls reaches the sampling and not the forward pass, which is under way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

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

ForwardedT = TypeVar("ForwardedT")

# (from this many on, sizes are multiples of this): padding costs little where a step reads weights
# and contexts anyway, and each size takes a fraction of a second to record.
_ROW_STEPS: Final = ((1, 1), (2, 2), (4, 4), (8, 8), (64, 16), (256, 64))
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
    sizes, size = [], 1
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


class StepGraphs(Generic[ForwardedT]):
    """`forward` launches a step up to its logits; `sample`, given what that returned, launches the
    rest, and returns what is read of the step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        limits: RowLimits,
        forward: Callable[[Asked, Bounds], ForwardedT],
        sample: Callable[[Asked, ForwardedT], list[Tensor]],
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
        # Slots, starts and token ids of a mixed step, one after the other, where kernels need not
        # be compiled anew for them.
        self._starts_at = slots + slots % 2
        self._tokens_at = self._starts_at + slots + 2 - slots % 2
        most = max((bucket.tokens for bucket in self._buckets), default=0)
        self._asked_for = torch.zeros(self._tokens_at + most, dtype=torch.int64, device=device)
        # Of a decode step: one token of each row, and none that the device has not.
        self._slots = torch.full((slots,), _PADDING, dtype=torch.int64, device=device)
        self._order = torch.arange(slots + 1, device=device)
        self._no_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._sent: tuple[int, IntArray] = (0, np.zeros(0, np.int64))
        # Of each size: its two parts, and what they computed.
        self._graphs: dict[Bucket, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._forwarded: dict[Bucket, ForwardedT] = {}
        self._computed: dict[Bucket, list[Tensor]] = {}

    def record(self, on_recorded: Callable[[int, int], None]) -> None:
        """Record every size, the largest first, so that the smaller ones find their memory taken.

        `on_recorded(done, total)` after each. The rows are padding meanwhile. What cannot be
        recorded is launched operator by operator: right, slower, and said.
        """
        self._asked_for[: self._starts_at].fill_(_PADDING)
        for done, bucket in enumerate(reversed(self._buckets), start=1):
            try:
                forward = self._streams.record(partial(self._keep_forwarded, bucket))
                sample = self._streams.record(partial(self._keep_computed, bucket))
                self._graphs[bucket] = forward, sample
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

    def launch(self, step: StepInputs) -> Callable[[], list[Tensor]] | None:
        """The forward pass; what is returned launches the sampling, and returns what was computed,
        until the next launch. None: no recorded step holds this one.
        """
        if (bucket := self._bucket_for(step)) is None:
            return None
        if bucket.is_decode:
            self._send_slots(step.slots, bucket.rows)
        else:
            self._send(step)
        forward, sample = self._graphs[bucket]
        forward()

        def sampled() -> list[Tensor]:
            sample()
            return self._computed[bucket]

        return sampled

    def _bucket_for(self, step: StepInputs) -> Bucket | None:
        decodes = len(step.sampled_rows) == step.token_count == step.row_count
        fits = (
            each
            for each in self._buckets
            if each in self._graphs
            and each.is_decode == decodes
            and each.rows >= step.row_count
            and each.tokens >= step.token_count
        )
        return next(fits, None)

    def _keep_forwarded(self, bucket: Bucket) -> None:
        row_max = 1 if bucket.is_decode else bucket.tokens
        bounds = Bounds(row_max=row_max, context_max=self._limits.context_tokens)
        self._forwarded[bucket] = self._forward(self._asked(bucket), bounds)

    def _keep_computed(self, bucket: Bucket) -> None:
        self._computed[bucket] = self._sample(self._asked(bucket), self._forwarded[bucket])

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

    def _send(self, step: StepInputs) -> None:
        """Of a mixed step."""
        tokens = step.token_count
        given = np.full(self._tokens_at + tokens, tokens, np.int64)
        given[: self._starts_at] = _PADDING
        given[: step.row_count] = step.slots
        given[self._starts_at :][: step.row_count + 1] = step.query_starts
        given[self._tokens_at :] = step.token_ids
        self._staging.send(given, self._asked_for[: len(given)])

    def _send_slots(self, slots: IntArray, rows: int) -> None:
        """Of a decode step; the same as before need not be sent again."""
        sent_rows, sent = self._sent
        if rows == sent_rows and np.array_equal(slots, sent):
            return
        padded = np.full(rows, _PADDING, np.int64)
        padded[: len(slots)] = slots
        self._staging.send(padded, self._slots[:rows])
        self._sent = (rows, slots)
