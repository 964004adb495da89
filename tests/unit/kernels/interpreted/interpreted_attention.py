"""Paged attention and its plan. One step of the kernel's inner loop takes about 2.5 ms here."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import plan as attention_plan
from kernels.attention import triton_launch
from kernels.attention.paged_attention import paged_attention, paged_attention_reference
from kernels.attention.plan import SPLIT, parts_size, plan_attention, tiles_for
from kernels.attention.plan_reference import attention_plan_reference, short_splits
from tests.unit.kernels.paged_cases import PagedCase, excess_over, paged_case


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


def excess_of(case: PagedCase) -> float:
    """Of the kernel over what arithmetic allows: above 1 is wrong."""
    result = paged_attention(*case.arguments(), **case.options())
    assert result.shape == case.q.shape
    assert result.dtype == case.q.dtype
    return excess_over(case, result)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.float32),
        (6, 2, 80, torch.float32),
        (20, 1, 8, torch.float32),
        (4, 1, 128, torch.bfloat16),
        (14, 2, 96, torch.bfloat16),
        (3, 1, 256, torch.float16),
        (7, 1, 80, torch.float16),
    ],
)
def test_heads_and_types(
    generator: torch.Generator, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        generator,
        counts=[1, 0, 3, 30],
        contexts=[1, 9, 19, 33],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert excess_of(case) <= 1.0


@pytest.mark.parametrize("block_size", [5, 16, 256])
def test_borders_of_blocks_and_splits(generator: torch.Generator, block_size: int) -> None:
    borders = [1, 15, 16, 17, block_size - 1, block_size, block_size + 1]
    contexts = [*borders, SPLIT, SPLIT + SPLIT // 2 - 1, SPLIT + SPLIT // 2, 2 * SPLIT + 3]
    case = paged_case(
        generator,
        counts=[1] * len(contexts),
        contexts=contexts,
        heads=2,
        kv_heads=1,
        head_dim=16,
        block_size=block_size,
        dtype=torch.float16,
    )
    assert excess_of(case) <= 1.0


def test_prefill_with_and_without_a_prefix(generator: torch.Generator) -> None:
    """Tiles of query tokens that end anywhere, and a split row of several tokens beside them."""
    case = paged_case(
        generator,
        counts=[40, 33, 0, 2, 1, 65],
        contexts=[40, 100, 0, SPLIT + 1, 70, 130],
        heads=3,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float16,
    )
    assert excess_of(case) <= 1.0


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=4),
    block_size=st.sampled_from([4, 16]),
    group=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_ragged_steps(rows: list[tuple[int, int]], block_size: int, group: int, seed: int) -> None:
    case = paged_case(
        torch.Generator().manual_seed(seed),
        counts=[count for count, _ in rows],
        contexts=[count + done for count, done in rows],
        heads=group,
        kv_heads=1,
        head_dim=16,
        block_size=block_size,
        dtype=torch.float16,
    )
    if case.q.numel():
        assert excess_of(case) <= 1.0


def test_heads_too_wide_for_the_kernel_take_the_torch_path(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[2], contexts=[3], head_dim=264)
    assert torch.equal(
        paged_attention(*case.arguments()), paged_attention_reference(*case.arguments())
    )


def test_bits_do_not_depend_on_chunks_or_mates(generator: torch.Generator) -> None:
    """Nor on what the host knows of the step."""
    case = paged_case(
        generator,
        counts=[90, 1, 1],
        contexts=[90, SPLIT + 60, 7],
        heads=4,
        dtype=torch.float16,
    )
    whole = paged_attention(*case.arguments())
    for first, count in ((0, 40), (40, 50)):
        chunk = dataclasses.replace(
            case,
            q=case.q[first : first + count],
            block_tables=case.block_tables[:1],
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([first + count], dtype=torch.int32),
        )
        result = paged_attention(*chunk.arguments())
        assert torch.equal(result, whole[first : first + count])
    alone = dataclasses.replace(
        case,
        q=case.q[90:91],
        block_tables=case.block_tables[1:2],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lengths=case.context_lengths[1:2],
    )
    plan = plan_attention(
        alone.query_starts,
        alone.context_lengths,
        tokens=1,
        group=2,
        dtype=torch.float16,
        queries_max=1,
        context_max=SPLIT + 60,
    )
    assert not plan.has_long
    assert torch.equal(paged_attention(*alone.arguments(), plan), whole[90:91])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (40, 5), (200, 64), (SPLIT + 1, 16)])
def test_nobody_sees_behind_a_window(
    generator: torch.Generator, window: int, block_size: int, softcap: float | None
) -> None:
    """Nor are the blocks behind it touched, which may be another's by then."""
    case = paged_case(
        generator,
        counts=[1, 30, 1],
        contexts=[SPLIT + 300, 90, 7],
        heads=2,
        kv_heads=1,
        block_size=block_size,
        dtype=torch.float16,
        window=window,
        softcap=softcap,
    )
    assert excess_of(case) <= 1.0


