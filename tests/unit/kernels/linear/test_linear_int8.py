import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.linear import linear_int8
from kernels.linear.linear_int8 import Int8Weight, linear_int8_reference
from kernels.linear.packed_linear import PackedLinear, linear_reference
from tests.support.tolerances import linear_exact

PATHS = ["native", "torch"]
DTYPES = [torch.float32, torch.bfloat16]
# One part of the torch path, and several with a remainder.
SHAPES = [(24, 40), (80, 257), (768, 1280), (3072, 768), (2048, 1537)]


def make(
    in_features: int, out_features: int, dtype: torch.dtype, path: str, *, has_bias: bool
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(in_features)
    # Outputs of very different size: each has a scale of its own.
    sizes = torch.logspace(-3, 1, out_features)[:, None]
    weight = (torch.randn(out_features, in_features, generator=g) * sizes).to(dtype)
    if path == "native" and not (native.build() and native.compiled().has_linear(weight)):
        pytest.skip(f"no compiled linear for {weight.shape} in {dtype} here")
    bias = torch.randn(out_features, generator=g).to(dtype) if has_bias else None
    x = torch.randn(130, in_features, generator=g).to(dtype)
    return PackedLinear(weight, bias, path=path, weight_dtype="int8"), x, weight, bias


def int8_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantised = Int8Weight.of(weight)
    return quantised.codes, quantised.scales


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_result_and_rows(
    in_features: int, out_features: int, dtype: torch.dtype, path: str, has_bias: bool
) -> None:
    """What the codes say, and each row the same bits whatever the number of rows and threads."""
    torch.set_num_threads(1)
    layer, x, weight, bias = make(in_features, out_features, dtype, path, has_bias=has_bias)
    whole = layer(x)
    codes, scales = int8_of(weight)
    assert linear_exact(x, codes, bias, scales).excess(whole) <= 1.0
    for rows in (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64, 129):
        assert torch.equal(layer(x[:rows].contiguous()), whole[:rows]), f"{rows} rows"
    for threads_used in (2, 3):
        torch.set_num_threads(threads_used)
        again = layer(x)
        # As in test_linear.py.
        assert path == "torch" or torch.equal(again, whole)
        assert torch.equal(layer(x[:1].contiguous()), again[:1])


@settings(max_examples=30, deadline=None)
@given(
    in_features=st.integers(1, 100),
    out_features=st.integers(1, 100),
    rows=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_odd_shapes(in_features: int, out_features: int, rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    weight = torch.randn(out_features, in_features, generator=g).to(dtype)
    x = torch.randn(rows, in_features, generator=g).to(dtype)
    layer = PackedLinear(weight, weight_dtype="int8")
    whole = layer(x)
    codes, scales = int8_of(weight)
    assert linear_exact(x, codes, None, scales).excess(whole) <= 1.0
    assert torch.equal(layer(x[:1].contiguous()), whole[:1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_the_codes_are_read_back_as_weights(
    in_features: int, out_features: int, dtype: torch.dtype, path: str
) -> None:
    layer, _, weight, _ = make(in_features, out_features, dtype, path, has_bias=False)
    assert layer.has_rows
    ids = torch.tensor([out_features - 1, 0, 7, 7])
    assert torch.equal(layer.rows(ids), Int8Weight.of(weight).rows(ids).to(dtype))
    for bad in (-1, out_features):
        with pytest.raises(IndexError):
            layer.rows(torch.tensor([0, bad]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = Int8Weight.of(weight)
    assert torch.equal(whole.codes.abs().amax(dim=1), torch.full((50,), 127, dtype=torch.int8))
    error = (whole.rows(torch.arange(50)) - weight.float()).abs()
    # Half a step, and the roundings of scale and product: 2^-24 each of at most 127 steps.
    assert bool((error <= whole.scales[:, None] * (0.5 + 127 * 2.0**-23)).all())
    monkeypatch.setattr(linear_int8, "_PART", 70)
    in_parts = Int8Weight.of(weight)
    assert torch.equal(in_parts.codes, whole.codes)
    assert torch.equal(in_parts.scales, whole.scales)


def test_outputs_of_zeros_tiny_and_not_finite_weights() -> None:
    weight = torch.ones(5, 4)
    weight[0] = 0.0
    weight[1] = 1e-45
    weight[2, 1] = torch.inf
    weight[3, 2] = torch.nan
    quantised = Int8Weight.of(weight)
    y = linear_int8_reference(torch.ones(1, 4), quantised, None)[0]
    assert y[:2].tolist() == [0.0, 0.0]
    assert not torch.isfinite(y[2:4]).any()
    assert linear_exact(torch.ones(1, 4), weight[4:], None).excess(y[None, 4:]) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_stands_in_for_the_float_layer(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    weight, x = torch.randn(300, 256, generator=g).to(dtype), torch.randn(9, 256, generator=g)
    y = PackedLinear(weight, weight_dtype="int8")(x.to(dtype)).float()
    exact = linear_reference(x.to(dtype), weight, None).float()
    # Errors of a code are even in a step of largest / 127, about 3.5 / 127 here: 0.008 of the
    # weights' standard deviation each, so of the sums'; bfloat16 adds its 2^-9.
    assert float((y - exact).norm() / exact.norm()) < 0.012


def test_the_matrix_library_has_no_int8() -> None:
    with pytest.raises(ValueError, match=r"^path: packed is not available"):
        PackedLinear(torch.ones(4, 3), path="packed", weight_dtype="int8")
