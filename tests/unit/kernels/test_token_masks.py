"""token_masks: each path forbids exactly what the masks have no bit for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import native
from kernels.sampling.token_masks import mask_logits, mask_logits_reference

WORD = st.one_of(st.sampled_from([0, -1, 1, -(2**31)]), st.integers(-(2**31), 2**31 - 1))


@given(st.data(), st.integers(1, 200), st.integers(1, 5))
def test_only_what_has_a_bit_is_left(data: st.DataObject, vocab: int, rows: int) -> None:
    assert native.build()
    chosen = data.draw(st.lists(st.integers(0, rows - 1), unique=True))
    words = -(-vocab // 32)
    drawn = data.draw(
        st.lists(
            st.lists(WORD, min_size=words, max_size=words),
            min_size=len(chosen),
            max_size=len(chosen),
        )
    )
    masks = torch.tensor(drawn, dtype=torch.int32).view(len(chosen), words)
    before = torch.randn(rows, vocab)
    expected = before.clone()
    for row, mask in zip(chosen, drawn, strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    for path in (mask_logits, mask_logits_reference):
        found = before.clone()
        path(found, torch.tensor(chosen, dtype=torch.int64), masks)
        assert torch.equal(found, expected)


def test_a_row_that_is_none_is_refused_before_anything_is_written() -> None:
    assert native.build()
    logits = torch.zeros(2, 40)
    with pytest.raises(IndexError, match="rows: 2 must be below 2"):
        mask_logits(logits, torch.tensor([0, 2]), torch.zeros(2, 2, dtype=torch.int32))
    assert not logits.any()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"logits": torch.zeros(2, 40, dtype=torch.float64)}, "logits: must be float32"),
        ({"masks": torch.zeros(1, 1, dtype=torch.int32)}, r"masks: must have shape \[1, 2\]"),
        ({"rows": torch.zeros(1, dtype=torch.int32)}, "rows: must be int64"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, torch.Tensor], rule: str) -> None:
    right = {
        "logits": torch.zeros(2, 40),
        "rows": torch.zeros(1, dtype=torch.int64),
        "masks": torch.zeros(1, 2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=rule):
        mask_logits(**(right | changes))