def test_a_poisoned_row_stays_alone(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1, 2, 1], contexts=[20, 20, 20])
    clean = paged_attention(*case.arguments())
    case.v_pages[int(case.block_tables[1, 0])] = float("nan")
    poisoned = paged_attention(*case.arguments())
    assert poisoned[1:3].isnan().all()
    assert torch.equal(poisoned[[0, 3]], clean[[0, 3]])


def test_padded_rows_are_not_written(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without context, as a padded batch has, costs nothing and leaves its output alone."""
    case = paged_case(generator, counts=[1, 1, 1], contexts=[5, 0, 600])
    marked = torch.full_like(case.q, 7.0)
    monkeypatch.setattr(torch, "empty_like", lambda x, memory_format: marked)
    result = paged_attention(*case.arguments())
    assert bool((result[1] == 7.0).all())
    others = dataclasses.replace(
        case,
        q=case.q[[0, 2]],
        block_tables=case.block_tables[[0, 2]],
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lengths=case.context_lengths[[0, 2]],
    )
    assert excess_over(others, result[[0, 2]]) <= 1.0


def test_queries_may_be_a_view_of_fused_qkv(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[3, 1], contexts=[18, 5])
    fused = torch.zeros(4, 4 * 32 + 77)
    fused[:, : 4 * 32] = case.q.flatten(1)
    view = dataclasses.replace(case, q=fused[:, : 4 * 32].view(4, 4, 32))
    expected = paged_attention(*case.arguments())
    assert torch.equal(paged_attention(*view.arguments()), expected)


def test_no_rows(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[], contexts=[])
    assert paged_attention(*case.arguments()).shape == (0, 4, 32)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    contexts=st.lists(st.integers(0, 1500), min_size=1, max_size=9),
    tasks_wanted=st.integers(1, 40),
)
def test_tasks_of_decodes_have_several_splits(contexts: list[int], tasks_wanted: int) -> None:
    """As many as programs that have two each would have too many of."""
    lengths = torch.tensor(contexts, dtype=torch.int32)
    starts = torch.nn.functional.pad((lengths > 0).cumsum(0), (1, 0)).int()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SPLIT": 8, "PARTS_MAX": 16, "TASK_SPLITS": 3, "_TILE": 4}.items():
            patch.setattr(attention_plan, name, value)
        plan = plan_attention(
            starts, lengths, tokens=int(starts[-1]), group=1, dtype=torch.bfloat16, queries_max=1,
            context_max=max(1, *contexts), tasks_wanted=tasks_wanted,
        )  # fmt: skip
        tasks, _, kept, _ = attention_plan_reference(starts, lengths, 16, 64, tasks_wanted)
        splits = sum(short_splits(context) for context in contexts if context)
    count = int(plan.short.total[0])
    assert [tuple(task) for task in plan.short.table[:count].tolist()] == tasks
    assert plan.short.kept_starts.tolist() == kept
    assert splits / 3 <= count <= splits
    assert count == splits or splits >= 1.5 * tasks_wanted


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 1, 2, 3, 4, 5, 70]), st.integers(-1, 1500)), max_size=6
    ),
    group=st.sampled_from([1, 4, 7]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    are_long=st.booleans(),
)
def test_plan(rows: list[tuple[int, int]], group: int, dtype: torch.dtype, are_long: bool) -> None:
    """Splits of 8 and 32, of which rows may keep 16: as contexts of hundreds of thousands."""
    counts = torch.tensor([count for count, _ in rows], dtype=torch.int32)
    # Padding has no context.
    contexts = torch.tensor([(c + d) * (d >= 0) for c, d in rows], dtype=torch.int32)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    most = int(max([1, *contexts.tolist()]))
    with pytest.MonkeyPatch.context() as patch:
        # Rows in several tiles, too.
        sizes = {"SPLIT": 8, "PARTS_MAX": 16, "LONG_SPLIT": 32, "LONG_ALIKE": 2, "_TILE": 4}
        for name, value in sizes.items():
            patch.setattr(attention_plan, name, value)
        plan = plan_attention(
            starts, contexts, tokens=int(counts.sum()), group=group, dtype=dtype,
            context_max=most, are_long=are_long,
        )  # fmt: skip
        tiles = tiles_for(group, dtype)
        short_tokens = 0 if are_long else tiles[0] // group
        expected = attention_plan_reference(starts, contexts, short_tokens, tiles[1] // group)
        shorts, longs, *kept = expected
        worst = parts_size(
            plan, rows=len(rows), tokens=int(counts.sum()), kv_heads=1, group=1, head_dim=16
        )
    for part, tasks, starts_kept, room in (
        (plan.short, shorts, kept[0], worst.short),
        (plan.long, longs, kept[1], worst.long),
    ):
        assert [tuple(task) for task in part.table[: int(part.total[0]),].tolist()] == tasks
        assert part.kept_starts.tolist() == starts_kept
        assert len(part.table) >= len(tasks)
        assert starts_kept[-1] <= room


@pytest.mark.parametrize("window", [None, 90])
def test_a_token_that_decodes_and_the_same_one_in_a_chunk(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Where every row is long; over several splits, and with parts of each."""
    for module in (attention_plan, triton_launch):
        monkeypatch.setattr(module, "LONG_SPLIT", 64)
        monkeypatch.setattr(module, "LONG_ALIKE", 2)
    case = paged_case(
        generator, counts=[40, 1], contexts=[300, 7], heads=4, head_dim=16, dtype=torch.float16
    )
    case = dataclasses.replace(case, window=window)

    def attended(case: PagedCase) -> torch.Tensor:
        plan = plan_attention(
            case.query_starts, case.context_lengths, tokens=len(case.q), group=2,
            dtype=torch.float16, context_max=300, are_long=True,
        )  # fmt: skip
        assert not plan.has_short
        return paged_attention(*case.arguments(), plan, **case.options())

    whole = attended(case)
    assert excess_over(case, whole) <= 1.0
    for first, count in ((0, 1), (13, 1), (39, 1), (5, 2), (3, 33)):
        chunk = dataclasses.replace(
            case,
            q=case.q[first : first + count],
            block_tables=case.block_tables[:1],
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([260 + first + count], dtype=torch.int32),
        )
        assert torch.equal(attended(chunk), whole[first : first + count])


def test_a_bound_too_low_writes_no_task_beyond_its_room() -> None:
    starts, contexts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9000]).int()
    plan = plan_attention(
        starts, contexts, tokens=1, group=1, dtype=torch.float16, context_max=2 * SPLIT
    )
    assert (len(plan.short.table), int(plan.short.total[0])) == (2, 2)


