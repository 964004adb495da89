"""Steps that only decode, recorded once per number of rows and then launched in two calls.

forward    the rows' logits            sample    a token of each, from its logits

What rows ask for besides (edits of their logits, log-probabilities) differs in size from step to
step, so it is not recorded: it is launched between the two, or after them.

A step of n rows runs in the least recorded size that holds it; the rows beyond are padding, which
computes nothing, writes nothing and counts for nothing. What a recorded step reads lies in buffers
that stay: the rows themselves, which slot each of its rows is, and the logits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.step_types import IntArray
from gpu_worker.runner.device_streams import DeviceStreams
from gpu_worker.runner.staging import Staging
from kernels.rows.step_rows import Asked

# (from this many rows on, sizes are multiples of this): padding costs little where a step reads
# weights and contexts anyway, and each size takes a fraction of a second to record.
_STEPS: Final = ((1, 1), (2, 2), (4, 4), (8, 8), (64, 16), (256, 64))
_PADDING: Final = -1

# token ids [rows] int64, ok [rows] bool
Sampled = tuple[Tensor, Tensor]


def graph_sizes(slots: int) -> tuple[int, ...]:
    """Rows of each recorded step, ascending; the last one holds every slot."""
    sizes, size = [], 1
    while size < slots:
        sizes.append(size)
        size += max(step for start, step in _STEPS if start <= size)
    return (*sizes, slots)


class StepGraphs:
    """`forward` launches a decode step up to its logits, `sample` what samples from them."""

    def __init__(
        self,
        sizes: Sequence[int],
        forward: Callable[[Asked], None],
        sample: Callable[[Asked], Sampled],
        streams: DeviceStreams,
        staging: Staging,
    ) -> None:
        most, device = max(sizes), streams.device
        self.sizes = tuple(sorted(sizes))
        self._forward = forward
        self._sample = sample
        self._streams = streams
        self._staging = staging
        self._slots = torch.full((most,), _PADDING, dtype=torch.int64, device=device)
        # One token of each row, every one of them sampled, and none that the device has not.
        self._order = torch.arange(most + 1, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._sent: tuple[int, IntArray] = (0, np.zeros(0, np.int64))
        self._forwards: dict[int, Callable[[], None]] = {}
        self._samplings: dict[int, Callable[[], None]] = {}
        self._sampled: dict[int, Sampled] = {}

    def record(self, on_recorded: Callable[[int, int], None]) -> None:
        """Record every size, the largest first, so that the smaller ones find their memory taken.

        `on_recorded(done, total)` after each. The rows are padding meanwhile.
        """
        for done, size in enumerate(reversed(self.sizes), start=1):
            asked = self._asked(size)
            self._forwards[size] = self._streams.record(partial(self._forward, asked))
            self._samplings[size] = self._streams.record(partial(self._keep, asked))
            on_recorded(done, len(self.sizes))

    def size_for(self, rows: int) -> int | None:
        """None: no recorded step is that large."""
        return next((size for size in self.sizes if size >= rows and size in self._samplings), None)

    def forward(self, slots: IntArray) -> Asked:
        """Launch a step of these rows up to its logits; returns them with their padding."""
        size = self.size_for(len(slots))
        assert size is not None, f"no recorded step holds {len(slots)} rows"
        self._send(slots, size)
        self._forwards[size]()
        return self._asked(size)

    def sample(self, asked: Asked) -> Sampled:
        """Launch the sampling of the step that was launched last. They stay until the next."""
        size = asked.sample_count
        self._samplings[size]()
        return self._sampled[size]

    def _keep(self, asked: Asked) -> None:
        self._sampled[asked.sample_count] = self._sample(asked)

    def _asked(self, size: int) -> Asked:
        return Asked(
            slots=self._slots[:size],
            starts=self._order[: size + 1],
            samples=self._order[:size],
            token_ids=self._token_ids[:size],
            sample_count=size,
        )

    def _send(self, slots: IntArray, size: int) -> None:
        sent_size, sent = self._sent
        if size == sent_size and np.array_equal(slots, sent):
            return
        padded = np.full(size, _PADDING, np.int64)
        padded[: len(slots)] = slots
        self._slots[:size].copy_(self._staging.upload(padded)[0])
        self._sent = (size, slots)
