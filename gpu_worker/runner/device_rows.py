"""The batch as it lives on the device: persistent columns by slot, which plans and steps change.

The host's `Rows` says what changed with a plan; steps change their rows on the device itself
(`kernels.rows`). So between two plans nothing has to be sent.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import STOP_TOKENS_MAX
from gpu_worker.batch.step_types import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    RowChanges,
    StepInputs,
)
from gpu_worker.runner.staging import Staging, packed_bytes
from kernels.rows.step_rows import Asked, RowState
from kernels.sampling.sample import SamplingTensors

# Block table entries sent at once: a plan can bring many long rows.
_PLACES_AT_ONCE: Final = 1 << 16
_NO_STOP: Final = -1
# 16 bytes of the narrowest column.
_ALIGN_ROWS: Final = 4
_STATE_COLUMNS: Final = (
    "is_live",
    "num_tokens",
    "num_computed_tokens",
    "limit",
    "masked_until",
    "last_token",
)


class DeviceRows:
    def __init__(self, limits: RowLimits, staging: Staging, device: torch.device) -> None:
        slots = limits.slots
        self._ints = torch.zeros((len(INT_COLUMNS), slots), dtype=torch.int64, device=device)
        self._floats = torch.zeros((len(FLOAT_COLUMNS), slots), device=device)
        tables = limits.groups, slots, limits.table_width
        blocks = torch.zeros(tables, dtype=torch.int32, device=device)
        stops = torch.full((slots, STOP_TOKENS_MAX), _NO_STOP, dtype=torch.int32, device=device)
        columns = dict(zip(INT_COLUMNS, self._ints, strict=True))
        self.state = RowState(
            **{name: columns[name] for name in _STATE_COLUMNS}, blocks=blocks, stops=stops
        )
        self._staging = staging

    def clear(self) -> None:
        """Nobody lives."""
        self.state.is_live.zero_()

    def apply(self, changes: RowChanges) -> None:
        """Write what a plan changed, after everything launched so far."""
        if len(changes.slots):
            slots, ints, floats, stops = self._staging.upload(
                changes.slots, changes.ints, changes.floats, changes.stops
            )
            self._ints.index_copy_(1, slots, ints)
            self._floats.index_copy_(1, slots, floats)
            # As a whole: what is left of a longer list must not stop anybody.
            self.state.stops.index_fill_(0, slots, _NO_STOP)
            self.state.stops[:, : stops.size(1)].index_copy_(0, slots, stops)
        for start in range(0, len(changes.places), _PLACES_AT_ONCE):
            end = start + _PLACES_AT_ONCE
            places, blocks = self._staging.upload(
                changes.places[start:end], changes.blocks[start:end]
            )
            self.state.blocks.view(-1).index_copy_(0, places, blocks)

    def ask(self, step: StepInputs) -> Asked:
        """The rows and tokens of a step, sent to the device."""
        samples = np.full(step.row_count, -1, np.int64)
        samples[step.sampled_rows] = np.arange(len(step.sampled_rows))
        starts = step.query_starts.astype(np.int64)
        slots, starts_there, samples_there, token_ids = self._staging.upload(
            step.slots, starts, samples, step.token_ids
        )
        return Asked(
            slots=slots,
            starts=starts_there,
            samples=samples_there,
            token_ids=token_ids,
            sample_count=len(step.sampled_rows),
        )

    def block_tables(self, asked: Asked) -> Tensor:
        """[layer groups, R, width of a table] int32."""
        return self.state.blocks.index_select(1, asked.slots.clamp_min(0))

    def sampling(self, slots: Tensor) -> SamplingTensors:
        """The parameters of the next sample of each of these rows."""
        ints = dict(zip(INT_COLUMNS, _gathered(self._ints, slots), strict=True))
        floats = dict(zip(FLOAT_COLUMNS, _gathered(self._floats, slots), strict=True))
        return SamplingTensors(
            **floats,
            **{name: ints[name] for name in ("top_k", "seed", "choice")},
            position=ints["num_tokens"] - ints["prompt"],
        )


def _gathered(columns: Tensor, slots: Tensor) -> Tensor:
    """[columns, rows], each column beginning where Triton need not compile anew for it."""
    rows = slots.numel()
    padded = columns.new_empty((columns.size(0), -(-rows // _ALIGN_ROWS) * _ALIGN_ROWS))
    return torch.index_select(columns, 1, slots, out=padded[:, :rows])


def staging_bytes(limits: RowLimits) -> int:
    """The most that is sent at once: tokens of a step, a batch of joins, block places."""
    rows, tokens = limits.slots, limits.step_tokens
    longest = np.zeros(max(tokens, rows + 1), np.int64)
    step = packed_bytes([longest] * 5)
    joins = packed_bytes(
        [
            np.zeros((1 + len(INT_COLUMNS), rows), np.int64),
            np.zeros((len(FLOAT_COLUMNS), rows), np.float32),
            np.zeros((rows, STOP_TOKENS_MAX), np.int32),
        ]
    )
    places = packed_bytes(
        [np.zeros(_PLACES_AT_ONCE, np.int64), np.zeros(_PLACES_AT_ONCE, np.int32)]
    )
    # Each array may start a little later than the one before ends.
    return max(step, joins, places) + 64
