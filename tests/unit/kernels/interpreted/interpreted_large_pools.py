"""Kernels over pools of more than 2^31 elements: bit for bit what they say over small ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.runner.block_copies import BlockCopies
from kernels.attention.paged_attention import paged_attention
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.kv.write_kv import write_kv
from tests.unit.kernels.interpreted.interpreted_decode import Step, same, step_of
from tests.unit.kernels.large_pools import Moved, beyond, empty_pool, moved
from tests.unit.kernels.paged_cases import PagedCase

# A tile of positions reads several pages, or a part of one.
BLOCK_SIZES = [16, 64]
# One split of short rows, and of long ones.
CONTEXTS = [40, 70, 33]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(31)


@pytest.fixture(params=[False, True], ids=["fp16", "fp8"])
def is_fp8(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def step(generator: torch.Generator, block_size: int, *, is_fp8: bool) -> tuple[Step, Moved]:
    """Of a token a row, over a small pool, and its move to a large one."""
    small = step_of(
        generator, CONTEXTS, is_fp8=is_fp8, heads=4, kv_heads=2, head_dim=16,
        block_size=block_size, dtype=torch.float16,
    )  # fmt: skip
    large = moved(small.case)
    size = large.case.k_pages.numel()
    assert size > beyond(small.case.k_pages.dtype) >= 1 << 31
    return small, large


def agree(small: Step, large: Moved, run: Callable[[Any, Tensor], Tensor | None]) -> None:
    """`run`, of a case and the slots of its tokens, returns and writes the same."""
    known, found = run(small.case, small.slots), run(large.case, large.slots(small.slots))
    before, after = ((case.k_pages, case.v_pages) for case in (small.case, large.case))
    # Numbers and no tensors are asserted: who shows one of these reads all of it.
    unlike = [not same(large.back(b), a) for a, b in zip(before, after, strict=True)]
    assert unlike == [False, False]
    if known is not None and found is not None:
        assert int(known.isnan().sum()) == 0
        assert int((found != known).sum()) == 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_one_token_a_row_in_one_launch(
    generator: torch.Generator, block_size: int, is_fp8: bool
) -> None:
    small, large = step(generator, block_size, is_fp8=is_fp8)
    other = replace(small, case=large.case, slots=large.slots(small.slots))
    found = {id(each.case): each.in_place(each.plan()) for each in (small, other)}
    agree(small, large, lambda case, slots: found[id(case)])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("count", [3, 30], ids=["short", "long"])
def test_attention_alone(
    generator: torch.Generator, block_size: int, count: int, is_fp8: bool
) -> None:
    small, _ = step(generator, block_size, is_fp8=is_fp8)
    rows = len(CONTEXTS)
    starts = torch.arange(rows + 1, dtype=torch.int32) * count
    q = torch.randn(rows * count, 4, 16, generator=generator).half()
    # What their owner would have written.
    pages = [page.nan_to_num() if not is_fp8 else page for page in _pages(small)]
    case = replace(small.case, q=q, query_starts=starts, k_pages=pages[0], v_pages=pages[1])
    small = replace(small, case=case)

    def attend(case: PagedCase, slots: Tensor) -> Tensor:
        return paged_attention(*case.arguments(), scales=small.scales)

    agree(small, moved(case), attend)


def _pages(step: Step) -> tuple[Tensor, Tensor]:
    return step.case.k_pages, step.case.v_pages


@pytest.mark.parametrize("is_turned", [False, True], ids=["alone", "rope_write_kv"])
def test_what_is_written(generator: torch.Generator, is_turned: bool, is_fp8: bool) -> None:
    small, large = step(generator, 16, is_fp8=is_fp8)

    def write(case: Any, slots: Tensor) -> None:
        q, k, v = (each.clone() for each in small.qkv)
        pages = case.k_pages, case.v_pages
        if is_turned:
            rope_write_kv(
                q, k, v, small.positions, small.cos_sin, *pages, slots, scales=small.scales
            )
        else:
            write_kv(k, v, *pages, slots, small.scales)

    agree(small, large, write)


def test_blocks_that_are_copied(generator: torch.Generator) -> None:
    """From either side of 2^31 elements to either side."""
    block = torch.randn(2, 4, 16, generator=generator).half()
    first_beyond = beyond(block.dtype) // block.numel() + 1
    pages = empty_pool(first_beyond + 4, block)[None, None]
    sources, targets = torch.tensor([[1, 1, 2, 2], [3, 1, 2, 3]])
    sources[2:] += first_beyond
    targets[1::2] += first_beyond
    pages[0, 0, sources[0]], pages[0, 0, sources[2]] = block, -block
    with torch.inference_mode():
        BlockCopies(pages).copy(sources, targets)
    found = pages[0, 0, targets]
    assert torch.equal(found, torch.stack([block, block, -block, -block]))
