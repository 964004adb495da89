"""Logit edits: bit for bit as their reference, padding among the entries."""

import pytest
import torch
from torch import Tensor

from kernels.sampling.logit_edits import (
    ENTRIES,
    EditBuffers,
    EditTensors,
    edit_logits,
    edit_logits_reference,
)
from kernels.sampling.sortable_keys import CHUNK

ROWS = 5


def entries(generator: torch.Generator, vocab: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Distinct (row, id), a count for each row, and two entries of padding."""
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = [torch.randperm(vocab, generator=generator)[:count] for count in counts]
    nothing = torch.full((2,), -1)
    return torch.cat([rows, nothing]), torch.cat([*ids, nothing * 1000])


def random_edits(vocab: int, counts: list[int]) -> EditTensors:
    generator = torch.Generator().manual_seed(vocab + sum(counts))
    pairs = {
        kind: entries(generator, vocab, counts[at:] + counts[:at])
        for at, kind in enumerate(("bias", "seen", "forbidden", "allowed"))
    }
    ids = {
        f"{kind}_{part}": value
        for kind, pair in pairs.items()
        for part, value in zip(("rows", "ids"), pair, strict=True)
    }
    return EditTensors(
        **ids,
        biases=torch.randn(len(ids["bias_rows"]), generator=generator) * 5,
        seen_counts=torch.randint(0, 3, (len(ids["seen_rows"]),), generator=generator).float(),
        repetition=torch.rand(ROWS, generator=generator) + 0.5,
        presence=torch.randn(ROWS, generator=generator),
        frequency=torch.randn(ROWS, generator=generator),
    )


@pytest.mark.parametrize(
    ("vocab", "counts"),
    [
        (1, [1, 0, 1, 0, 0]),
        (40, [3, 0, 40, 7, 1]),
        (2 * CHUNK + 3, [ENTRIES, 0, 1, 2 * ENTRIES, 9]),
        (40, [0] * ROWS),
    ],
)
def test_as_the_reference(vocab: int, counts: list[int]) -> None:
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(1))
    # What a row may never sample stays so.
    logits[:, vocab // 2] = -torch.inf
    expected, edits = logits.clone(), random_edits(vocab, counts)
    edit_logits(logits, edits)
    edit_logits_reference(expected, edits)
    assert torch.equal(logits, expected)


def test_buffers_are_left_as_they_were() -> None:
    """So that the next launch, or the same one replayed, starts as this one did."""
    buffers = EditBuffers.of(ROWS, 60, torch.device("cpu"))
    edits = random_edits(40, [3, 0, 40, 7, 1])
    for _ in range(2):
        logits = torch.randn(ROWS, 40, generator=torch.Generator().manual_seed(2))
        expected = logits.clone()
        edit_logits(logits, edits, buffers)
        edit_logits_reference(expected, edits)
        assert torch.equal(logits, expected)
        assert not buffers.marks.any()
    with pytest.raises(ValueError, match=r"^buffers: "):
        edit_logits(logits, edits, EditBuffers.of(ROWS, 5, torch.device("cpu")))
