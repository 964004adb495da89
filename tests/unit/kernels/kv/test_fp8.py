"""fp8 pages on the CPU: the definition against the formula, and what it costs in accuracy."""

import dataclasses

import pytest
import torch

from kernels.attention.paged_attention import paged_attention
from kernels.kv import fp8
from kernels.kv.write_kv import write_kv
from tests.unit.kernels.paged_cases import PagedCase, dense_attention, paged_case

# No number of a normal distribution is beyond the least: 448 * 0.0125.
SCALES = torch.tensor([[0.0125, 0.02], [0.015, 0.03]])


def written(case: PagedCase) -> PagedCase:
    """The same step over pages of codes."""
    pages = torch.zeros(2, *case.k_pages.shape).to(fp8.DTYPE)
    blocks, kv_heads, block_size, head_dim = case.k_pages.shape
    tokens = [
        page.transpose(1, 2).reshape(blocks * block_size, kv_heads, head_dim)
        for page in (case.k_pages, case.v_pages)
    ]
    write_kv(tokens[0], tokens[1], pages[0], pages[1], torch.arange(blocks * block_size), SCALES)
    return dataclasses.replace(case, k_pages=pages[0], v_pages=pages[1])


def excess_of(narrow: PagedCase, result: torch.Tensor) -> float:
    """Of pages of codes every path computes in float32."""
    pages = (narrow.k_pages, narrow.v_pages)
    read = [page.float() * scale[:, None, None] for page, scale in zip(pages, SCALES, strict=True)]
    wide = dataclasses.replace(narrow, k_pages=read[0], v_pages=read[1])
    return dense_attention(wide, torch.float32).excess(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_what_was_written(
    path: str, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Whatever CPU path the worker is on; its compiled one knows no fp8 and makes way."""
    case = paged_case(generator, counts=[2, 1, 0], contexts=[35, 16, 3], dtype=dtype)
    narrow = written(case)
    result = paged_attention(*narrow.arguments(), scales=SCALES)
    assert excess_of(narrow, result) <= 1.0
    # Every weight and value is off by at most 2^-4 of itself, about a third of it on average.
    whole = dense_attention(case, dtype).value
    assert float((result - whole).norm() / whole.norm()) < 2.0**-4


@pytest.mark.parametrize(("window", "softcap"), [(7, None), (20, 5.0), (None, 5.0)])
def test_windows_and_caps_over_what_was_written(
    path: str, generator: torch.Generator, window: int | None, softcap: float | None
) -> None:
    case = paged_case(
        generator, counts=[2, 1, 0], contexts=[35, 16, 3], window=window, softcap=softcap
    )
    narrow = written(case)
    result = paged_attention(*narrow.arguments(), scales=SCALES, **narrow.options())
    assert excess_of(narrow, result) <= 1.0


def test_codes_round_to_the_nearest_and_saturate() -> None:
    x = torch.tensor([[1.0, 1.0625, 1.1875, 500.0, -1e9, float("nan"), 2.0**-10, 0.003]])
    expected = [1.0, 1.0, 1.25, 448.0, -448.0, 448.0, 0.0, 2.0**-8]
    assert fp8.encode(x, torch.ones(1)).float().tolist() == [expected]


def test_scales_and_pages_come_together(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1], contexts=[5])
    with pytest.raises(ValueError, match=r"^scales: "):
        paged_attention(*case.arguments(), scales=torch.ones(2, 2))
