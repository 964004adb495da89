"""rms_norm, rope, gate_mul and write_kv: against their formulas, the same bits row by row."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.kv.write_kv import write_kv
from kernels.norms_rope.gate_mul import gate_mul
from kernels.norms_rope.rms_norm import add_rms_norm, rms_norm
from kernels.norms_rope.rope import rope, rope_table
from tests.support.tolerances import Exact, gamma, gelu_mul_exact, rms_norm_exact, silu_mul_exact

DTYPES = [torch.float32, torch.bfloat16]
LOOSE = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@LOOSE
@given(
    rows=st.integers(0, 9),
    hidden=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_rms_norm(path: str, rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, hidden, generator=g).to(dtype) for _ in range(2))
    weight = torch.rand(hidden, generator=g).to(dtype)

    assert rms_norm_exact(x, weight, 1e-5).excess(rms_norm(x, weight, 1e-5)) <= 1.0
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert rms_norm_exact(total, weight, 1e-5).excess(y) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits(path: str, generator: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(70, 768, generator=generator).to(dtype)
    weight = torch.rand(768, generator=generator).to(dtype)
    normed, gated = rms_norm(x, weight, 1e-6), gate_mul(x)
    for rows in (1, 2, 3, 33):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6), normed[:rows])
        assert torch.equal(gate_mul(x[:rows]), gated[:rows])


def test_norm_of_heads_keeps_its_shape(path: str, generator: torch.Generator) -> None:
    x = torch.randn(3, 4, 16, generator=generator)
    weight = torch.rand(16, generator=generator)
    expected = rms_norm(x.view(12, 16), weight, 1e-6).view(3, 4, 16)
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_norm_of_heads_inside_fused_qkv(path: str, generator: torch.Generator) -> None:
    fused = torch.randn(3, 100, generator=generator)
    view = fused[:, :64].view(3, 4, 16)
    weight = torch.rand(16, generator=generator)
    assert torch.equal(rms_norm(view, weight, 1e-6), rms_norm(view.contiguous(), weight, 1e-6))


@LOOSE
@given(rows=st.integers(0, 9), inner=st.integers(1, 80), dtype=st.sampled_from(DTYPES))
def test_gates(path: str, rows: int, inner: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(inner)
    x = torch.randn(rows, 2 * inner, generator=g).to(dtype)
    assert silu_mul_exact(x).excess(gate_mul(x)) <= 1.0
    assert gelu_mul_exact(x).excess(gate_mul(x, is_gelu=True)) <= 1.0


def test_large_gates(path: str) -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert silu_mul_exact(x).excess(gate_mul(x)) <= 1.0
    assert gelu_mul_exact(x).excess(gate_mul(x, is_gelu=True)) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(8, 4), (64, 32), (80, 40), (64, 16)])
def test_rope(
    path: str, generator: torch.Generator, dtype: torch.dtype, head_dim: int, half: int
) -> None:
    inv_freq = 10000.0 ** -(torch.arange(half) / half)
    cos_sin = rope_table(50, inv_freq, 1.25)
    fused = torch.randn(7, 6 * head_dim + 5, generator=generator).to(dtype)
    before = fused.clone()
    q = fused[:, : 4 * head_dim].view(7, 4, head_dim)
    k = fused[:, 4 * head_dim : 6 * head_dim].view(7, 2, head_dim)
    positions = torch.tensor([0, 1, 49, 7, 7, 30, 2])
    original = torch.cat((q, k), dim=1).double()
    rope(q, k, positions, cos_sin)
    angles = torch.outer(positions.float(), inv_freq).double().unsqueeze(1)
    first, second = original[..., :half], original[..., half : 2 * half]
    expected = original.clone()
    expected[..., :half] = 1.25 * (first * angles.cos() - second * angles.sin())
    expected[..., half : 2 * half] = 1.25 * (second * angles.cos() + first * angles.sin())
    # Of each part: its sine within 2 units in the last place, that times 1.25, a product, a sum.
    slack = torch.zeros_like(original)
    slack[..., : 2 * half] = gamma(8) * 1.25 * (first.abs() + second.abs()).repeat(1, 1, 2)
    assert Exact(value=expected, slack=slack).excess(torch.cat((q, k), dim=1)) <= 1.0
    assert torch.equal(fused[:, 6 * head_dim :], before[:, 6 * head_dim :])


def test_rope_outside_the_table(path: str) -> None:
    q, cos_sin = torch.ones(2, 1, 8), rope_table(4, torch.ones(4))
    with pytest.raises(IndexError):
        rope(q, torch.ones(2, 1, 8), torch.tensor([0, 4]), cos_sin)
    assert torch.equal(q, torch.ones(2, 1, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
def test_write_kv(path: str, generator: torch.Generator, dtype: torch.dtype, tokens: int) -> None:
    blocks, kv_heads, block_size, head_dim = 3, 2, 16, 8
    pages = [torch.full((blocks, kv_heads, block_size, head_dim), 9.0, dtype=dtype) for _ in "kv"]
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[::5] = -1
    fused = torch.randn(tokens, 2 * kv_heads * head_dim + 3, generator=generator).to(dtype)
    k = fused[:, : kv_heads * head_dim].view(tokens, kv_heads, head_dim)
    v = fused[:, kv_heads * head_dim : -3].view(tokens, kv_heads, head_dim)
    write_kv(k, v, pages[0], pages[1], slots)
    for page, x in zip(pages, (k, v), strict=True):
        flat = page.transpose(1, 2).reshape(-1, kv_heads, head_dim)
        written = set()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(flat[slot], x[token])
                written.add(slot)
        untouched = [slot for slot in range(blocks * block_size) if slot not in written]
        assert bool((flat[untouched] == 9.0).all())


def test_write_kv_outside_the_pool(path: str) -> None:
    pages = torch.zeros(2, 1, 4, 8)
    k = torch.ones(2, 1, 8)
    with pytest.raises(IndexError):
        write_kv(k, k, pages, pages.clone(), torch.tensor([0, 8]))
    assert not pages.any()


T8 = rope_table(4, torch.ones(4))
KV = torch.ones(2, 1, 8)
PAGES = torch.zeros(2, 1, 4, 8)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: rms_norm(torch.ones(2, 4).double(), torch.ones(4), 1e-5)),
        ("x", lambda: rms_norm(torch.ones(4, 2).T, torch.ones(4), 1e-5)),
        ("weight", lambda: rms_norm(torch.ones(2, 4), torch.ones(5), 1e-5)),
        ("eps", lambda: rms_norm(torch.ones(2, 4), torch.ones(4), -1.0)),
        ("residual", lambda: add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), 0.1)),
        ("gate_up", lambda: gate_mul(torch.ones(2, 5))),
        ("gate_up", lambda: gate_mul(torch.ones(2, 5), is_gelu=True)),
        ("gate_up", lambda: gate_mul(torch.ones(2, 2, 4))),
        ("k", lambda: rope(torch.ones(2, 1, 8), torch.ones(3, 1, 8), torch.zeros(2).long(), T8)),
        ("positions", lambda: rope(torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.zeros(2), T8)),
        (
            "cos_sin",
            lambda: rope(torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.zeros(2).long(), T8),
        ),
        ("positions_max", lambda: rope_table(0, torch.ones(4))),
        ("slot_mapping", lambda: write_kv(KV, KV, PAGES, PAGES, torch.zeros(3).long())),
        ("slot_mapping", lambda: write_kv(KV, KV, PAGES, PAGES, torch.zeros(2).int())),
        ("v", lambda: write_kv(KV, KV[:1], PAGES, PAGES, torch.zeros(2).long())),
        ("k", lambda: write_kv(KV.bfloat16(), KV, PAGES, PAGES, torch.zeros(2).long())),
        ("v_pages", lambda: write_kv(KV, KV, PAGES, PAGES[:1], torch.zeros(2).long())),
    ],
)
def test_bad_arguments_are_named(name: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        call()
