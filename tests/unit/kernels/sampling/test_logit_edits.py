"""Edits by the formula of the kernel's docstring, in its order, on the rows that ask for them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.sampling.logit_edits import EditTensors, edit_logits

IDS = (
    *("bias_rows", "bias_ids", "seen_rows", "seen_ids"),
    *("forbidden_rows", "forbidden_ids", "allowed_rows", "allowed_ids"),
)


def edits(rows: int, **given: list[float]) -> EditTensors:
    """Empty and neutral but for what is given."""
    base: dict[str, list[float]] = {name: [] for name in (*IDS, "biases", "seen_counts")}
    base |= {"repetition": [1.0] * rows, "presence": [0.0] * rows, "frequency": [0.0] * rows}
    tensors: dict[str, Any] = {
        name: torch.tensor(values, dtype=torch.int64 if name in IDS else torch.float32)
        for name, values in (base | given).items()
    }
    return EditTensors(**tensors)


def edited(logits: list[list[float]], **given: list[float]) -> list[list[float]]:
    tensor = torch.tensor(logits)
    edit_logits(tensor, edits(len(logits), **given))
    return tensor.tolist()


def test_nothing_given_changes_nothing() -> None:
    assert edited([[1.0, -2.0]]) == [[1.0, -2.0]]


def test_the_order_is_bias_repetition_frequency_presence() -> None:
    found = edited(
        [[1.0, 1.0, -1.0, 4.0]],
        bias_rows=[0, 0],
        bias_ids=[0, 1],
        biases=[-2.0, 3.0],
        seen_rows=[0, 0, 0],
        seen_ids=[0, 1, 2],
        seen_counts=[2.0, 0.0, 1.0],
        repetition=[2.0],
        frequency=[0.25],
        presence=[0.5],
    )
    # (1 - 2) * 2 - 2 * 0.25 - 0.5; (1 + 3) / 2, in the prompt only; -1 * 2 - 0.25 - 0.5.
    assert found == [[-3.0, 2.0, -2.75, 4.0]]


def test_what_is_forbidden_stays_so_whatever_the_bias() -> None:
    found = edited(
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]],
        bias_rows=[0],
        bias_ids=[1],
        biases=[100.0],
        forbidden_rows=[0, 0],
        forbidden_ids=[1, 1],
        allowed_rows=[0, 0],
        allowed_ids=[1, 2],
    )
    assert found == [[-math.inf, -math.inf, 2.0], [0.0, 1.0, 2.0]]


def test_an_infinite_logit_stays_one() -> None:
    """A model's own -inf is no number to be raised by a penalty below 1."""
    found = edited(
        [[-math.inf, 3.0]],
        bias_rows=[0],
        bias_ids=[0],
        biases=[100.0],
        seen_rows=[0],
        seen_ids=[0],
        seen_counts=[3.0],
        repetition=[0.5],
        frequency=[-2.0],
    )
    assert found == [[-math.inf, 3.0]]


@pytest.mark.parametrize(
    ("name", "logits", "given"),
    [
        ("logits", torch.zeros(1, 2).double(), {}),
        ("logits", torch.zeros(3, 2).T, {}),
        ("edits", torch.zeros(2, 2), {}),
        ("bias_ids", torch.zeros(1, 2), {"bias_rows": [0]}),
        ("biases", torch.zeros(1, 2), {"bias_rows": [0], "bias_ids": [0]}),
        ("seen_counts", torch.zeros(1, 2), {"seen_rows": [0], "seen_ids": [0]}),
        ("presence", torch.zeros(1, 2), {"presence": [0.0, 0.0]}),
    ],
)
def test_wrong_arguments_are_named(name: str, logits: Tensor, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        edit_logits(logits, edits(1, **given))
