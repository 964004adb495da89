"""The batch as it lives on the device: persistent columns by slot, which plans and steps change.

The host's `Rows` says what changed with a plan; steps change their rows on the device itself
(`kernels.rows`). So between two plans nothing has to be sent.
"""

from dataclasses import fields
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BAD_WORDS_MAX, BIASES_MAX, STOP_TOKENS_MAX
from gpu_worker.batch.step_types import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    IndexArray,
    IntArray,
    RowChanges,
    RuleChanges,
    StepInputs,
)
from gpu_worker.runner.staging import ALIGN_BYTES, Staging, packed_bytes
from kernels.rows.edit_rows import BITS, RECENT, RuleState
from kernels.rows.sample_rows import RowSamples, SamplingState, sample_rows
from kernels.rows.step_rows import Asked, RowState

# Block table entries sent at once: a plan can bring many long rows.
_PLACES_AT_ONCE: Final = 1 << 16
# Rows whose rules are sent at once.
_RULES_AT_ONCE: Final = 16
_NO_TOKEN: Final = -1
# 16 bytes of the narrowest column: each begins where Triton need not compile anew for it.
_ALIGN_ROWS: Final = 4
_STATE_COLUMNS: Final = (
    "is_live",
    "num_tokens",
    "num_computed_tokens",
    "limit",
    "masked_until",
    "last_token",
)
_RULE_COLUMNS: Final = (
    "kinds",
    "logprobs",
    "prompt",
    "repetition",
    "presence",
    "frequency",
)


class DeviceRows:
    def __init__(self, limits: RowLimits, staging: Staging, device: torch.device) -> None:
        slots = limits.slots
        width = -(-slots // _ALIGN_ROWS) * _ALIGN_ROWS
        self._ints = torch.zeros((len(INT_COLUMNS), width), dtype=torch.int64, device=device)
        self._floats = torch.zeros((len(FLOAT_COLUMNS), width), device=device)
        tables = limits.groups, slots, limits.table_width
        blocks = torch.zeros(tables, dtype=torch.int32, device=device)
        stops = torch.full((slots, STOP_TOKENS_MAX), _NO_TOKEN, dtype=torch.int32, device=device)
        columns = dict(zip(INT_COLUMNS, self._ints[:, :slots], strict=True))
        columns |= dict(zip(FLOAT_COLUMNS, self._floats[:, :slots], strict=True))
        self.state = RowState(
            **{name: columns[name] for name in _STATE_COLUMNS}, blocks=blocks, stops=stops
        )
        self.rules = self._no_rules(limits, columns)
        self._wanted = SamplingState(
            **{field.name: columns[field.name] for field in fields(SamplingState)}
        )
        self._staging = staging

    def _no_rules(self, limits: RowLimits, columns: dict[str, Tensor]) -> RuleState:
        slots, device = limits.slots, self._ints.device

        def table(*width: int) -> Tensor:
            return torch.zeros((slots, *width), dtype=torch.int32, device=device)

        return RuleState(
            **{name: columns[name] for name in _RULE_COLUMNS},
            bias_ids=table(BIASES_MAX).fill_(_NO_TOKEN),
            biases=torch.zeros((slots, BIASES_MAX), device=device),
            seen=table(limits.vocab_size),
            allowed=table(-(-limits.vocab_size // BITS)),
            words=table(BAD_WORDS_MAX, RECENT).fill_(_NO_TOKEN),
            recent=table(RECENT),
        )

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
            _write(self.state.stops, slots, stops, _NO_TOKEN)
        if changes.rules is not None:
            self._apply_rules(changes.rules)
        for start in range(0, len(changes.places), _PLACES_AT_ONCE):
            end = start + _PLACES_AT_ONCE
            places, blocks = self._staging.upload(
                changes.places[start:end], changes.blocks[start:end]
            )
            self.state.blocks.view(-1).index_copy_(0, places, blocks)

    def _apply_rules(self, changes: RuleChanges) -> None:
        rules = self.rules
        for start in range(0, len(changes.slots), _RULES_AT_ONCE):
            some = slice(start, start + _RULES_AT_ONCE)
            slots, bias_ids, biases, words, recent, allowed = self._staging.upload(
                changes.slots[some],
                changes.bias_ids[some],
                changes.biases[some],
                changes.words[some],
                changes.recent[some],
                changes.allowed[some],
            )
            _write(rules.bias_ids, slots, bias_ids, _NO_TOKEN)
            _write(rules.biases, slots, biases, 0)
            _write(rules.words, slots, words, _NO_TOKEN)
            rules.recent.index_copy_(0, slots, recent)
            rules.allowed.index_copy_(0, slots, allowed)
            rules.seen.index_fill_(0, slots, 0)
        for start in range(0, len(changes.seen), _PLACES_AT_ONCE):
            end = start + _PLACES_AT_ONCE
            places, times = self._staging.upload(
                changes.seen[start:end], changes.seen_times[start:end]
            )
            rules.seen.view(-1).index_copy_(0, places, times)

    def mask(self, slots: IntArray, bits: IndexArray) -> None:
        """What rows with grammars may sample next, after everything launched so far."""
        for start in range(0, len(slots), _RULES_AT_ONCE):
            some = slice(start, start + _RULES_AT_ONCE)
            own, masks = self._staging.upload(slots[some], bits[some])
            self.rules.allowed.index_copy_(0, own, masks)

    def ask(self, step: StepInputs) -> Asked:
        """The rows and tokens of a step, sent to the device."""
        slots, starts, token_ids = self._staging.upload(
            step.slots, step.query_starts.astype(np.int64), step.token_ids
        )
        return Asked(slots=slots, starts=starts, token_ids=token_ids)

    def block_tables(self, asked: Asked) -> Tensor:
        """[layer groups, R, width of a table] int32."""
        return self.state.blocks.index_select(1, asked.slots.clamp_min(0))

    def samples(self, asked: Asked, contexts: Tensor) -> RowSamples:
        """What each row that samples in this step wants of it; `contexts` as of its `RowStep`."""
        return sample_rows(self.state, self.rules, self._wanted, asked.slots, contexts)


def _write(table: Tensor, slots: Tensor, lines: Tensor, nothing: int) -> None:
    """Lines of some rows, as a whole: what is left of longer ones must mean nothing."""
    table.index_fill_(0, slots, nothing)
    table[:, : lines.size(1)].index_copy_(0, slots, lines)


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
    rules = packed_bytes(
        [
            np.zeros(_RULES_AT_ONCE, np.int64),
            np.zeros((2, _RULES_AT_ONCE, BIASES_MAX), np.int32),
            np.zeros((_RULES_AT_ONCE, BAD_WORDS_MAX + 1, RECENT), np.int32),
            np.zeros((_RULES_AT_ONCE, -(-limits.vocab_size // BITS)), np.int32),
        ]
    )
    # Each array may start a little later than the one before ends.
    return max(step, joins, places, rules) + 8 * ALIGN_BYTES
