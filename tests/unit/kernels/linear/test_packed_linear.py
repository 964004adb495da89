import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.linear import packed_linear as linear
from kernels.linear.packed_linear import PackedLinear, packing_available
from tests.support.tolerances import linear_exact

PATHS = ["native", "packed", "torch"]
SHAPES = [(24, 40), (64, 192), (80, 257), (768, 1280), (3072, 768), (1536, 2048)]


def make(
    in_features: int, out_features: int, dtype: torch.dtype, path: str, *, has_bias: bool
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if path == "packed" and not packing_available(dtype):
        pytest.skip(f"no oneDNN packing for {dtype} here")
    g = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=g).to(dtype)
    if path == "native" and not (native.build() and native.compiled().has_linear(weight)):
        pytest.skip(f"no compiled linear for {weight.shape} in {dtype} here")
    bias = torch.randn(out_features, generator=g).to(dtype) if has_bias else None
    x = torch.randn(130, in_features, generator=g).to(dtype)
    return PackedLinear(weight, bias, path=path), x, weight, bias


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_result_and_rows(
    in_features: int, out_features: int, dtype: torch.dtype, path: str, has_bias: bool
) -> None:
    """Right, and each row the same bits whatever the number of rows and of threads."""
    torch.set_num_threads(1)
    layer, x, weight, bias = make(in_features, out_features, dtype, path, has_bias=has_bias)
    whole = layer(x)
    out = torch.zeros(131, out_features, dtype=dtype)
    assert torch.equal(layer.into(x, out[:130]), whole)
    assert torch.equal(out[:130], whole)
    assert linear_exact(x, weight, bias).excess(whole) <= 1.0
    for rows in (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64, 129):
        assert torch.equal(layer(x[:rows].contiguous()), whole[:rows]), f"{rows} rows"
    for threads_used in (2, 3):
        torch.set_num_threads(threads_used)
        again = layer(x)
        # F.linear shares a sum out among threads, on some processors.
        assert path == "torch" or torch.equal(again, whole)
        assert torch.equal(layer(x[:1].contiguous()), again[:1])


@pytest.mark.parametrize("threads_used", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [96, 2048])
def test_a_row_among_many_is_the_row_alone(
    in_features: int, dtype: torch.dtype, threads_used: int
) -> None:
    """Many rows are computed in parts, by whichever thread is free; wide ones in blocks of them."""
    layer, x, _, _ = make(in_features, 257, dtype, "native", has_bias=True)
    torch.set_num_threads(threads_used)
    many = x.repeat(5, 1)[:517].contiguous()
    assert torch.equal(layer(many), layer(x).repeat(5, 1)[:517])


@settings(max_examples=30, deadline=None)
@given(
    in_features=st.integers(1, 100),
    out_features=st.integers(1, 100),
    rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_odd_shapes(in_features: int, out_features: int, rows: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows)
    weight = torch.randn(out_features, in_features, generator=g).to(dtype)
    x = torch.randn(rows, in_features, generator=g).to(dtype)
    layer = PackedLinear(weight)
    whole = layer(x)
    assert linear_exact(x, weight, None).excess(whole) <= 1.0
    assert torch.equal(layer(x[:1].contiguous()), whole[:1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_the_weight_is_read_back_as_it_was(
    in_features: int, out_features: int, dtype: torch.dtype, path: str
) -> None:
    layer, _, weight, _ = make(in_features, out_features, dtype, path, has_bias=False)
    assert layer.has_rows == (path != "packed")
    if not layer.has_rows:
        return
    ids = torch.tensor([out_features - 1, 0, 7, 7])
    assert torch.equal(layer.rows(ids), weight[ids])
    for bad in (-1, out_features):
        with pytest.raises(IndexError):
            layer.rows(torch.tensor([0, bad]))


def test_no_rows() -> None:
    assert PackedLinear(torch.ones(5, 3))(torch.ones(0, 3)).shape == (0, 5)


def test_the_unpacked_weight_is_let_go() -> None:
    if not packing_available(torch.float32):
        pytest.skip("no oneDNN packing here")
    weight = torch.ones(64, 64)
    is_alive = weakref.ref(weight)
    layer = PackedLinear(weight)
    del weight
    gc.collect()
    assert is_alive() is None
    assert float(layer(torch.ones(2, 64))[0, 0]) == 64.0


def test_falls_back_when_the_private_operator_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")

    monkeypatch.setattr(native, "library_for", lambda x: None)
    monkeypatch.setattr(linear, "_pack", gone)
    monkeypatch.setattr(linear, "_PACKING_WORKS", {})
    layer = PackedLinear(torch.ones(4, 3))
    assert layer.path == "torch"
    assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 4), 3.0))
    with pytest.raises(ValueError, match=r"^path: "):
        PackedLinear(torch.ones(4, 3), path="packed")


@pytest.mark.parametrize(("bfloat16_s", "is_fast"), [(0.9, True), (1.1, True), (4.0, False)])
def test_where_bfloat16_may_be_emulated_it_is_timed(
    bfloat16_s: float, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN has its operators whether or not the processor has products of bfloat16."""
    times_s = {torch.bfloat16: bfloat16_s, torch.float32: 1.0}
    monkeypatch.setattr(linear, "_PACKING_WORKS", dict.fromkeys(times_s, True))
    monkeypatch.setattr(linear, "_packed_s", times_s.__getitem__)
    native.disable("test")
    try:
        assert linear.is_fast(torch.bfloat16) is is_fast
    finally:
        native.build()


def test_what_is_timed_is_a_linear() -> None:
    if not packing_available(torch.float32):
        pytest.skip("this torch does not pack")
    assert linear._packed_s(torch.float32) > 0


def test_odd_inputs_of_bfloat16_take_the_library(is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    assert not native.compiled().has_linear(torch.ones(8, 7, dtype=torch.bfloat16))
    assert PackedLinear(torch.ones(8, 7, dtype=torch.bfloat16)).path != "native"


def test_a_wrong_operator_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_PACKING_WORKS", {})
    monkeypatch.setattr(linear, "_apply_packed", lambda x, packed, bias: x.new_zeros(3, 32))
    assert not packing_available(torch.float32)


@pytest.mark.parametrize(
    ("name", "weight", "bias", "x"),
    [
        ("weight", torch.ones(3), None, torch.ones(1, 3)),
        ("weight", torch.ones(3, 3).double(), None, torch.ones(1, 3)),
        ("weight", torch.ones(3, 3).half(), None, torch.ones(1, 3).half()),
        ("bias", torch.ones(4, 3), torch.ones(3), torch.ones(1, 3)),
        ("bias", torch.ones(4, 3), torch.ones(4).bfloat16(), torch.ones(1, 3)),
        ("x", torch.ones(4, 3), None, torch.ones(1, 4)),
        ("x", torch.ones(4, 3), None, torch.ones(3)),
        ("x", torch.ones(4, 3), None, torch.ones(1, 3).bfloat16()),
        ("x", torch.ones(4, 3), None, torch.ones(3, 2).T),
    ],
)
def test_bad_arguments_are_named(
    name: str, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        PackedLinear(weight, bias)(x)
