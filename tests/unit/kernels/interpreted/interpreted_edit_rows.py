"""edit_rows: as its reference, and as the entries that a host would send for the same rules."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.row_rules import RowRules, rule_changes
from gpu_worker.batch.step_types import FLOAT_COLUMNS, INT_COLUMNS, RowChanges
from gpu_worker.runner.device_rows import DeviceRows, staging_bytes
from gpu_worker.runner.device_streams import streams_for
from gpu_worker.runner.staging import Staging
from kernels.rows.edit_rows import edit_rows, edit_rows_reference
from kernels.sampling.edited_rows import EditedRows, sampled_logits
from kernels.sampling.sortable_keys import CHUNK
from tests.support.mini_scheduler import sampling
from tests.support.tolerances import are_one

PROMPT = (3, 5, 3)
OUTPUT = (7, 8, 7, 8, 9, 1) * 7
KNOWN = len(PROMPT) + len(OUTPUT)
RULES: dict[int, dict[str, Any]] = {
    0: {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.4},
    1: {"logit_bias": ((9, 1.5), (1, -3.0)), "bad_words": ((4,), (9, 1, 6), (2, 1, 5))},
    2: {"allowed_token_ids": (1, 33, 36)},
    3: {
        "repetition_penalty": 0.7,
        "logit_bias": ((7, 4.0),),
        "allowed_token_ids": tuple(range(0, 40, 3)),
        "bad_words": ((*OUTPUT[-31:], 12), (*OUTPUT[-30:], 15), (3, *OUTPUT[:2], 18)),
    },
    5: {"presence_penalty": 0.5},
}
# What a host would have found, by hand: bad words that the rows' last tokens begin.
FORBIDDEN = {1: {4, 6}, 3: {12, 15}, 4: {2, 11}}
SLOTS = 6


def device_rows(vocab: int) -> DeviceRows:
    """Slot 4 has no rules, and masked stops."""
    limits = RowLimits(
        slots=SLOTS, context_tokens=64, step_tokens=8, block_size=4, block_count=8, vocab_size=vocab
    )
    tokens = (*PROMPT, *OUTPUT)
    streams = streams_for(torch.empty(0).device)
    rows = DeviceRows(limits, Staging(streams, staging_bytes(limits)), streams.device)
    rules = {
        slot: RowRules(sampling(**asked), tokens, len(PROMPT), vocab)
        for slot, asked in RULES.items()
    }
    ints = dict.fromkeys(INT_COLUMNS, np.zeros(SLOTS, np.int64))
    ints["num_tokens"] = np.full(SLOTS, KNOWN)
    ints["prompt"] = np.full(SLOTS, len(PROMPT))
    ints["masked_until"] = np.where(np.arange(SLOTS) == 4, KNOWN + 1, KNOWN)
    ints["kinds"] = np.array([rules[slot].kinds if slot in rules else 0 for slot in range(SLOTS)])
    floats = {name: np.ones(SLOTS, np.float32) for name in FLOAT_COLUMNS}
    for slot, own in rules.items():
        for name in ("repetition", "presence", "frequency"):
            floats[name][slot] = getattr(own, name)
    with streams.computing():
        rows.apply(
            RowChanges(
                slots=np.arange(SLOTS),
                ints=np.stack([ints[name] for name in INT_COLUMNS]),
                floats=np.stack([floats[name] for name in FLOAT_COLUMNS]),
                stops=np.full((SLOTS, 2), (2, 11), np.int32),
                places=np.zeros(0, np.int64),
                blocks=np.zeros(0, np.int32),
                rules=rule_changes(rules, lambda slot: tokens, vocab),
            )
        )
    streams.finish()
    return rows


@pytest.mark.parametrize("vocab", [40, CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_the_reference(vocab: int, dtype: torch.dtype) -> None:
    rows = device_rows(vocab)
    slots = torch.tensor([3, -1, 0, 1, 5, 4, 2])
    before = torch.randn(len(slots), vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = before.clone()
    edited, known = (EditedRows.of(len(slots), vocab, before.device) for _ in range(2))
    # Of a step before.
    edited.is_edited.fill_(1)
    edit_rows(logits, edited, rows.state, rows.rules, slots)
    edit_rows_reference(logits, known, rows.state, rows.rules, slots)
    assert are_one(edited.logits, known.logits)
    assert edited.is_edited.tolist() == known.is_edited.tolist() == [1, 0, 1, 1, 1, 1, 1]
    # The model's own stay, of which log-probabilities are; who samples nothing has no rules.
    assert torch.equal(logits, before)
    found = sampled_logits(logits, edited)
    assert torch.equal(found[1], before[1].float())
    for row, slot in enumerate(slots.tolist()):
        forbidden = set(torch.isinf(found[row]).nonzero().flatten().tolist())
        if allowed := RULES.get(slot, {}).get("allowed_token_ids"):
            assert forbidden == set(range(vocab)) - set(allowed) | FORBIDDEN.get(slot, set())
        else:
            assert forbidden == FORBIDDEN.get(slot, set())


@pytest.mark.parametrize("slot", range(SLOTS))
def test_alone_as_among_others(slot: int) -> None:
    """Then more programs share a row's chunks, and each applies what is of its own."""
    vocab = 5 * CHUNK + 3
    rows, crowd = device_rows(vocab), torch.arange(SLOTS)
    logits = torch.randn(SLOTS, vocab, generator=torch.Generator().manual_seed(3)).bfloat16()
    together = EditedRows.of(SLOTS, vocab, logits.device)
    edit_rows(logits, together, rows.state, rows.rules, crowd)
    own, edited = slice(slot, slot + 1), EditedRows.of(1, vocab, logits.device)
    edit_rows(logits[own], edited, rows.state, rows.rules, crowd[own])
    assert edited.is_edited.tolist() == [1]
    assert torch.equal(edited.logits, together.logits[own])


def test_rows_without_rules_are_not_written() -> None:
    """Slot 4 has none once it knows enough tokens for its stops."""
    rows = device_rows(40)
    rows.state.masked_until.zero_()
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    edited = EditedRows.of(2, 40, logits.device)
    edit_rows(logits, edited, rows.state, rows.rules, torch.tensor([4, 5]))
    assert edited.is_edited.tolist() == [0, 1]
    assert not edited.logits[0].any()
