import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.linear import linear_int8
from kernels.linear.linear_int4 import CODE_MAX, GROUP, Int4Weight, linear_int4_reference
from kernels.linear.packed_linear import PackedLinear, WeightDtype
from tests.support.tolerances import linear_exact

PATHS = ["native", "torch"]
DTYPES = [torch.float32, torch.bfloat16]
KINDS: list[WeightDtype] = ["int4", "int4_asym"]
# Part of a panel, some panels and a remainder, several parts of the torch path.
SHAPES = [(32, 5), (96, 257), (768, 1280), (2048, 1537)]


def layer_of(
    weight: torch.Tensor, bias: torch.Tensor | None, path: str, kind: WeightDtype
) -> PackedLinear:
    if path == "native" and not (native.build() and native.compiled().has_linear(weight)):
        pytest.skip(f"no compiled linear for {weight.shape} in {weight.dtype} here")
    return PackedLinear(weight, bias, path=path, weight_dtype=kind)


def kept(weight: torch.Tensor, kind: WeightDtype, path: str) -> torch.Tensor:
    """What the layer multiplies with."""
    exact = Int4Weight.of(weight, is_symmetric=kind == "int4").rows(slice(None))
    pairs = path == "native" and native.compiled().instructions().endswith(("-bf16", "-amx"))
    return exact.to(weight.dtype).float() if pairs else exact


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_result_and_rows(
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    path: str,
    kind: WeightDtype,
    has_bias: bool,
) -> None:
    """What the codes say, and each row the same bits whatever the number of rows and threads."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(in_features)
    # Outputs of very different size, not around zero: groups have scales and zeros of their own.
    sizes = torch.logspace(-3, 1, out_features)[:, None]
    weight = ((torch.randn(out_features, in_features, generator=g) + 0.3) * sizes).to(dtype)
    bias = torch.randn(out_features, generator=g).to(dtype) if has_bias else None
    x = torch.randn(66, in_features, generator=g).to(dtype)
    layer = layer_of(weight, bias, path, kind)
    whole = layer(x)
    assert linear_exact(x, kept(weight, kind, path), bias).excess(whole) <= 1.0
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33):
        assert torch.equal(layer(x[:rows].contiguous()), whole[:rows]), f"{rows} rows"
    torch.set_num_threads(2)
    again = layer(x)
    # As in test_linear.py.
    assert path == "torch" or torch.equal(again, whole)
    assert torch.equal(layer(x[:1].contiguous()), again[:1])


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 5),
    out_features=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_what_was_packed_is_what_is_multiplied(
    groups: int, out_features: int, dtype: torch.dtype, kind: WeightDtype, seed: int
) -> None:
    """By rows of one 1 each: every output is a weight, to the bit."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, groups * GROUP, generator=g).to(dtype)
    layer = PackedLinear(weight, weight_dtype=kind)
    found = layer(torch.eye(groups * GROUP, dtype=dtype)).T
    assert torch.equal(found, kept(weight, kind, layer.path).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest(kind: WeightDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    whole = Int4Weight.of(weight, is_symmetric=kind == "int4")
    scales = whole.scales.float().abs().repeat_interleave(GROUP, dim=1)
    error = (whole.rows(slice(None)) - weight).abs() / scales
    # Half a step, but at the ends: a scale is rounded (2^-8 of up to 15 steps), and of symmetric
    # codes 8 are below zero and 7 above.
    assert float(error.max()) <= (1.0 if kind == "int4" else 0.5) + 15 * 2.0**-8
    assert float((error > 0.5 + 2.0**-20).float().mean()) < 0.03
    pairs = whole.codes.view(50, 3, GROUP // 2)
    codes = torch.cat((pairs & CODE_MAX, pairs >> 4), dim=2)
    assert (codes.amin(dim=2) == 0).all()
    # Where a scale is rounded up the other end may fall one short.
    assert kind == "int4" or (codes.amax(dim=2) >= CODE_MAX - 1).all()
    monkeypatch.setattr(linear_int8, "_PART", 200)
    in_parts = Int4Weight.of(weight, is_symmetric=kind == "int4")
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(in_parts, name), getattr(whole, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_groups_of_zeros_tiny_and_not_finite_weights(kind: WeightDtype, path: str) -> None:
    weight = torch.ones(6, 64)
    weight[0] = 0.0
    weight[1] = 1e-45
    weight[2, 1] = torch.inf
    weight[3, 40] = torch.nan
    weight[4] = -1.0
    x = torch.ones(1, 64)
    y = layer_of(weight, None, path, kind)(x)[0]
    reference = linear_int4_reference(x, Int4Weight.of(weight, is_symmetric=kind == "int4"), None)
    assert torch.equal(y.isfinite(), reference[0].isfinite())
    assert y[:2].tolist() == [0.0, 0.0]
    assert not torch.isfinite(y[2:4]).any()
    # A scale of -1/8 is exact, of 1/15 within half a unit of a bfloat16.
    assert y[4:].tolist() == pytest.approx([-64.0, 64.0], rel=0 if kind == "int4" else 2.0**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_points_are_for_weights_that_lie_to_one_side(kind: WeightDtype) -> None:
    g = torch.Generator().manual_seed(1)
    errors = []
    for shift in (0.0, 2.0):
        weight = torch.randn(64, 256, generator=g) + shift
        rows = Int4Weight.of(weight, is_symmetric=kind == "int4").rows(slice(None))
        errors.append(float((rows - weight).norm() / weight.std() / 128))
    # A step of 15 over what 32 of a normal distribution span, about 4.1: 4.1 / 15 / sqrt(12).
    assert errors[0] == pytest.approx(0.08, abs=0.015)
    # Of symmetric codes, as far from 0 as 4.1 and nothing below: half of them are of no use.
    assert errors[1] == pytest.approx(0.15 if kind == "int4" else 0.08, abs=0.02)


def test_a_weight_takes_little_more_than_half_a_byte() -> None:
    for dtype in DTYPES:
        weight = torch.ones(96, 256, dtype=dtype)
        layer = layer_of(weight, None, "native", "int4")
        assert layer.native_weight is not None
        packed, scales = layer.native_weight
        assert scales is None
        # 32 codes, a scale, and of three columns of outputs the zeros: 56 bytes of three groups.
        assert packed.numel() * packed.itemsize == 96 * 256 * 56 / 96


@pytest.mark.parametrize("kind", KINDS)
def test_what_int4_cannot_be(kind: WeightDtype) -> None:
    with pytest.raises(ValueError, match=r"^weight: must have a multiple of 32 inputs for int4"):
        PackedLinear(torch.ones(4, 48), weight_dtype=kind)
    with pytest.raises(ValueError, match=r"^path: packed is not available"):
        PackedLinear(torch.ones(4, 32), path="packed", weight_dtype=kind)
    layer = PackedLinear(torch.ones(4, 32), weight_dtype=kind)
    assert not layer.has_rows
    assert layer.plain is None
