"""Keys and values in fp8: written byte for byte as the reference, read within its rounding."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kernels.attention.paged_attention import paged_attention, paged_attention_reference
from kernels.attention.plan import SPLIT
from kernels.kv import fp8
from kernels.kv.rope_write_kv import rope_write_kv, rope_write_kv_reference
from kernels.kv.write_kv import write_kv, write_kv_reference
from kernels.norms_rope.rope import rope_table
from tests.support.tolerances import rope_exact
from tests.unit.kernels.paged_cases import PagedCase, excess_over, paged_case, widened


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(77)


def awkward(generator: torch.Generator) -> Tensor:
    """[tokens, 2, 80]: every code, what lies halfway between two, ends, and no numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.DTYPE).float().nan_to_num()
    ordered = codes.sort().values
    halfway = (ordered[1:] + ordered[:-1]) / 2
    ends = torch.tensor([448.0, 449.0, 464.0, 1e30, math.inf, math.nan, -math.inf, 2.0**-10, 0.0])
    size = 2.0 ** torch.randint(-14, 10, (500,), generator=generator)
    some = torch.randn(500, generator=generator) * size
    values = torch.cat([codes, halfway, ends, -ends, some])
    return torch.nn.functional.pad(values, (0, -len(values) % 160)).view(-1, 2, 80)


def bytes_of(*pages: Tensor) -> list[Tensor]:
    return [page.view(torch.uint8) for page in pages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_number_is_written_as_the_reference_does(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    k = awkward(generator).to(dtype)
    v, tokens = k.flip(0), len(k)
    pages = torch.zeros(4, 3, 2, 4, 80).to(fp8.DTYPE)
    slots = torch.arange(tokens)
    slots[1] = -1
    scales = torch.tensor([[1.0, 0.3], [2.0, 0.01]])
    write_kv(k, v, pages[0], pages[1], slots, scales)
    write_kv_reference(k, v, pages[2], pages[3], slots, scales)
    own, known = bytes_of(pages[:2], pages[2:])
    assert torch.equal(own, known)
    assert not pages[0].float().isnan().any()


def test_the_error_of_a_code_is_bounded(generator: torch.Generator) -> None:
    x = torch.randn(4000, 2, 8, generator=generator) * 3
    scale = torch.tensor([0.05, 1.0])
    error = (fp8.decode(fp8.encode(x, scale).transpose(0, 1), scale).transpose(0, 1) - x).abs()
    bound = torch.maximum(x.abs() / 16, scale.view(2, 1) / 1024)
    assert bool((error <= bound * 1.0001)[x.abs() <= 448 * scale.view(2, 1)].all())


@pytest.mark.parametrize("is_normed", [False, True])
def test_fused(generator: torch.Generator, is_normed: bool) -> None:
    tokens, heads, kv_heads, head_dim = 4, 5, 2, 24
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
    pages = torch.zeros(4, 3, kv_heads, 4, head_dim).to(fp8.DTYPE)
    scales = torch.tensor([[0.01, 0.02], [0.03, 0.005]])
    slots, positions = torch.tensor([5, -1, 11, 0]), torch.tensor([0, 9, 3, 3])
    cos_sin = rope_table(10, torch.rand(8, generator=generator), 1.25)
    norms = [torch.rand(head_dim, generator=generator) for _ in range(2)]
    q_norm, k_norm = norms if is_normed else (None, None)
    queries = []
    for each, path in enumerate((rope_write_kv, rope_write_kv_reference)):
        own = qkv.clone()
        q, k, v = own[:, :heads], own[:, heads : heads + kv_heads], own[:, heads + kv_heads :]
        arguments = q, k, v, positions, cos_sin, pages[2 * each], pages[2 * each + 1], slots
        queries.append(path(*arguments, q_norm, k_norm, 1e-6, scales))
    norm = None if q_norm is None else (q_norm, 1e-6)
    assert rope_exact(qkv[:, :heads], positions, cos_sin, norm).excess(queries[0]) <= 1.0
    own, known = bytes_of(pages[1], pages[3])
    assert torch.equal(own, known)
    # Keys a unit in the last place apart may fall to both sides of a border between codes.
    codes = [page.int() for page in bytes_of(pages[0], pages[2])]
    assert int((codes[0] - codes[1]).abs().max()) <= 1
    assert int((codes[0] != codes[1]).sum()) <= 2


def quantised(case: PagedCase, scales: Tensor) -> PagedCase:
    """The same step over fp8 pages; places that nobody owns hold anything."""
    pages = [
        fp8.encode(page.float().transpose(1, 2), scale).transpose(1, 2).contiguous()
        for page, scale in zip((case.k_pages, case.v_pages), scales, strict=True)
    ]
    return dataclasses.replace(case, k_pages=pages[0], v_pages=pages[1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "window", "softcap"),
    [
        (4, 2, 64, torch.float32, None, None),
        (7, 1, 80, torch.bfloat16, None, None),
        (8, 2, 128, torch.float16, None, None),
        (8, 2, 128, torch.float16, 20, None),
        (4, 2, 64, torch.bfloat16, 20, 5.0),
    ],
)
def test_attention_reads_it(
    generator: torch.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    case = paged_case(
        generator,
        counts=[1, 0, 3, 30, 1],
        contexts=[1, 9, 19, 33, SPLIT + 3],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    # No number of a normal distribution is beyond the least: 448 * 0.0125.
    scales = torch.tensor([[0.015, 0.03], [0.02, 0.0125]])[:, :kv_heads].contiguous()
    narrow = quantised(case, scales)
    result = paged_attention(*narrow.arguments(), scales=scales, **narrow.options())
    assert result.dtype == dtype
    assert excess_over(widened(narrow, scales), result) <= 1.0
    # And beside the same step unrounded: weights and values are off by 2^-5 of themselves, on
    # average 2^-6 or less, and mixing averages; 2^-4 of the result's size is far too much.
    whole = paged_attention_reference(*case.arguments(), **case.options()).float()
    assert float((result.float() - whole).norm() / whole.norm()) < 2.0**-4


def test_scales_and_pages_come_together(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1], contexts=[5])
    scales = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^scales: "):
        paged_attention(*case.arguments(), scales=scales)
    narrow = quantised(case, scales)
    with pytest.raises(ValueError, match=r"^scales: "):
        paged_attention(*narrow.arguments())
    with pytest.raises(ValueError, match=r"^scales: "):
        paged_attention(*narrow.arguments(), scales=scales[:, :1])
