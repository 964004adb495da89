"""A CPU's kernels over pools of more than 2^31 elements: what they say over small ones."""

import torch

from kernels.attention.paged_attention import paged_attention
from kernels.kv.write_kv import write_kv
from tests.unit.kernels.large_pools import moved
from tests.unit.kernels.paged_cases import paged_case


def test_blocks_beyond_what_32_bits_count(path: str, generator: torch.Generator) -> None:
    small = paged_case(
        generator, counts=[1, 5, 20], contexts=[40, 33, 20], head_dim=16, dtype=torch.bfloat16
    )
    large = moved(small)
    table = small.block_tables[0]
    slots = table[:3].long() * small.k_pages.size(2) + 5
    k, v = torch.randn(2, 3, 2, 16, generator=generator).bfloat16()
    write_kv(k, v, small.k_pages, small.v_pages, slots)
    write_kv(k, v, large.case.k_pages, large.case.v_pages, large.slots(slots))
    known, found = (paged_attention(*case.arguments()) for case in (small, large.case))
    # Numbers and no tensors are asserted: who shows one of these reads all of it.
    unlike = (large.back(large.case.k_pages).nan_to_num() != small.k_pages.nan_to_num()).sum()
    assert int(unlike) == 0
    assert int(known.isnan().sum()) == 0
    assert int((found != known).sum()) == 0
