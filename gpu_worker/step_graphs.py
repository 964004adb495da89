"""Steps that only decode, recorded once per number of rows and then launched in two calls.

think    the rows' logits            choose    a token of each, from its logits

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

from gpu_worker.accelerator import Accelerator
from gpu_worker.device import IntArray
from gpu_worker.staging import Staging
from kernels.step_rows import Asked

# (from this many rows on, sizes are multiples of this): padding costs little where a step reads
# weights and contexts anyway, and each size takes a fraction of a second to record.
_STEPS: Final = ((1, 1), (2, 2), (4, 4), (8, 8), (64, 16), (256, 64))
_PADDING: Final = -1

# token ids [rows] int64, ok [rows] bool
Chosen = tuple[Tensor, Tensor]


def graph_sizes(slots: int) -> tuple[int, ...]:
    """Rows of each recorded step, ascending; the last one holds every slot."""
    sizes, size = [], 1
    while size < slots:
        sizes.append(size)
        size += max(step for start, step in _STEPS if start <= size)
    return (*sizes, slots)


class StepGraphs:
    """`think` launches a decode step up to its logits, `choose` what samples from them."""

    def __init__(
        self,
        sizes: Sequence[int],
        think: Callable[[Asked], None],
        choose: Callable[[Asked], Chosen],
        accelerator: Accelerator,
        staging: Staging,
    ) -> None:
        most, device = max(sizes), accelerator.device
        self.sizes = tuple(sorted(sizes))
        self._think = think
        self._choose = choose
        self._accelerator = accelerator
        self._staging = staging
        self._slots = torch.full((most,), _PADDING, dtype=torch.int64, device=device)
        # One token of each row, every one of them sampled, and none that the device has not.
        self._order = torch.arange(most + 1, device=device)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._sent: tuple[int, IntArray] = (0, np.zeros(0, np.int64))
        self._thinking: dict[int, Callable[[], None]] = {}
        self._choosing: dict[int, Callable[[], None]] = {}
        self._chosen: dict[int, Chosen] = {}

    def record(self, on_recorded: Callable[[int, int], None]) -> None:
        """Record every size, the largest first, so that the smaller ones find their memory taken.

        `on_recorded(done, total)` after each. The rows are padding meanwhile.
        """
        for done, size in enumerate(reversed(self.sizes), start=1):
            asked = self._asked(size)
            self._thinking[size] = self._accelerator.record(partial(self._think, asked))
            self._choosing[size] = self._accelerator.record(partial(self._keep, asked))
            on_recorded(done, len(self.sizes))

    def size_for(self, rows: int) -> int | None:
        """None: no recorded step is that large."""
        return next((size for size in self.sizes if size >= rows and size in self._choosing), None)

    def think(self, slots: IntArray) -> Asked:
        """Launch a step of these rows up to its logits; returns them with their padding."""
        size = self.size_for(len(slots))
        assert size is not None, f"no recorded step holds {len(slots)} rows"
        self._send(slots, size)
        self._thinking[size]()
        return self._asked(size)

    def choose(self, asked: Asked) -> Chosen:
        """Launch the sampling of the step that was thought of last. They stay until the next."""
        size = asked.sample_count
        self._choosing[size]()
        return self._chosen[size]

    def _keep(self, asked: Asked) -> None:
        self._chosen[asked.sample_count] = self._choose(asked)

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
