"""rms_norm, rope, gate_mul, write_kv and the fusion of three of them."""

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.kv.write_kv import write_kv, write_kv_reference
from kernels.norms_rope.gate_mul import gate_mul
from kernels.norms_rope.rms_norm import (
    add_rms_norm,
    add_rms_norm_rows,
    norm_add_rms_norm,
    rms_norm,
    rms_norm_rows,
)
from kernels.norms_rope.rope import rope, rope_table
from tests.support.tolerances import (
    Exact,
    are_one,
    gamma,
    gelu_mul_exact,
    rms_norm_exact,
    rope_exact,
    silu_mul_exact,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(99)


def excess(exact: Exact, result: Tensor) -> float:
    return exact.excess(result, truncates=result.dtype == torch.bfloat16)


def sum_excess(total: Tensor, x: Tensor, residual: Tensor) -> float:
    """Of a sum that is rounded once: float32 holds that of two 16-bit numbers all but exactly."""
    value = x.double() + residual.double()
    return excess(Exact(value=value, slack=gamma(1) * value.abs()), total)


def test_the_interpreter_is_the_path() -> None:
    assert dispatch.path_for(torch.ones(1)) == "triton"


def test_a_forced_path_is_taken_until_it_is_let_go() -> None:
    dispatch.force("torch")
    assert dispatch.path_for(torch.ones(1)) == "torch"
    dispatch.force(None)
    assert dispatch.path_for(torch.ones(1)) == "triton"
    with pytest.raises(ValueError, match=r"^path: "):
        dispatch.force("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (1, 1), (3, 33), (9, 128), (2, 1500)])
def test_rms_norm(generator: torch.Generator, dtype: torch.dtype, rows: int, hidden: int) -> None:
    x, residual = (torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(hidden, generator=generator).to(dtype)
    assert excess(rms_norm_exact(x, weight, 1e-5), rms_norm(x, weight, 1e-5)) <= 1.0
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    assert y.dtype == total.dtype == dtype
    assert sum_excess(total, x, residual) <= 1.0
    assert excess(rms_norm_exact(total, weight, 1e-5), y) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (3, 33), (2, 1500)])
def test_a_branch_is_normed_before_it_is_added(
    generator: torch.Generator, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    """Bit for bit as the two launches that it is."""
    x, residual = (torch.randn(rows, hidden, generator=generator).to(dtype) for _ in range(2))
    first, weight = (torch.rand(hidden, generator=generator).to(dtype) for _ in range(2))
    normed = rms_norm(x, first, 1e-5)
    for own, apart in zip(
        norm_add_rms_norm(x, residual, first, weight, 1e-5),
        add_rms_norm(normed, residual, weight, 1e-5),
        strict=True,
    ):
        assert are_one(own, apart)
    total = norm_add_rms_norm(x, residual, first, None, 1e-5)
    assert are_one(total[1], add_rms_norm(normed, residual, first, 1e-5)[1])
    assert torch.equal(*total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (1, 1), (5, 33), (3, 1500)])
def test_rms_norm_of_some_rows(
    generator: torch.Generator, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    x, residual = (torch.randn(7, hidden, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(hidden, generator=generator).to(dtype)
    ids = torch.randint(0, 7, (rows,), generator=generator)
    y, found = rms_norm_rows(x, ids, weight, 1e-5)
    assert torch.equal(found, x[ids])
    # Bit for bit what the whole would have.
    assert torch.equal(y, rms_norm(x, weight, 1e-5)[ids])
    y = add_rms_norm_rows(x, residual, ids, weight, 1e-5)
    assert torch.equal(y, add_rms_norm(x, residual, weight, 1e-5)[0][ids])


def test_ids_outside_read_nothing(generator: torch.Generator) -> None:
    x, weight = torch.randn(3, 8, generator=generator), torch.ones(8)
    y, found = rms_norm_rows(x, torch.tensor([3, 1, -1]), weight, 1e-5)
    assert not found[[0, 2]].any()
    assert not y[[0, 2]].any()
    assert torch.equal(found[1], x[1])


def test_bad_rows_are_named(generator: torch.Generator) -> None:
    x, weight = torch.randn(3, 8, generator=generator), torch.ones(8)
    with pytest.raises(ValueError, match=r"^ids: "):
        rms_norm_rows(x, torch.tensor([1], dtype=torch.int32), weight, 1e-5)
    with pytest.raises(ValueError, match=r"^x: "):
        rms_norm_rows(x[None], torch.tensor([0]), weight, 1e-5)
    with pytest.raises(ValueError, match=r"^residual: "):
        add_rms_norm_rows(x, x[:2], torch.tensor([0]), weight, 1e-5)


@pytest.mark.parametrize("head_dim", [16, 80])
def test_norm_of_heads_inside_fused_qkv(generator: torch.Generator, head_dim: int) -> None:
    fused = torch.randn(5, 7 * head_dim + 3, generator=generator)
    heads = fused[:, head_dim : 6 * head_dim].view(5, 5, head_dim)
    weight = torch.rand(head_dim, generator=generator)
    for x in (heads, heads[:, 0]):
        assert excess(rms_norm_exact(x, weight, 1e-6), rms_norm(x, weight, 1e-6)) <= 1.0


# Where the exponential is infinite, as it should be; only numpy says so.
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@OVERFLOWS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "inner"), [(0, 4), (1, 1), (3, 33), (2, 2049)])
def test_gates(generator: torch.Generator, dtype: torch.dtype, tokens: int, inner: int) -> None:
    gate_up = (torch.randn(tokens, 2 * inner, generator=generator) * 3).to(dtype)
    assert excess(silu_mul_exact(gate_up), gate_mul(gate_up)) <= 1.0
    assert excess(gelu_mul_exact(gate_up), gate_mul(gate_up, is_gelu=True)) <= 1.0


@OVERFLOWS
def test_large_gates() -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert excess(silu_mul_exact(x), gate_mul(x)) <= 1.0
    assert excess(gelu_mul_exact(x), gate_mul(x, is_gelu=True)) <= 1.0


class Step:
    """q, k and v as views of one projection, padding between the slots, and marked pages."""

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        half: int,
        tokens: int = 4,
        block_size: int = 4,
    ) -> None:
        width = heads + 2 * kv_heads
        wide = torch.randn(tokens, width * head_dim + 5, generator=generator).to(dtype)
        self.qkv = wide[:, : width * head_dim].view(tokens, width, head_dim)
        self.cut(heads, kv_heads)
        self.positions = torch.tensor([0, 9, 3, 3])[:tokens]
        self.cos_sin = rope_table(10, torch.rand(half, generator=generator), 1.25)
        shape = (3, kv_heads, block_size, head_dim)
        self.k_pages, self.v_pages = (torch.full(shape, 7.0, dtype=dtype) for _ in range(2))
        self.slots = torch.tensor([5, -1, 3 * block_size - 1, 0])[:tokens]
        self.norms = [torch.rand(head_dim, generator=generator).to(dtype) for _ in range(2)]

    def cut(self, heads: int, kv_heads: int) -> None:
        self.q, self.k = self.qkv[:, :heads], self.qkv[:, heads : heads + kv_heads]
        self.v = self.qkv[:, heads + kv_heads :]

    def copy(self) -> "Step":
        other = object.__new__(Step)
        other.__dict__.update({**self.__dict__, "qkv": self.qkv.clone()})
        other.cut(self.q.size(1), self.k.size(1))
        other.k_pages, other.v_pages = self.k_pages.clone(), self.v_pages.clone()
        return other


# heads, kv_heads, head_dim, half: whole tiles and not, all dimensions rotated and not.
SHAPES = [
    (torch.float32, 3, 2, 16, 8),
    (torch.float32, 9, 3, 80, 40),
    (torch.float32, 4, 4, 24, 8),
    (torch.bfloat16, 7, 1, 64, 32),
    (torch.float16, 10, 9, 8, 4),
]


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "half"), SHAPES)
def test_rope_and_write_kv(
    generator: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
) -> None:
    step = Step(generator, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, half=half)
    other = step.copy()
    rope(step.q, step.k, step.positions, step.cos_sin)
    for own, before in ((step.q, other.q), (step.k, other.k)):
        assert excess(rope_exact(before, step.positions, step.cos_sin), own) <= 1.0
    assert torch.equal(step.v, other.v)
    write_kv(step.k, step.v, step.k_pages, step.v_pages, step.slots)
    write_kv_reference(step.k, step.v, other.k_pages, other.v_pages, step.slots)
    assert torch.equal(step.k_pages, other.k_pages)
    assert torch.equal(step.v_pages, other.v_pages)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "half"), SHAPES)
