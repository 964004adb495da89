"""Chunks of prompts: keys read where the step computed them, splits of long rows, their parts."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import jit
from kernels.attention import plan as attention_plan
from kernels.attention import triton_launch
from kernels.attention.paged_attention import paged_attention
from kernels.attention.parts import Parts
from kernels.attention.plan import AttentionPlan, parts_size, plan_attention, with_parts
from kernels.attention.plan_reference import short_splits as count_splits
from kernels.attention.triton_kernels import combine_kernel
from kernels.kv import fp8
from tests.unit.kernels.paged_cases import PagedCase, excess_over, paged_case, widened

# Long rows in splits of so many positions are as long rows of 8192, and a hundred times quicker.
SHORT_SPLIT = 128
Own = tuple[Tensor, Tensor]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4321)


@pytest.fixture(params=["sm_90", "elsewhere"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that all see without masks, and all with."""
    if request.param == "elsewhere":
        monkeypatch.setattr(jit, "arch_elsewhere", 80)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    split_every(SHORT_SPLIT, monkeypatch)


def split_every(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_plan, triton_launch):
        monkeypatch.setattr(module, "LONG_SPLIT", positions)


def own_of(case: PagedCase) -> Own:
    """Keys and values of the step's tokens, among others as in a projection."""
    kv_heads, block_size, head_dim = case.k_pages.shape[1:]
    starts = case.query_starts.tolist()
    tensors = []
    for pages in (case.k_pages, case.v_pages):
        fused = torch.zeros(len(case.q), kv_heads + 3, head_dim, dtype=case.q.dtype)
        for row, context in enumerate(case.context_lengths.tolist()):
            count = starts[row + 1] - starts[row]
            at = torch.arange(context - count, context)
            blocks = case.block_tables[row].long()[at // block_size]
            fused[starts[row] : starts[row + 1], 2:-1] = pages[blocks, :, at % block_size]
        tensors.append(fused[:, 2:-1])
    return tensors[0], tensors[1]


def plan_of(case: PagedCase, *, has_parts: bool = True) -> AttentionPlan:
    _, heads, head_dim = case.q.shape
    kv_heads = case.k_pages.size(1)
    counts = case.query_starts.diff()
    plan = plan_attention(
        case.query_starts,
        case.context_lengths,
        tokens=len(case.q),
        group=heads // kv_heads,
        dtype=case.q.dtype,
        queries_max=int(counts.max()),
        context_max=int(case.context_lengths.max()),
    )
    if not has_parts:
        return plan
    return with_parts(
        plan,
        rows=len(counts),
        tokens=len(case.q),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
    )


def row_of(case: PagedCase, row: int) -> PagedCase:
    """The row alone."""
    start, end = case.query_starts[row : row + 2].tolist()
    return dataclasses.replace(
        case,
        q=case.q[start:end],
        block_tables=case.block_tables[row : row + 1],
        query_starts=torch.tensor([0, end - start], dtype=torch.int32),
        context_lengths=case.context_lengths[row : row + 1],
    )


@pytest.mark.parametrize(
    ("is_ahead", "heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (False, 4, 1, 64, 16, torch.float16),
        (True, 7, 1, 80, 256, torch.bfloat16),
        (False, 2, 2, 128, 64, torch.float16),
        (True, 2, 2, 128, 64, torch.float16),
        (False, 6, 2, 24, 5, torch.float16),
    ],
)
def test_own_keys_are_the_pages_keys(
    generator: torch.Generator,
    is_ahead: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Rows without a prefix, with one, of one token and of none: bit for bit the same."""
    case = paged_case(
        generator,
        counts=[150, 70, 1, 0, 1],
        contexts=[150, 100, 90, 0, 1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    paged = paged_attention(*case.arguments())
    assert torch.equal(paged_attention(*case.arguments(), own=own_of(case)), paged)
    assert excess_over(case, paged) <= 1.0


def test_own_keys_are_read_where_there_is_no_prefix(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[130, 130], contexts=[130, 140], dtype=torch.float16)
    expected = paged_attention(*case.arguments())
    k, v = own_of(case)
    k[:], v[:] = 0.0, 7.0
    result = paged_attention(*case.arguments(), own=(k, v))
    # Positions [0, 64) of row 0 are whole tiles to its tokens from 64 on; row 1 has a prefix.
    assert torch.equal(result[130:], expected[130:])
    assert float((result[64:130] - expected[64:130]).abs().min(-1).values.max()) > 1.0


def test_of_fp8_pages_the_codes_count(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[140], contexts=[140], head_dim=64, dtype=torch.float16)
    scales = torch.tensor([[0.01, 0.03], [0.02, 0.005]])
    own = own_of(case)
    pages = [
        fp8.encode(page.float().transpose(1, 2), scale).transpose(1, 2).contiguous()
        for page, scale in zip((case.k_pages, case.v_pages), scales, strict=True)
    ]
    narrow = dataclasses.replace(case, k_pages=pages[0], v_pages=pages[1])
    expected = paged_attention(*narrow.arguments(), scales=scales)
    assert torch.equal(paged_attention(*narrow.arguments(), scales=scales, own=own), expected)
    assert excess_over(widened(narrow, scales), expected) <= 1.0


def test_splits_are_fixed_and_change_little(
    generator: torch.Generator, tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same row whole, in splits, alone, beside others and in other chunks."""
    case = paged_case(
        generator,
        counts=[45, 1, 20, 9],
        contexts=[2 * SHORT_SPLIT + 20, 520, 20, SHORT_SPLIT + 1],
        heads=3,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float16,
    )
    whole = paged_attention(*case.arguments())
    split_every(SHORT_SPLIT, monkeypatch)
    split = paged_attention(*case.arguments())
    assert not torch.equal(split[:45], whole[:45])
    # A row of one split is the row unsplit.
    assert torch.equal(split[45:66], whole[45:66])
    assert excess_over(case, split) <= 1.0
    for row in range(4):
        start, end = case.query_starts[row : row + 2].tolist()
        alone = row_of(case, row)
        assert torch.equal(paged_attention(*alone.arguments()), split[start:end])
    # Chunks that end before, in and after a split: the last tile of the first sees another split.
    first = row_of(case, 0)
    context = int(first.context_lengths[0])
    for begin, end in ((0, 18), (18, 45)):
        chunk = dataclasses.replace(
            first,
            q=first.q[begin:end],
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lengths=torch.tensor([context - 45 + end], dtype=torch.int32),
        )
        assert torch.equal(paged_attention(*chunk.arguments()), split[begin:end])


def test_a_long_prefix_in_splits_of_their_true_size(generator: torch.Generator) -> None:
    case = paged_case(
        generator,
        counts=[20],
        contexts=[attention_plan.LONG_SPLIT + 10],
        heads=2,
        kv_heads=1,
        head_dim=16,
        block_size=64,
        dtype=torch.float16,
    )
    assert excess_over(case, paged_attention(*case.arguments())) <= 1.0


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 15, 16, 17, 70]), st.integers(0, 150)),
        min_size=1,
        max_size=3,
    ),
    block_size=st.sampled_from([5, 16, 64, 256]),
    group=st.integers(1, 7),
    head_dim=st.sampled_from([16, 24, 64, 96]),
    seed=st.integers(0, 2**31),
)
def test_ragged_chunks(
    rows: list[tuple[int, int]], block_size: int, group: int, head_dim: int, seed: int
) -> None:
    case = paged_case(
        torch.Generator().manual_seed(seed),
        counts=[count for count, _ in rows],
        contexts=[count + done for count, done in rows],
        heads=group,
        kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float16,
    )
    if not case.q.numel():
        return
    with pytest.MonkeyPatch.context() as patch:
        split_every(SHORT_SPLIT, patch)
        plan, out = plan_of(case), torch.full_like(case.q, float("nan"))
        assert paged_attention(*case.arguments(), plan, own=own_of(case), out=out) is out
        assert excess_over(case, out) <= 1.0