def test_contexts_too_long_for_splits_of_one_size(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows in larger splits, and rows that keep too many parts as long ones."""
    for module in (attention_plan, triton_launch):
        for name, value in {"SPLIT": 64, "PARTS_MAX": 4, "LONG_SPLIT": 64, "LONG_ALIKE": 2}.items():
            monkeypatch.setattr(module, name, value)
    case = paged_case(
        generator,
        counts=[1, 2, 1, 3, 20, 1],
        contexts=[600, 300, 256, 70, 400, 257],
        heads=3,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float16,
    )
    windowed = dataclasses.replace(case, window=150)
    assert excess_of(windowed) <= 1.0
    whole = paged_attention(*case.arguments())
    assert excess_over(case, whole) <= 1.0
    for row, tokens in ((0, slice(0, 1)), (1, slice(1, 3)), (5, slice(27, 28))):
        alone = dataclasses.replace(
            case,
            q=case.q[tokens],
            block_tables=case.block_tables[row : row + 1],
            query_starts=torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32),
            context_lengths=case.context_lengths[row : row + 1],
        )
        assert torch.equal(paged_attention(*alone.arguments()), whole[tokens])


def test_bad_arguments_are_named(generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1], contexts=[5])
    starts, contexts = case.query_starts, case.context_lengths
    room: dict[str, Any] = {"tokens": 1, "context_max": 5}
    with pytest.raises(ValueError, match=r"^group: "):
        plan_attention(starts, contexts, group=65, dtype=torch.float32, **room)
    with pytest.raises(ValueError, match=r"^query_starts: "):
        plan_attention(starts.long(), contexts, group=1, dtype=torch.float32, **room)
