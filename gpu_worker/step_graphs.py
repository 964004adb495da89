"""Steps that only decode, recorded once per number of rows and then launched in one call.

A step of n rows runs in the least recorded size that holds it; the rows beyond are padding, which
computes nothing, writes nothing and counts for nothing. What a recorded step reads lies in buffers
that stay: the rows themselves, and which slot each of its rows is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.accelerator import Accelerator
from gpu_worker.device import IntArray
from gpu_worker.staging import Staging
from kernels.step_rows import Asked

# (from this many rows on, sizes are multiples of this): padding costs little where a step reads
# weights and contexts anyway, and each size takes a fraction of a second to record.
_STEPS: Final = ((1, 1), (2, 2), (4, 4), (8, 8), (64, 16), (256, 64))
_PADDING: Final = -1


def graph_sizes(slots: int) -> tuple[int, ...]:
    """Rows of each recorded step, ascending; the last one holds every slot."""
    sizes, size = [], 1
    while size < slots:
        sizes.append(size)
        size += max(step for start, step in _STEPS if start <= size)
    return (*sizes, slots)


class StepGraphs:
    """`compute` launches a decode step and returns what became of each row, [rows] int64."""

    def __init__(
        self,
        sizes: Sequence[int],
        compute: Callable[[Asked], Tensor],
        accelerator: Accelerator,
        staging: Staging,
    ) -> None:
        most, device = max(sizes), accelerator.device
        self.sizes = tuple(sorted(sizes))
        self._compute = compute
        self._accelerator = accelerator
        self._staging = staging
        self._slots = torch.full((most,), _PADDING, dtype=torch.int64, device=device)
        # One token of each row, every one of them sampled, and none that the device has not.
        self._order = torch.arange(most + 1, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._sent: tuple[int, IntArray] = (0, np.zeros(0, np.int64))
        self._launches: dict[int, Callable[[], None]] = {}
        self._results: dict[int, Tensor] = {}

    def record(self, on_recorded: Callable[[int, int], None]) -> None:
        """Record every size, the largest first, so that the smaller ones find their memory taken.

        `on_recorded(done, total)` after each. The rows are padding meanwhile.
        """
        for done, size in enumerate(reversed(self.sizes), start=1):
            self._launches[size] = self._accelerator.record(partial(self._run, size))
            on_recorded(done, len(self.sizes))

    def size_for(self, rows: int) -> int | None:
        """None: no recorded step is that large."""
        return next((size for size in self.sizes if size >= rows and size in self._launches), None)

    def launch(self, slots: IntArray) -> Tensor:
        """[rows] int64, what became of each, in memory of its own."""
        size = self.size_for(len(slots))
        assert size is not None, f"no recorded step holds {len(slots)} rows"
        self._send(slots, size)
        self._launches[size]()
        return self._results[size][: len(slots)].clone()

    def _run(self, size: int) -> None:
        self._results[size] = self._compute(
            Asked(
                slots=self._slots[:size],
                starts=self._order[: size + 1],
                samples=self._order[:size],
                token_ids=self._token_ids[:size],
                sample_count=size,
            )
        )

    def _send(self, slots: IntArray, size: int) -> None:
        sent_size, sent = self._sent
        if size == sent_size and np.array_equal(slots, sent):
            return
        padded = np.full(size, _PADDING, np.int64)
        padded[: len(slots)] = slots
        self._slots[:size].copy_(self._staging.upload(padded)[0])
        self._sent = (size, slots)