@pytest.mark.parametrize("programs", [1, 2, 16])
def test_rows_are_shared_by_as_many_programs_as_there_are(
    generator: torch.Generator, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have parts, beside those that have none."""
    split_every(SHORT_SPLIT, monkeypatch)
    case = paged_case(
        generator,
        counts=[18, 1, 20, 0, 17],
        contexts=[SHORT_SPLIT + 9, 5, 20, 0, 2 * SHORT_SPLIT + 3],
        heads=2,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float16,
    )
    monkeypatch.setattr(triton_launch, "_ROWS_APART", programs)
    grids: list[tuple[int, int, int]] = []

    class Noting:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            grids.append(grid)
            return combine_kernel[grid]

    monkeypatch.setattr(triton_launch, "combine_kernel", Noting())
    out = torch.full_like(case.q, float("nan"))
    assert excess_over(case, paged_attention(*case.arguments(), out=out)) <= 1.0
    assert (min(programs, 5), 1, 16) in grids


def test_one_room_serves_many_calls(generator: torch.Generator, short_splits: None) -> None:
    """Layer after layer, and a smaller step after a larger one."""
    heads = {"heads": 2, "kv_heads": 1}
    large = paged_case(
        generator, counts=[20, 1, 2], contexts=[140, 600, 10], **heads, dtype=torch.float16
    )
    small = paged_case(generator, counts=[20, 1], contexts=[140, 520], **heads, dtype=torch.float16)
    parts = plan_of(large).parts
    assert parts is not None
    for case in (large, small):
        expected = paged_attention(*case.arguments())
        plan = dataclasses.replace(plan_of(case, has_parts=False), parts=parts)
        for _ in range(2):
            assert torch.equal(paged_attention(*case.arguments(), plan), expected)


def test_a_room_too_small_is_refused(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1], contexts=[1100], dtype=torch.float16)
    plan = plan_of(case, has_parts=False)
    size = parts_size(plan, rows=1, tokens=1, kv_heads=2, group=2, head_dim=32)
    assert size.short == count_splits(1100) * 4
    for change in ({"short": 8}, {"head_dim": 64}):
        parts = Parts.of(dataclasses.replace(size, **change), case.q.device)
        with pytest.raises(ValueError, match=r"^parts: "):
            paged_attention(*case.arguments(), dataclasses.replace(plan, parts=parts))


def test_a_padded_row_leaves_the_given_result_alone(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1, 1, 30], contexts=[520, 0, 40], dtype=torch.float16)
    out = torch.full_like(case.q, 7.0)
    paged_attention(*case.arguments(), own=own_of_live(case), out=out)
    assert bool((out[1] == 7.0).all())
    for row, tokens in ((0, slice(0, 1)), (2, slice(2, 32))):
        alone = row_of(case, row)
        assert torch.equal(out[tokens], paged_attention(*alone.arguments()))


def own_of_live(case: PagedCase) -> Own:
    """As `own_of`, of a step with padding."""
    live = dataclasses.replace(
        case, context_lengths=case.context_lengths.maximum(case.query_starts.diff())
    )
    return own_of(dataclasses.replace(live, block_tables=case.block_tables.clamp(min=0)))


def test_bad_optional_arguments_are_named(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[2], contexts=[5])
    k, v = own_of(case)
    for own in ((k[:1], v), (k, v.double()), (k, v.transpose(1, 2))):
        with pytest.raises(ValueError, match=r"^own [kv]: "):
            paged_attention(*case.arguments(), own=own)
    for out in (case.q[:1].clone(), case.q.double(), torch.zeros(2, 4, 64)[:, :, :32]):
        with pytest.raises(ValueError, match=r"^out: "):
            paged_attention(*case.arguments(), out=out)
