"""Room for the parts of attention: what the worst step takes is enough for every other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels import attention_tasks
from kernels import variants
from kernels.attention.parts import Parts, PartsSize
from kernels.attention.plan import (
    LONG_ALIKE,
    LONG_SPLIT,
    PARTS_MAX,
    SPLIT,
    AttentionPlan,
    Tasks,
    long_parts,
    parts_size,
    tiles_for,
    worst_parts_size,
)

CPU = torch.device("cpu")
ZERO = torch.zeros(1, dtype=torch.int32)
NONE = Tasks(table=ZERO, total=ZERO, kept_starts=ZERO)


def plan_of(
    *,
    group: int,
    dtype: torch.dtype,
    queries_max: int,
    context_max: int,
    are_long: bool = False,
) -> AttentionPlan:
    """As `plan_attention` makes it, without its tables."""
    short, long = tiles_for(group, dtype)
    short_tokens = 0 if are_long else short // group
    return AttentionPlan(
        short=NONE,
        long=NONE,
        short_tile=short,
        long_tile=long,
        short_tokens=min(short_tokens, queries_max),
        has_short=not are_long,
        has_long=queries_max > short_tokens,
        context_max=context_max,
    )


@given(
    group=st.sampled_from([1, 3, 4, 8, 20]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    limits=st.tuples(st.integers(1, 64), st.integers(1, 600), st.integers(1, 40_000)),
    data=st.data(),
)
def test_the_worst_step_needs_the_most(
    group: int, dtype: torch.dtype, limits: tuple[int, int, int], data: st.DataObject
) -> None:
    rows, tokens, positions = (data.draw(st.integers(1, limit)) for limit in limits)
    queries_max, are_long = data.draw(st.integers(1, tokens)), data.draw(st.booleans())
    plan = plan_of(
        group=group,
        dtype=dtype,
        queries_max=queries_max,
        context_max=positions,
        are_long=are_long,
    )
    size = parts_size(plan, rows=rows, tokens=tokens, kv_heads=2, group=group, head_dim=64)
    worst = worst_parts_size(
        rows=limits[0],
        tokens=limits[1],
        positions=limits[2],
        kv_heads=2,
        group=group,
        head_dim=64,
        dtype=dtype,
        are_long=are_long,
    )
    assert size.short <= worst.short
    assert size.long <= worst.long


def test_the_worst_step_is_no_more_than_what_some_step_needs() -> None:
    """16 rows of 4 tokens, each with all the context there is."""
    plan = plan_of(group=4, dtype=torch.bfloat16, queries_max=4, context_max=5 * SPLIT)
    size = parts_size(plan, rows=16, tokens=64, kv_heads=2, group=4, head_dim=64)
    worst = worst_of(rows=16, tokens=64, positions=5 * SPLIT)
    assert size.short == worst.short == 64 * 5 * 8
    assert size.long == worst.long == 0
    Parts.of(worst, CPU).require_room(size)


def test_rows_beside_each_other_have_room_of_their_own() -> None:
    """And those that take turns no more than the larger of both."""
    size = worst_of(rows=3, tokens=200, positions=LONG_SPLIT + 1)
    assert 0 < size.short < size.long
    apart = Parts.of(size, CPU)
    assert apart.are_apart
    assert [len(kept.sums) for kept in (apart.short, apart.long)] == [size.short, size.long]
    with variants.forced("chunks-beside-decodes", False):
        shared = Parts.of(size, CPU)
    assert not shared.are_apart
    assert len(shared.short.sums) == size.long
    for parts in (apart, shared):
        parts.require_room(size)
        with pytest.raises(ValueError, match=rf"^parts: must hold {size.long + 8} parts"):
            parts.require_room(replace(size, long=size.long + 8))


@given(short=st.integers(0, 99), long=st.integers(0, 99), is_apart=st.booleans())
def test_each_begins_where_nothing_is_compiled_anew(short: int, long: int, is_apart: bool) -> None:
    with variants.forced("chunks-beside-decodes", is_apart):
        parts = Parts.of(PartsSize(short=short, long=long, head_dim=80), CPU)
    for kept in (parts.short, parts.long):
        for each in (kept.sums, kept.tops, kept.totals):
            assert each.data_ptr() % 16 == 0


@pytest.mark.parametrize("positions", [1 << 17, 1 << 20, 1 << 24])
def test_long_contexts_do_not_make_the_room_of_decode_larger(positions: int) -> None:
    """An 8B model's: 256 rows of 131k tokens took 4.4 GB, of 1M tokens 35 GB."""
    decode = worst_of(rows=256, tokens=256, positions=positions, kv_heads=8)
    assert decode.short == 256 * PARTS_MAX * 32
    # With prompts, a few parts more for each time that contexts are twice as long.
    tokens, twice = 8192, (positions - 1).bit_length() - LONG_SPLIT.bit_length() + 1
    worst = worst_of(rows=256, tokens=tokens, positions=positions, kv_heads=8)
    assert worst.short == decode.short
    assert worst.long == long_parts(tokens, positions) * 32
    assert worst.long <= tokens * LONG_ALIKE * (twice + 1) * 32


def worst_of(*, rows: int, tokens: int, positions: int, kv_heads: int = 2) -> PartsSize:
    return worst_parts_size(
        rows=rows,
        tokens=tokens,
        positions=positions,
        kv_heads=kv_heads,
        group=4,
        head_dim=64,
        dtype=torch.bfloat16,
    )


def test_longest_first_leaves_programs_idle_for_less_time() -> None:
    """Of batches of many lengths; of even ones it changes nothing."""
    for name, contexts in attention_tasks.batches().items():
        before = attention_tasks.fraction(attention_tasks.row_after_row(contexts, SPLIT))
        after = attention_tasks.fraction(attention_tasks.planned(contexts))
        # A row alone has fewer tasks than there are programs.
        assert after >= before or len(contexts) == 1, name
        if " to " in name or "lognormal" in name:
            assert after >= before + 0.08, name