def test_fused(
    generator: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
    is_normed: bool,
) -> None:
    step = Step(generator, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, half=half)
    other = step.copy()
    q_norm, k_norm = step.norms if is_normed else (None, None)
    fused = rope_write_kv(
        step.q, step.k, step.v, step.positions, step.cos_sin, step.k_pages, step.v_pages,
        step.slots, q_norm, k_norm, eps=1e-6,
    )  # fmt: skip
    truncates = dtype == torch.bfloat16
    for before, norm, result in ((other.q, q_norm, fused), (other.k, k_norm, step.k)):
        exact = rope_exact(
            before, step.positions, step.cos_sin,
            None if norm is None else (norm, 1e-6), truncates=truncates,
        )  # fmt: skip
        assert excess(exact, result) <= 1.0
    assert torch.equal(step.v, other.v)
    # What the projection keeps of its keys is what the pages hold.
    write_kv_reference(step.k, other.v, other.k_pages, other.v_pages, other.slots)
    assert torch.equal(step.k_pages, other.k_pages)
    assert torch.equal(step.v_pages, other.v_pages)


def test_what_is_outside_is_left_alone(generator: torch.Generator) -> None:
    """A GPU cannot raise: a bad position is not rotated, a bad slot not written."""
    step = Step(generator, torch.float32, heads=2, kv_heads=1, head_dim=8, half=4)
    step.slots, step.positions = torch.tensor([12, 1 << 40, -5, -1]), torch.tensor([10, -1, 99, 10])
    before = step.copy()
    rope(step.q, step.k, step.positions, step.cos_sin)
    write_kv(step.k, step.v, step.k_pages, step.v_pages, step.slots)
    arguments = step.positions, step.cos_sin, step.k_pages, step.v_pages, step.slots
    assert rope_write_kv(step.q, step.k, step.v, *arguments) is step.q
    assert torch.equal(step.qkv, before.qkv)
    assert bool((step.k_pages == 7.0).all())
    assert bool((step.v_pages == 7.0).all())


def test_no_tokens(generator: torch.Generator) -> None:
    step = Step(generator, torch.float32, heads=2, kv_heads=1, head_dim=8, half=4, tokens=0)
    rope(step.q, step.k, step.positions, step.cos_sin)
    arguments = step.positions, step.cos_sin, step.k_pages, step.v_pages, step.slots
    assert rope_write_kv(step.q, step.k, step.v, *arguments).shape == (0, 2, 8)
    assert bool((step.k_pages == 7.0).all())


def test_one_norm_alone_is_refused(generator: torch.Generator) -> None:
    step = Step(generator, torch.float32, heads=2, kv_heads=1, head_dim=8, half=4)
    arguments = step.positions, step.cos_sin, step.k_pages, step.v_pages, step.slots
    with pytest.raises(ValueError, match=r"^k_norm: "):
        rope_write_kv(step.q, step.k, step.v, *arguments, q_norm=step.norms[0])
