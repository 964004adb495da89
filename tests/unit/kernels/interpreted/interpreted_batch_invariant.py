"""Linears of which a row's bits are its own, and a whole worker of them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.batch.plan_validation import RowLimits
from kernels import jit
from kernels.attention import decode_attention, plan, triton_launch
from kernels.linear import batch_invariant
from kernels.linear.packed_linear import PackedLinear
from tests.support import alike
from tests.support.ahead import Model
from tests.support.random_model import write_random_model
from tests.support.tolerances import linear_exact


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    outputs=st.sampled_from([1, 63, 64, 100]),
    inputs=st.sampled_from([1, 24, 64, 130, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
)
def test_it_is_right_in_as_many_programs_as_there_may_be(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    """A program for each part, or one for them all: the same bits."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    layer = PackedLinear(weight, bias, path="triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_invariant, "PART", 128)
        patch.setattr(jit, "programs", lambda *_: 0)
        whole = layer(x)
        patch.setattr(jit, "programs", lambda *_: 1 << 20)
        apart = layer(x)
        out = torch.zeros(rows + 1, outputs, dtype=dtype)
        assert torch.equal(layer.into(x, out[:rows]), whole)
    exact = linear_exact(x, weight, bias)
    assert exact.excess(whole, truncates=dtype == torch.bfloat16) <= 1.0
    assert torch.equal(apart, whole)
    assert torch.equal(out[:rows], whole)
    assert not out[rows].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_among_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(150, 1100, generator=generator).to(dtype)
    layer = PackedLinear(torch.randn(70, 1100, generator=generator).to(dtype), path="triton")
    whole = layer(x)
    for first, count in ((0, 1), (149, 1), (63, 2), (5, 64), (40, 100)):
        part = x[first : first + count].contiguous()
        assert torch.equal(layer(part), whole[first : first + count])


def test_a_text_is_the_same_alone_in_a_crowd_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of float32, where last bits are seen, tiles of short and long rows are alike; splits are not.
    for module in (plan, triton_launch, decode_attention):
        monkeypatch.setattr(module, "SPLIT", 32)
    limits = RowLimits(
        slots=4, context_tokens=96, step_tokens=128, block_size=4, block_count=96, vocab_size=97
    )
    folder = write_random_model(tmp_path / "model", num_hidden_layers=1)
    model = Model(folder, limits, is_deterministic=True)
    alike.check(limits, model.in_turns)
